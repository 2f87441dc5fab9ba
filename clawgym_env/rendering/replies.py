"""Reply ids to message, by the model's own tags as tokens.

Where the tags are single tokens they are told from text that only looks like them, so a file that
holds ``</tool_call>`` can be written through a tool call. The tool-call formats are those of the
``renderers`` library, which is imported at the first reply (it takes half a second). Where the
tags are ordinary text, the reply is parsed as text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from clawgym_env.calls import Tool, ToolCall
from clawgym_env.rendering.meaning import THINK_CLOSE, THINK_OPEN
from clawgym_env.rendering.parsing import (
    CALL_CLOSE,
    CALL_OPEN,
    ParsedReply,
    assistant_message,
    call_from_json,
    new_call,
    parse_text,
    plain_reply,
    split_reasoning,
    stray_close,
)
from clawgym_env.rendering.tokens import Tokenizer

HERMES = "qwen3"
"""``renderers``' name of the format that ``parsing`` describes."""


class _Attempt(Protocol):
    """What we read of ``renderers``' record of one tool-call block."""

    raw: str
    name: str | None
    arguments: dict[str, Any] | str | None
    status: str


class _ToolParser(Protocol):
    """``renderers``' parser: ids to the ids before the first call, and the calls."""

    def extract(self, token_ids: list[int]) -> tuple[list[int], list[_Attempt]]: ...


def tool_format(template: str) -> str:
    """``renderers``' name of the tool-call format that a chat template's source shows."""
    if "<arg_key>" in template:
        return "glm"
    if "<function=" in template:
        return "qwen3.5"
    return HERMES


class ReplyParser:
    """Parses the replies of one model.

    Args:
        tokenizer: The model's tokenizer.
        form: A name that ``tool_format`` gives.
        in_reasoning: Whether the generation prompt already opened ``<think>``.
    """

    def __init__(self, tokenizer: Tokenizer, form: str, *, in_reasoning: bool) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self._in_reasoning = in_reasoning
        self._call_ids = (tokenizer.token_id(CALL_OPEN), tokenizer.token_id(CALL_CLOSE))
        self._think_ids = (tokenizer.token_id(THINK_OPEN), tokenizer.token_id(THINK_CLOSE))
        self._tool_parser: _ToolParser | None = None

    def parse(self, ids: Sequence[int], tools: Sequence[Tool]) -> ParsedReply:
        """Parse a reply without its stop token."""
        if None in self._call_ids:
            return self.parse_text(self._tokenizer.decode(ids), tools)
        reasoning, body, unclosed = self._split_reasoning(list(ids))
        opening, closing = self._call_ids
        text_ids, found = self._parser().extract(body) if opening in body else (body, [])
        content = self._tokenizer.decode(text_ids)
        if None in self._think_ids:
            reasoning, content, unclosed = split_reasoning(content, in_reasoning=self._in_reasoning)
        if unclosed:
            text = self._tokenizer.decode(ids)
            return plain_reply(None, text, f"{THINK_OPEN} is not closed by {THINK_CLOSE}")
        error = stray_close(CALL_CLOSE, CALL_OPEN) if closing in text_ids else None
        calls: list[ToolCall] = []
        for attempt in found:
            call = self._call(attempt, tools)
            if isinstance(call, str):
                error = error or call
            else:
                calls.append(call)
        if error is not None:
            whole = content + self._tokenizer.decode(body[len(text_ids) :])
            return plain_reply(reasoning, whole, error)
        return ParsedReply(assistant_message(reasoning, content, calls))

    def parse_text(self, text: str, tools: Sequence[Tool]) -> ParsedReply:
        """Parse a reply given as text without its stop token."""
        if self._form == HERMES or None in self._call_ids:
            return parse_text(text, tools, in_reasoning=self._in_reasoning)
        return self.parse(self._tokenizer.encode_ids(text), tools)

    def _split_reasoning(self, ids: list[int]) -> tuple[str | None, list[int], bool]:
        """Reasoning, the ids after it, whether it was left open; by tokens where they exist."""
        opening, closing = self._think_ids
        if opening is None or closing is None:
            return None, ids, False
        start = 0
        if not self._in_reasoning:
            if opening not in ids:
                return None, ids, False
            start = ids.index(opening) + 1
            if self._tokenizer.decode(ids[: start - 1]).strip():
                return None, ids, False
        if closing not in ids[start:]:
            return None, ids, True
        end = ids.index(closing, start)
        return self._tokenizer.decode(ids[start:end]), ids[end + 1 :], False

    def _call(self, attempt: _Attempt, tools: Sequence[Tool]) -> ToolCall | str:
        if attempt.status == "unclosed_block":
            return f"{CALL_OPEN} is not closed by {CALL_CLOSE}"
        if self._form == HERMES:
            return call_from_json(attempt.raw)
        # These formats write strings bare, which the library reports as invalid JSON.
        if attempt.status not in ("ok", "invalid_json") or not isinstance(attempt.arguments, dict):
            return f"the tool call is not of the model's format ({attempt.status}): {attempt.raw!r}"
        arguments = _as_declared(attempt.name or "", attempt.arguments, tools)
        return new_call(attempt.name or "", json.dumps(arguments, ensure_ascii=False))

    def _parser(self) -> _ToolParser:
        if self._tool_parser is None:
            from renderers.parsers import get_tool_parser

            parser: _ToolParser = get_tool_parser(self._form, _Adapter(self._tokenizer))
            self._tool_parser = parser
        return self._tool_parser


class _Adapter:
    """What ``renderers``' parsers ask of a tokenizer."""

    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._tokenizer.token_id(token)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        return self._tokenizer.decode(ids)


def _as_declared(name: str, arguments: dict[str, Any], tools: Sequence[Tool]) -> dict[str, Any]:
    """The arguments with strings where the tool declares strings: a bare 123 may be one."""
    declared: Any = next((tool.parameters for tool in tools if tool.name == name), {})
    properties = declared.get("properties") or {}
    return {
        key: json.dumps(value, ensure_ascii=False)
        if not isinstance(value, str) and (properties.get(key) or {}).get("type") == "string"
        else value
        for key, value in arguments.items()
    }
