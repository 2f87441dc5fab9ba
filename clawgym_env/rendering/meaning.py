"""When two messages say the same: one hashable key a message.

Harnesses send back what they were sent with other ids, other JSON spacing, other key order, None
for an empty text. None of that changes what a turn says, so none of it is in the key. This module
knows nothing of tokens or templates.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from clawgym_env.calls import ImagePart, Message

Meaning = tuple[Any, ...]
"""Equal for messages that say the same; hashable; its first element is the role."""

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


def meaning(message: Message) -> Meaning:
    """The key of a message.

    Of an assistant message the role, the content and the reasoning without surrounding white
    space, and each call's name and parsed arguments count. Reasoning that came back inside the
    content (``<think>…</think>`` in front) counts as reasoning. Of another message the role, the
    exact text and the images count.
    """
    if message.role == "assistant":
        reasoning, content = message.reasoning, message.text
        if reasoning is None:
            reasoning, content = split_inline_reasoning(content)
        calls = tuple((call.name, arguments_key(call.arguments)) for call in message.tool_calls)
        return ("assistant", content.strip(), (reasoning or "").strip(), calls)
    images: tuple[str, ...] = ()
    if isinstance(message.content, tuple):
        images = tuple(part.url for part in message.content if isinstance(part, ImagePart))
    return (message.role, message.text, images)


def without_reasoning(key: Meaning) -> Meaning:
    """The key of the same assistant message with its reasoning left out."""
    return key if key[0] != "assistant" else (*key[:2], "", *key[3:])


def split_inline_reasoning(content: str) -> tuple[str | None, str]:
    """Reasoning that leads the content, and the rest; (None, content) where there is none."""
    stripped = content.lstrip()
    if not stripped.startswith(THINK_OPEN):
        return None, content
    reasoning, close, rest = stripped[len(THINK_OPEN) :].partition(THINK_CLOSE)
    return (reasoning, rest) if close else (None, content)


@functools.lru_cache(maxsize=4096)
def arguments_key(arguments: str) -> str:
    """Arguments as canonical JSON text; text that is not JSON stands for itself, stripped.

    1.0 equals 1, as it does in JavaScript harnesses; true does not equal 1.
    """
    parsed = parse_json(arguments.strip() or "{}")
    if parsed is None:
        return f"text:{arguments.strip()}"
    return json.dumps(_plain_numbers(parsed[0]), sort_keys=True)


def parse_json(text: str) -> tuple[Any] | None:
    """The JSON value in ``text`` as a 1-tuple, or None where it is not strict, sane JSON.

    NaN and Infinity are not JSON; nesting or digits beyond Python's limits count as not JSON.
    """
    try:
        return (json.loads(text, parse_constant=_refuse_constant),)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    return value
