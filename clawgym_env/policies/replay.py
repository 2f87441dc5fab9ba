"""The policy that gives a captured rollout's replies again.

It knows the captured record and nothing of how it came to be. Invariant: a reply is given only to
the conversation that it was captured in; a conversation that went another way is an error that
names the call and the first difference, never a guess.

Ids of tool calls are compared by their order of appearance, because a run makes new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from clawgym_env.calls import (
    CapturedCall,
    ImagePart,
    Message,
    ModelCall,
    PolicyRequest,
    Reply,
    Rollout,
)
from clawgym_env.errors import PolicyError


class ReplayPolicy:
    """Answers calls with the replies captured in one rollout; serves any number of new rollouts.

    A call gets the reply of the oldest captured call that has the same conversation and was not
    used yet in this new rollout, so that parallel calls may arrive in another order. Replies that
    never reached the harness are left out.

    Args:
        rollout: The captured rollout.
        normalise: Applied to every text before two are compared: where a harness writes dates or
            temporary paths into its prompts, it replaces them by something fixed.
    """

    def __init__(self, rollout: Rollout, *, normalise: Callable[[str], str] | None = None) -> None:
        self._rollout_id = rollout.rollout_id
        self._normalise = normalise or _unchanged
        self._captured = [c for c in rollout.calls if c.delivered is not False]
        self._lines = [self._describe(c.call) for c in self._captured]
        self._unused: dict[str, list[int]] = {}

    async def complete(self, request: PolicyRequest) -> Reply:
        """The captured reply to this conversation.

        Raises:
            PolicyError: All replies are used up, or no unused one has this conversation; the
                message names the oldest unused call and its first difference.
        """
        call = request.call
        unused = self._unused.setdefault(call.rollout_id, list(range(len(self._captured))))
        if not unused:
            raise PolicyError(
                f"rollout {self._rollout_id!r} was captured with {len(self._captured)} delivered "
                f"calls and all are replayed, but the harness made another (call {call.index})"
            )
        lines = self._describe(call)
        for position in unused:
            if self._lines[position] == lines:
                unused.remove(position)
                return _reply(self._captured[position], with_ids=request.prompt_ids is not None)
        expected = self._captured[unused[0]].call
        raise PolicyError(
            f"call {call.index} does not follow rollout {self._rollout_id!r}: its captured call "
            f"{expected.index} ({expected.call_id}) differs at "
            f"{_first_difference(self._lines[unused[0]], lines)}"
        )

    def _describe(self, call: ModelCall) -> list[tuple[str, str]]:
        """The conversation as (place, value) pairs, alike for conversations that mean the same."""
        order: dict[str, int] = {}
        lines: list[tuple[str, str]] = [("kind", call.kind)]
        for index, message in enumerate(call.messages):
            place = f"messages[{index}]"
            lines += ((f"{place}.{name}", value) for name, value in self._fields(message, order))
        lines += ((f"tools[{index}].name", tool.name) for index, tool in enumerate(call.tools))
        return lines

    def _fields(self, message: Message, order: dict[str, int]) -> Iterator[tuple[str, str]]:
        yield "role", message.role
        yield "content", self._normalise(message.text)
        if isinstance(message.content, tuple):
            for part in message.content:
                if isinstance(part, ImagePart):
                    yield "content (image)", part.url
        for position, tool_call in enumerate(message.tool_calls):
            place = f"tool_calls[{position}]"
            number = order.setdefault(tool_call.id, len(order))
            yield f"{place}.id", f"number {number}"
            yield f"{place}.name", tool_call.name
            yield f"{place}.arguments", self._normalise(tool_call.arguments)
        if message.tool_call_id is not None:
            yield "tool_call_id", f"number {order.get(message.tool_call_id, -1)}"


def _reply(captured: CapturedCall, *, with_ids: bool) -> Reply:
    completion = captured.completion
    if with_ids and completion.token_ids is not None:
        return Reply(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
        )
    return Reply(
        message=completion.message,
        finish_reason=completion.finish_reason,
        policy_version=completion.policy_version,
    )


def _first_difference(expected: list[tuple[str, str]], came: list[tuple[str, str]]) -> str:
    for (place, wanted), (came_place, got) in zip(expected, came, strict=False):
        if place != came_place:
            return f"{place}: expected it here, but {came_place} came"
        if wanted != got:
            return f"{place}: {_where_text_differs(wanted, got)}"
    if len(expected) > len(came):
        return f"{expected[len(came)][0]}: expected, but the conversation ends before it"
    return f"{came[len(expected)][0]}: not expected, the captured conversation ends before it"


def _where_text_differs(wanted: str, got: str) -> str:
    same = 0
    for left, right in zip(wanted, got, strict=False):
        if left != right:
            break
        same += 1
    start = max(0, same - 20)
    return (
        f"from character {same} on, expected {wanted[start : same + 40]!r}, "
        f"got {got[start : same + 40]!r}"
    )


def _unchanged(text: str) -> str:
    return text
