"""Policies without a model: replies from a script or from a function.

They know nothing of harnesses or tasks; a script is a plain sequence of replies. Invariant: each
rollout walks its own copy of the script from the start, whatever other rollouts do meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence

from clawgym_env.calls import Message, PolicyRequest, Reply
from clawgym_env.errors import PolicyError

Scripted = Reply | Message | str
"""What a script may hold: a full reply, a message, or text in the model's native format."""

Script = Sequence[Scripted]


class ScriptedPolicy:
    """Answers the k-th main call of a rollout with the k-th entry of that rollout's script.

    Args:
        script: One of: a sequence, played to every rollout from its start; a mapping from rollout
            id to sequence; a function from rollout id to sequence, called once a rollout, at its
            first call.
        auxiliary: The answer to every auxiliary call (titles, probes); these use no entry up.

    Raises:
        PolicyError: By :meth:`complete`, where the script is used up or there is none.
    """

    def __init__(
        self,
        script: Script | Mapping[str, Script] | Callable[[str], Script],
        *,
        auxiliary: Scripted = "OK",
    ) -> None:
        self._source = script
        self._auxiliary = as_reply(auxiliary)
        self._scripts: dict[str, Script] = {}
        self._position: dict[str, int] = {}

    async def complete(self, request: PolicyRequest) -> Reply:
        """The next reply of this rollout's script."""
        call = request.call
        if call.kind == "auxiliary":
            return self._auxiliary
        script = self._script(call.rollout_id)
        position = self._position.get(call.rollout_id, 0)
        if position >= len(script):
            raise PolicyError(
                f"the script of rollout {call.rollout_id!r} holds {len(script)} replies, but the "
                f"harness made main call number {position + 1}; end the script with a reply that "
                "makes the harness stop"
            )
        self._position[call.rollout_id] = position + 1
        return as_reply(script[position])

    def _script(self, rollout_id: str) -> Script:
        found = self._scripts.get(rollout_id)
        if found is None:
            found = self._scripts[rollout_id] = self._look_up(rollout_id)
        return found

    def _look_up(self, rollout_id: str) -> Script:
        if isinstance(self._source, Mapping):
            if rollout_id not in self._source:
                raise PolicyError(f"no script for rollout {rollout_id!r} in the mapping given")
            return self._source[rollout_id]
        return self._source(rollout_id) if callable(self._source) else self._source


class FunctionPolicy:
    """Answers each call with what a function of the request returns, plain or async.

    Args:
        function: Takes the request; returns a reply, a message or text, or an awaitable of one.
    """

    def __init__(self, function: Callable[[PolicyRequest], Scripted | Awaitable[Scripted]]) -> None:
        self._function = function

    async def complete(self, request: PolicyRequest) -> Reply:
        """What the function returns for this request."""
        answer = self._function(request)
        if inspect.isawaitable(answer):
            answer = await answer
        return as_reply(answer)


def as_reply(entry: Scripted) -> Reply:
    """Wrap a message or text as a reply; a reply is returned as it is.

    Raises:
        PolicyError: The entry is none of the three.
    """
    if isinstance(entry, Reply):
        return entry
    if isinstance(entry, Message):
        return Reply(message=entry)
    if isinstance(entry, str):
        return Reply(text=entry)
    raise PolicyError(f"a reply must be a Reply, a Message or a str, not {type(entry).__name__}")
