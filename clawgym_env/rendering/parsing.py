"""Reply text to message: Hermes-style tool calls and ``<think>`` reasoning.

    <think>
    reasoning
    </think>

    content
    <tool_call>
    {"name": "bash", "arguments": {"command": "ls"}}
    </tool_call>

This module works on text alone, without a tokenizer. Its invariant: nothing a model says is lost
or raised. A reply that is not of the format becomes plain text, as a model server would deliver
it, with ``error`` saying why. Text after the first tool call is not part of the message (servers
drop it too); the sampled ids keep it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clawgym_env.calls import Message, Tool, ToolCall
from clawgym_env.rendering.meaning import THINK_CLOSE, THINK_OPEN, parse_json

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """An assistant message, and why the reply was not of the model's format (None if it was)."""

    message: Message
    error: str | None = None


def parse_text(text: str, tools: Sequence[Tool] = (), *, in_reasoning: bool = False) -> ParsedReply:
    """Parse a reply in Hermes style.

    Args:
        text: The reply without its stop token.
        tools: The tools offered. Names are not checked against them: a call of an unknown tool is
            delivered, as a model server would, and the harness answers it.
        in_reasoning: Whether the prompt already opened ``<think>``.
    """
    del tools
    reasoning, body, unclosed = split_reasoning(text, in_reasoning=in_reasoning)
    if unclosed:
        return plain_reply(None, text, f"{THINK_OPEN} is not closed by {THINK_CLOSE}")
    opening = body.find(CALL_OPEN)
    before = body if opening < 0 else body[:opening]
    if CALL_CLOSE in before:
        return plain_reply(reasoning, body, stray_close(CALL_CLOSE, CALL_OPEN))
    calls = []
    while opening >= 0:
        start = opening + len(CALL_OPEN)
        end = _block_end(body, start)
        if end < 0:
            return plain_reply(reasoning, body, f"{CALL_OPEN} is not closed by {CALL_CLOSE}")
        call = call_from_json(body[start:end])
        if isinstance(call, str):
            return plain_reply(reasoning, body, call)
        calls.append(call)
        opening = body.find(CALL_OPEN, end)
    return ParsedReply(assistant_message(reasoning, before, calls))


def split_reasoning(text: str, *, in_reasoning: bool) -> tuple[str | None, str, bool]:
    """Reasoning, the text after it, and whether the reasoning was left open."""
    if not in_reasoning:
        stripped = text.lstrip()
        if not stripped.startswith(THINK_OPEN):
            return None, text, False
        text = stripped[len(THINK_OPEN) :]
    reasoning, close, rest = text.partition(THINK_CLOSE)
    return (reasoning, rest, False) if close else (None, text, True)


def assistant_message(reasoning: str | None, content: str, calls: Sequence[ToolCall]) -> Message:
    """The message, with the white space that only separates its pieces taken away.

    That is: newlines around the reasoning, newlines between reasoning and content, and white space
    between content and the first tool call. All else is kept to the letter.
    """
    if reasoning is not None:
        reasoning = reasoning.strip("\n") or None
        content = content.lstrip("\n")
    if calls:
        content = content.rstrip()
    return Message(
        role="assistant",
        content=None if calls and not content else content,
        reasoning=reasoning,
        tool_calls=tuple(calls),
    )


def plain_reply(reasoning: str | None, body: str, error: str) -> ParsedReply:
    """The reply as plain text, because of ``error``."""
    return ParsedReply(assistant_message(reasoning, body, ()), error)


def stray_close(close: str, opening: str) -> str:
    """The error clause of a closing tag that nothing opened."""
    return f"{close} without {opening}"


def new_call(name: str, arguments: str) -> ToolCall:
    """A tool call with a fresh id of the shape that OpenAI's API gives."""
    return ToolCall(f"call_{secrets.token_hex(12)}", name, arguments)


def call_from_json(block: str) -> ToolCall | str:
    """The call in ``{"name": …, "arguments": …}``, or why there is none.

    The arguments are the text between their braces exactly as it stands in ``block``; ``{}`` where
    the key is missing.
    """
    parsed = parse_json(block)
    if parsed is None:
        return f"the tool call is not valid JSON: {_short(block)}"
    if not isinstance(parsed[0], dict):
        return f"the tool call is not a JSON object: {_short(block)}"
    name = parsed[0].get("name")
    if not isinstance(name, str) or not name:
        return f"the tool call has no name: {_short(block)}"
    if not name.isprintable():
        return f"the tool call's name is not printable: {_short(block)}"
    return new_call(name, _members(block).get("arguments", "{}"))


def _block_end(body: str, start: int) -> int:
    """Where the closing tag of the call that starts at ``start`` is, or -1.

    The tags may also stand inside the JSON's strings, so the JSON is read first.
    """
    try:
        _, end = _DECODER.raw_decode(body, _skip(body, start))
    except (ValueError, RecursionError):
        end = start
    closing = _skip(body, end)
    return closing if body.startswith(CALL_CLOSE, closing) else body.find(CALL_CLOSE, start)


def _members(block: str) -> dict[str, str]:
    """The members of a valid JSON object: key to the value's own text (the last of equal keys)."""
    members: dict[str, str] = {}
    at = _skip(block, _skip(block, 0) + 1)
    while block[at] != "}":
        key: Any
        key, at = _DECODER.raw_decode(block, at)
        start = _skip(block, _skip(block, at) + 1)
        _, end = _DECODER.raw_decode(block, start)
        members[key] = block[start:end]
        at = _skip(block, end)
        if block[at] == ",":
            at = _skip(block, at + 1)
    return members


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _short(text: str, limit: int = 80) -> str:
    text = text.strip()
    return repr(text if len(text) <= limit else text[:limit] + "…")
