"""A model directory, as transformers saves it, to tokenizer, chat template and stop tokens.

Read are ``tokenizer.json``, ``tokenizer_config.json``, ``special_tokens_map.json``,
``chat_template.jinja``, ``generation_config.json`` and ``config.json``; the first is needed, the
others as far as they say something. This module knows nothing of messages. Every error names the
file and what to do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from clawgym_env.errors import RenderError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_SAVE = "save the tokenizer with transformers: tokenizer.save_pretrained(directory)"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model directory says about its text format.

    Attributes:
        tokenizer: The tokenizer, with all added tokens.
        template: The chat template's source.
        tool_template: A second template for conversations with tools, where there is one.
        template_origin: The file that the template came from.
        special_tokens: Text of each named special token, such as ``eos_token``.
        stop_ids: Ids that end a reply; the tokenizer's end token first.
        fingerprint: Hash of all of the above, as hexadecimal digits.
    """

    tokenizer: tokenizers.Tokenizer
    template: str
    tool_template: str | None
    template_origin: str
    special_tokens: Mapping[str, str]
    stop_ids: tuple[int, ...]
    fingerprint: str


def load_model_files(directory: Path) -> ModelFiles:
    """Read the directory.

    Raises:
        RenderError: If a file is missing or malformed, there is no chat template, or no token ends
            a reply.
    """
    if not directory.is_dir():
        raise RenderError(
            f"{directory} is not a directory; give the local directory of a model or tokenizer "
            f"({_SAVE})"
        )
    tokenizer = _tokenizer(directory / "tokenizer.json")
    config = _json(directory / "tokenizer_config.json")
    _add_tokens(tokenizer, config, directory / "tokenizer_config.json")
    template, tool_template, origin = _template(directory, config)
    special = _special_tokens(directory, config)
    stop_ids = _stop_ids(directory, tokenizer, special)
    return ModelFiles(
        tokenizer,
        template,
        tool_template,
        origin,
        special,
        stop_ids,
        _fingerprint(tokenizer, [template, tool_template, sorted(special.items()), stop_ids]),
    )


def _fingerprint(tokenizer: tokenizers.Tokenizer, rest: list[Any]) -> str:
    """Hash of what decides ids and text; saving a tokenizer again does not change it."""
    parts = json.loads(tokenizer.to_str())
    for unused in ("truncation", "padding", "post_processor"):
        parts.pop(unused, None)
    return hashlib.sha256(json.dumps([parts, rest], sort_keys=True).encode()).hexdigest()


def _tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise RenderError(f"{path} is missing; {_SAVE} (a fast tokenizer is needed)")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception for whatever it cannot read
        raise RenderError(f"{path} is not a tokenizer that can be read: {exc}; {_SAVE}") from exc


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as exc:
        raise RenderError(f"{path} is not valid JSON: {exc}; copy or save it again") from exc
    if not isinstance(data, dict):
        raise RenderError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def _add_tokens(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Add the tokens that stand in the configuration alone."""
    declared = config.get("added_tokens_decoder") or {}
    present = tokenizer.get_added_tokens_decoder()
    try:
        tokens = {int(key): _added_token(entry) for key, entry in declared.items()}
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        raise RenderError(
            f"added_tokens_decoder in {path} must map ids to tokens with their content; got "
            f"{declared!r:.200}: {exc}"
        ) from exc
    for index, token in sorted(tokens.items()):
        if index in present and present[index].content == token.content:
            continue
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])
        given = tokenizer.token_to_id(token.content)
        if given != index:
            raise RenderError(
                f"{path} gives the token {token.content!r} the id {index}, but in tokenizer.json "
                f"it gets {given}; the two files are of different models: {_SAVE}"
            )


def _added_token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(
        str(entry["content"]), **{name: bool(entry[name]) for name in flags if name in entry}
    )


def _template(directory: Path, config: Mapping[str, Any]) -> tuple[str, str | None, str]:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8"), None, str(path)
    origin = str(directory / "tokenizer_config.json")
    template = config.get("chat_template")
    if isinstance(template, str):
        return template, None, f"chat_template in {origin}"
    if isinstance(template, list):
        named = {
            str(entry.get("name")): str(entry.get("template"))
            for entry in template
            if isinstance(entry, Mapping)
        }
        if "default" in named:
            return named["default"], named.get("tool_use"), f"chat_template in {origin}"
    raise RenderError(
        f"{directory} has no chat template: neither {path.name} nor chat_template in "
        "tokenizer_config.json; put the model's template (or a ChatML one) into "
        f"{path}"
    )


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    older = _json(directory / "special_tokens_map.json")
    special = {}
    for name in _NAMED:
        value = config.get(name, older.get(name))
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            special[name] = value
    return special


def _stop_ids(
    directory: Path, tokenizer: tokenizers.Tokenizer, special: Mapping[str, str]
) -> tuple[int, ...]:
    found: list[int] = []
    eos = special.get("eos_token")
    if eos is not None:
        index = tokenizer.token_to_id(eos)
        if index is None:
            raise RenderError(
                f"eos_token {eos!r} in {directory / 'tokenizer_config.json'} is not a token of "
                f"tokenizer.json; {_SAVE}"
            )
        found.append(index)
    for name in ("generation_config.json", "config.json"):
        value = _json(directory / name).get("eos_token_id")
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        found += [item for item in values if isinstance(item, int) and item >= 0]
        break
    if not found:
        raise RenderError(
            f"{directory} names no token that ends a reply; set eos_token in "
            "tokenizer_config.json or eos_token_id in generation_config.json"
        )
    return tuple(dict.fromkeys(found))
