"""Dataclasses to compact bytes and back, without loss.

This module knows nothing of SQLite. Invariant: what an encoder accepts, its decoder gives back
equal; what cannot be given back equal is refused with ``CaptureError``.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from clawgym_env.calls import (
    ContentPart,
    ImagePart,
    Message,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
)
from clawgym_env.errors import CaptureError

ID_BYTES = 4
_LEVEL = 6
_WINDOW = 32768  # how far back zlib sees; of a dictionary it uses no more


def encode_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    try:
        return _to_bytes(array("i", ids))
    except (OverflowError, TypeError) as exc:
        raise CaptureError(f"token ids must be integers that fit into 32 bits: {exc}") from exc


def decode_ids(blob: bytes) -> tuple[int, ...]:
    """The ids that ``encode_ids`` was given."""
    return tuple(_from_bytes("i", blob))


def encode_logprobs(logprobs: Sequence[float]) -> bytes:
    """Log-probabilities as little-endian float64, exact."""
    try:
        return _to_bytes(array("d", logprobs))
    except TypeError as exc:
        raise CaptureError(f"logprobs must be numbers: {exc}") from exc


def decode_logprobs(blob: bytes) -> tuple[float, ...]:
    """The log-probabilities that ``encode_logprobs`` was given."""
    return tuple(_from_bytes("d", blob))


def _to_bytes(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _from_bytes(typecode: str, blob: bytes) -> array[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(blob)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def encode_messages(messages: Sequence[Message]) -> bytes:
    """Messages as compact JSON: defaults left out, parts and tool calls as short arrays."""
    try:
        return orjson.dumps([_plain_message(message) for message in messages])
    except TypeError as exc:
        raise CaptureError(f"a message cannot be kept: {exc}; it must be valid Unicode") from exc


def decode_messages(blob: bytes) -> tuple[Message, ...]:
    """The messages that ``encode_messages`` was given."""
    return tuple(_message(plain) for plain in orjson.loads(blob))


def _plain_message(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role}
    content = message.content
    if isinstance(content, str):
        plain["content"] = content
    elif content is not None:
        plain["content"] = [_plain_part(part) for part in content]
    if message.reasoning is not None:
        plain["reasoning"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [[c.id, c.name, c.arguments] for c in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _plain_part(part: ContentPart) -> list[str]:
    return ["image", part.url] if isinstance(part, ImagePart) else ["text", part.text]


def _message(plain: dict[str, Any]) -> Message:
    content = plain.get("content")
    if isinstance(content, list):
        content = tuple(
            ImagePart(value) if kind == "image" else TextPart(value) for kind, value in content
        )
    return Message(
        role=plain["role"],
        content=content,
        reasoning=plain.get("reasoning"),
        tool_calls=tuple(ToolCall(*call) for call in plain.get("tool_calls", ())),
        tool_call_id=plain.get("tool_call_id"),
        name=plain.get("name"),
    )


def encode_tools(tools: Sequence[Tool]) -> bytes:
    """Tools as JSON; ``check_tools`` says whether it gives them back equal."""
    return _json([[t.name, t.description, t.parameters] for t in tools], "tools").encode()


def check_tools(tools: tuple[Tool, ...], blob: bytes) -> None:
    """Refuse tools whose JSON would not give them back equal."""
    if decode_tools(blob) != tools:
        raise CaptureError(_NOT_PLAIN.format(what="tools"))


def decode_tools(blob: bytes) -> tuple[Tool, ...]:
    """The tools that ``encode_tools`` was given."""
    return tuple(Tool(*plain) for plain in json.loads(blob))


def encode_plain(value: Any, what: str) -> str:
    """A plain JSON value as JSON text; ``what`` names it in the error."""
    text = _json(value, what)
    if json.loads(text) != value:
        raise CaptureError(_NOT_PLAIN.format(what=what))
    return text


def decode_plain(text: str) -> Any:
    """The value that ``encode_plain`` was given."""
    return json.loads(text)


def encode_sampling(sampling: Sampling) -> str:
    """Sampling parameters as JSON text, defaults left out."""
    plain = {
        name: value
        for name in Sampling.__slots__
        if (value := getattr(sampling, name)) != getattr(_DEFAULT_SAMPLING, name)
    }
    if sampling.stop:
        plain["stop"] = list(sampling.stop)
    return encode_plain(plain, "sampling")


def decode_sampling(text: str) -> Sampling:
    """The parameters that ``encode_sampling`` was given."""
    plain = json.loads(text)
    return Sampling(**{**plain, "stop": tuple(plain.get("stop", ()))})


_DEFAULT_SAMPLING = Sampling()
_NOT_PLAIN = (
    "{what} cannot be kept without loss: give plain JSON values only (text keys, lists and not "
    "tuples, no NaN)"
)


def _json(value: Any, what: str) -> str:
    # Not orjson: it writes NaN as null and reads large integers as floats.
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_as_dict)
        text.encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise CaptureError(f"{_NOT_PLAIN.format(what=what)}: {exc}") from exc
    return text


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def pack(data: bytes, dictionary: bytes = b"") -> bytes:
    """Compress; ``dictionary`` is what the data probably repeats (its last 32 KiB are used)."""
    if not dictionary:
        return zlib.compress(data, _LEVEL)
    packer = zlib.compressobj(_LEVEL, zdict=dictionary[-_WINDOW:])
    return packer.compress(data) + packer.flush()


def unpack(blob: bytes, dictionary: bytes = b"") -> bytes:
    """Decompress what ``pack`` made with the same dictionary; raises zlib.error."""
    unpacker = zlib.decompressobj(zdict=dictionary[-_WINDOW:])
    data = unpacker.decompress(blob) + unpacker.flush()
    if not unpacker.eof:
        raise zlib.error("the compressed data ends too early")
    return data
