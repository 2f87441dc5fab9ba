"""Messages and tools as the plain dicts that chat templates read.

The shape is the one that templates are written against (OpenAI's, with arguments as objects): the
same conversation always gives the same dicts, whatever wire it came over. This module knows
nothing of tokens; ``quote`` is applied to every string that did not come from the template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clawgym_env.calls import ImagePart, Message, Tool, ToolCall
from clawgym_env.errors import RenderError
from clawgym_env.rendering.meaning import parse_json

Quote = Callable[[str], str]


def same(text: str) -> str:
    """The quote that changes nothing."""
    return text


def message_dicts(
    messages: Sequence[Message],
    *,
    quote: Quote = same,
    quote_assistant: Quote | None = None,
    developer: str = "developer",
) -> list[dict[str, Any]]:
    """The messages for a template.

    Content is always text: parts are joined, and no content is "". Reasoning comes as
    ``reasoning_content`` and, for the templates that read it there, ``thinking``. Arguments that
    are a JSON object come as a dict, others as their text.

    Args:
        messages: The conversation.
        quote: Applied to all text of the conversation.
        quote_assistant: Applied to the content of assistant messages instead.
        developer: The role under which developer messages are shown.

    Raises:
        RenderError: If a message holds an image.
    """
    assistant = quote_assistant or quote
    shown = [
        _message_dict(message, index, quote, assistant if message.role == "assistant" else quote)
        for index, message in enumerate(messages)
    ]
    for entry in shown:
        if entry["role"] == "developer":
            entry["role"] = developer
    return shown


def tool_dicts(tools: Sequence[Tool], *, quote: Quote = same) -> list[dict[str, Any]] | None:
    """The tools for a template, or None where there are none."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": quote(tool.name),
                "description": quote(tool.description),
                "parameters": _plain(tool.parameters, quote),
            },
        }
        for tool in tools
    ]


def _message_dict(message: Message, index: int, quote: Quote, content: Quote) -> dict[str, Any]:
    if isinstance(message.content, tuple) and any(
        isinstance(part, ImagePart) for part in message.content
    ):
        raise RenderError(
            f"message {index} ({message.role}) holds an image, and this renderer turns text alone "
            "into tokens; use a harness and tasks without images"
        )
    out: dict[str, Any] = {"role": quote(message.role), "content": content(message.text)}
    if message.reasoning is not None:
        out["reasoning_content"] = out["thinking"] = quote(message.reasoning)
    if message.tool_calls:
        out["tool_calls"] = [_call_dict(call, quote) for call in message.tool_calls]
    if message.tool_call_id is not None:
        out["tool_call_id"] = quote(message.tool_call_id)
    if message.name is not None:
        out["name"] = quote(message.name)
    return out


def _call_dict(call: ToolCall, quote: Quote) -> dict[str, Any]:
    parsed = parse_json(call.arguments.strip() or "{}")
    arguments: Any = quote(call.arguments)
    if parsed is not None and isinstance(parsed[0], dict):
        arguments = _plain(parsed[0], quote)
    return {
        "id": quote(call.id),
        "type": "function",
        "function": {"name": quote(call.name), "arguments": arguments},
    }


def _plain(value: Any, quote: Quote) -> Any:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, Mapping):
        return {_plain(key, quote): _plain(item, quote) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, quote) for item in value]
    return value
