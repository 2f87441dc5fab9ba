"""Why a conversation does not extend, token by token, the call that it continued.

Compares by meaning and finds the first place that differs, in one clause for the captured call.
Messages are counted from 0, as in the request. This module knows nothing of ids or templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clawgym_env.calls import Tool
from clawgym_env.rendering.meaning import Meaning, without_reasoning
from clawgym_env.rendering.splice import Refusal


@dataclass(frozen=True, slots=True)
class History:
    """What a call was asked with: the meaning of its messages, and its tools."""

    keys: tuple[Meaning, ...]
    tools: tuple[Tool, ...]

    def is_start_of(self, other: History) -> bool:
        """Whether ``other`` goes on from this history under the same tools."""
        size = len(self.keys)
        return (
            size < len(other.keys) and self.keys == other.keys[:size] and self.tools == other.tools
        )


def changed_since(
    call_id: str, then: History | None, now: History, turn: int, refused: Mapping[int, Refusal]
) -> str:
    """Why message ``turn`` of ``now``, sampled by a call, no longer stands behind its prompt.

    Args:
        call_id: The call that sampled the turn.
        then: What that call was asked with; None where it was not rendered here.
        now: The conversation.
        turn: Index of the turn.
        refused: Turns that the template did not let stand as they were sampled.
    """
    if then is None:
        return f"the prompt of call {call_id} was not rendered by this conversation"
    if then.tools != now.tools:
        return f"the tools changed since call {call_id}"
    for index, (old, new) in enumerate(zip(then.keys, now.keys[:turn], strict=False)):
        if old != new:
            return _difference(index, old, new, call_id)
    if len(then.keys) != turn:
        return (
            f"call {call_id} was asked with {len(then.keys)} messages, and its reply now follows "
            f"{turn}"
        )
    earlier = [refused[index].reason for index in sorted(refused) if index < turn]
    return earlier[0] if earlier else f"the template rendered turns before call {call_id} anew"


def reply_is_gone(
    call_id: str,
    replies: Sequence[Meaning],
    now: History,
    place: int,
    refused: Mapping[int, Refusal],
) -> str:
    """Why the reply of a call does not stand at ``place``, where the conversation continues it.

    Args:
        call_id: The call.
        replies: What it replied, and what others replied to the same conversation.
        now: The conversation.
        place: Index at which the reply belongs.
        refused: As above.
    """
    if place in refused:
        return refused[place].reason
    new = now.keys[place]
    if new[0] != "assistant":
        return f"the reply of call {call_id} is missing before message {place} ({new[0]})"
    if any(without_reasoning(reply) == new for reply in replies):
        return f"message {place} (assistant) came back without its reasoning, call {call_id}"
    return f"message {place} (assistant) was rewritten by the harness since call {call_id}"


def _difference(index: int, old: Meaning, new: Meaning, call_id: str) -> str:
    if old[0] != new[0]:
        return f"message {index} is {new[0]} where call {call_id} had {old[0]}"
    what = "was rewritten by the harness" if new[0] == "assistant" else "changed"
    return f"message {index} ({new[0]}) {what} since call {call_id}"
