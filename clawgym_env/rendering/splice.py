"""Cutting a rendered conversation where the ids of sampled turns go in.

The conversation is rendered with a slot in place of each sampled turn, and the text is cut at the
slots. What the template does not let us cut is refused with a reason, and the turn is rendered
like any other message. This module knows text alone, no ids; nothing here raises where the plain
rendering works.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clawgym_env.calls import Message, Tool
from clawgym_env.errors import RenderError
from clawgym_env.rendering.chat_text import ChatText, GenerationPrompt, MarkedText
from clawgym_env.rendering.marks import Marks


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a sampled turn could not be put back.

    Attributes:
        reason: One clause.
        by_shape: True where the template only does not show a slot as it shows the turn; False
            where it shows the turn otherwise than it was sampled, so that it must differ.
    """

    reason: str
    by_shape: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """A rendered conversation in pieces.

    Attributes:
        pieces: Marked text around the turns, one more than there are turns.
        turns: Indices of the messages whose ids go between the pieces.
        refused: The other sampled turns.
        marks: The marks in the pieces.
    """

    pieces: tuple[str, ...]
    turns: tuple[int, ...]
    refused: Mapping[int, Refusal]
    marks: Marks


def cut_at_turns(
    chat: ChatText,
    prompt: GenerationPrompt,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    turns: Mapping[int, bool],
) -> Cut:
    """Render the conversation up to a generation prompt and cut it at sampled turns.

    Args:
        chat: Renders the text.
        prompt: The generation prompt.
        messages: The conversation.
        tools: The tools offered.
        turns: Index of each sampled turn, and whether it was sampled with reasoning.

    Raises:
        RenderError: If the template refuses the conversation as it is, without slots.
    """
    wanted = dict(turns)
    refused: dict[int, Refusal] = {}
    while wanted:
        try:
            shown = chat.render(messages, tools, slots=wanted)
        except RenderError:
            reason = "the template refuses a conversation with a placeholder in it"
            refused |= {index: Refusal(reason, by_shape=True) for index in wanted}
            break
        pieces, bad = _cut(shown, prompt, wanted)
        if not bad:
            return Cut(tuple(pieces), tuple(sorted(wanted)), refused, shown.marks)
        refused |= bad
        wanted = {index: value for index, value in wanted.items() if index not in bad}
    plain = chat.render(messages, tools)
    return Cut((plain.text,), (), refused, plain.marks)


def _cut(
    shown: MarkedText, prompt: GenerationPrompt, wanted: Mapping[int, bool]
) -> tuple[list[str], dict[int, Refusal]]:
    text, pieces, bad = shown.text, [], {}
    done = 0
    for index, with_reasoning in sorted(wanted.items()):
        content = shown.marks.slot_text(2 * index)
        reasoning = shown.marks.slot_text(2 * index + 1)
        end = text.find(content, done)
        start = text.find(reasoning, done, end) if with_reasoning else end
        if end < 0 or text.count(content) != 1 or text.count(reasoning) > 1:
            reason = f"the template does not show message {index} (assistant) once and in order"
            bad[index] = Refusal(reason, by_shape=True)
            continue
        if start < 0:
            reason = f"the template leaves out the reasoning of message {index} (assistant)"
            bad[index] = Refusal(reason, by_shape=False)
            continue
        before = prompt.before_turn(text[done:start])
        if before is None:
            reason = f"the template shows message {index} (assistant) in a form of its own"
            bad[index] = Refusal(reason, by_shape=True)
            continue
        pieces.append(before)
        done = end + len(content)
    pieces.append(text[done:])
    return pieces, bad


def text_after_turn(
    chat: ChatText,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    turn: int,
    stops: Sequence[str],
) -> tuple[str, Marks] | None:
    """The marked text that the template writes behind a turn, from the turn's end token on.

    This is the way without slots, for templates that refuse them. It holds only where the template
    renders the conversation up to the turn as the start of the whole conversation; None elsewhere.

    Args:
        chat: Renders the text.
        messages: The conversation.
        tools: The tools offered.
        turn: Index of the turn.
        stops: Texts of the tokens that end a reply.
    """
    try:
        whole = chat.render(messages, tools)
        upto = chat.render(
            messages[: turn + 1], tools, add_generation_prompt=False, marks=whole.marks
        )
    except RenderError:
        return None
    if not whole.text.startswith(upto.text):
        return None
    # A stop token's text behind an opening mark is text, not a token.
    end = re.search(
        rf"(?<!{upto.marks.opening})(?:{'|'.join(map(re.escape, stops))})\s*\Z", upto.text
    )
    return (whole.text[end.start() :], upto.marks) if end else None


def without_stop(text: str, stop: str) -> str:
    """The text behind a turn without the end token that the sampled ids already bring."""
    rest = text.lstrip()
    return rest[len(stop) :] if stop and rest.startswith(stop) else text
