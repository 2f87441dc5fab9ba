"""Gymnasium spaces for model calls and replies.

An observation is the call that waits for a reply: a ``Dict`` of ``messages`` and ``tools``, both in
OpenAI's form, so that ``tokenizer.apply_chat_template(obs["messages"], tools=obs["tools"])`` works
as it is. An action is the reply. Neither has a fixed size, so both spaces hold plain Python values
and batch to tuples, which is what Gymnasium does with spaces it does not know.

This module knows nothing of HTTP, tokenizers or harnesses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from clawgym_env.calls import Message, ModelCall, Reply, TextPart, Tool, ToolCall
from clawgym_env.errors import ConfigError

Observation = dict[str, Any]
"""``{"messages": [...], "tools": [...]}``; both lists are empty in a terminal observation."""

Action = str | Mapping[str, Any] | Message | Reply
"""Assistant text in the model's native format, a message dict, or token ids with logprobs."""

_WORDS = ("yes", "no", "read", "write", "the", "file", "done", "42")


class JsonListSpace(gym.Space[list[dict[str, Any]]]):
    """Lists of JSON objects: the messages of a conversation, or the tools on offer.

    Elements have no fixed size, so ``shape`` and ``dtype`` are None; batching gives a tuple of
    lists. The empty list, which a terminal observation holds, is an element.
    """

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Always False: a conversation has no fixed length."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> list[dict[str, Any]]:
        """A list of one user message of random words."""
        words = self.np_random.choice(_WORDS, size=4)
        return [{"role": "user", "content": " ".join(str(w) for w in words)}]

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a list of dicts that JSON can hold."""
        if not isinstance(x, list) or not all(isinstance(item, dict) for item in x):
            return False
        try:
            json.dumps(x)
        except (TypeError, ValueError):
            return False
        return True

    def __repr__(self) -> str:
        return "JsonListSpace()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JsonListSpace)


class ReplySpace(gym.Space[Action]):
    """Replies to a model call.

    An element is one of

    - ``str``: assistant text in the model's native format, tool calls included; may be empty;
    - a message dict, ``{"role": "assistant", "content": …, "tool_calls": […]}`` as OpenAI has it;
    - ``{"token_ids": [...], "logprobs": [...], "finish_reason": …, "policy_version": …}``, where
      ``token_ids`` are ints and ``logprobs`` (optional) floats in nats, one a token;
    - a :class:`~clawgym_env.calls.Message` or :class:`~clawgym_env.calls.Reply`.
    """

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Always False: a reply has no fixed length."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> Action:
        """A text of a few random words."""
        size = int(self.np_random.integers(1, 6))
        return " ".join(str(w) for w in self.np_random.choice(_WORDS, size=size))

    def contains(self, x: Any) -> bool:
        """Whether ``x`` can be sent as a reply."""
        try:
            reply_from_action(x)
        except ConfigError:
            return False
        return True

    def __repr__(self) -> str:
        return "ReplySpace()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplySpace)


def observation_space() -> gym.spaces.Dict:
    """The observation space of every harness environment."""
    return gym.spaces.Dict({"messages": JsonListSpace(), "tools": JsonListSpace()})


def terminal_observation() -> Observation:
    """What is observed when no call waits: no messages and no tools."""
    return {"messages": [], "tools": []}


def observe(call: ModelCall) -> Observation:
    """The observation of a call, in OpenAI's form, without the volatile ids of the wire."""
    return {
        "messages": [message_to_dict(m) for m in call.messages],
        "tools": [tool_to_dict(t) for t in call.tools],
    }


def message_to_dict(message: Message) -> dict[str, Any]:
    """A message as OpenAI's Chat Completions writes it."""
    out: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, tuple):
        out["content"] = [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": "image_url", "image_url": {"url": part.url}}
            for part in message.content
        ]
    else:
        out["content"] = message.content
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def tool_to_dict(tool: Tool) -> dict[str, Any]:
    """A tool as OpenAI's Chat Completions writes it."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
    }


def reply_from_action(action: Action) -> Reply:
    """The reply that an action stands for.

    Raises:
        ConfigError: The action is none of the accepted forms; names what came.
    """
    if isinstance(action, Reply):
        return action
    if isinstance(action, Message):
        return Reply(message=action)
    if isinstance(action, str):
        return Reply(text=action)
    if not isinstance(action, Mapping):
        raise ConfigError(
            "an action is text, a message dict, or a dict with token_ids; "
            f"got {type(action).__name__}"
        )
    if "token_ids" in action:
        return _reply_from_ids(action)
    if "role" in action or "content" in action or "tool_calls" in action:
        return Reply(message=message_from_dict(action))
    raise ConfigError(
        "an action dict needs 'token_ids', or a message's 'content' or 'tool_calls'; "
        f"got the keys {sorted(map(str, action))}"
    )


def _reply_from_ids(action: Mapping[str, Any]) -> Reply:
    unknown = set(action) - {"token_ids", "logprobs", "finish_reason", "policy_version"}
    if unknown:
        raise ConfigError(f"an action with token_ids has unknown keys {sorted(map(str, unknown))}")
    try:
        ids = tuple(int(i) for i in action["token_ids"])
        raw = action.get("logprobs")
        logprobs = None if raw is None else tuple(float(x) for x in raw)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"token_ids are ints and logprobs floats: {error}") from error
    if logprobs is not None and len(logprobs) != len(ids):
        raise ConfigError(f"{len(ids)} token_ids came with {len(logprobs)} logprobs; give one each")
    finish = action.get("finish_reason")
    if finish not in (None, "stop", "length", "tool_calls", "content_filter"):
        raise ConfigError(f"finish_reason is 'stop' or 'length'; got {finish!r}")
    return Reply(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=finish,
        policy_version=int(action.get("policy_version", 0)),
    )


def message_from_dict(value: Mapping[str, Any]) -> Message:
    """An assistant message from OpenAI's form.

    Raises:
        ConfigError: A field has the wrong type; names the field and what came.
    """
    role = value.get("role", "assistant")
    if role != "assistant":
        raise ConfigError(f"a reply's role is 'assistant'; got {role!r}")
    reasoning = value.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise ConfigError(f"reasoning_content is text; got {type(reasoning).__name__}")
    content = value.get("content")
    if content is not None and not isinstance(content, str):
        content = _join_parts(content)
    raw_calls = value.get("tool_calls") or ()
    if isinstance(raw_calls, str) or not isinstance(raw_calls, Sequence):
        raise ConfigError(f"tool_calls is a list; got {type(raw_calls).__name__}")
    calls = tuple(_tool_call(i, item) for i, item in enumerate(raw_calls))
    return Message("assistant", content=content, reasoning=reasoning, tool_calls=calls)


def _join_parts(content: Any) -> str:
    if not isinstance(content, Sequence):
        raise ConfigError(f"content is text, a list of text parts, or None; got {content!r}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise ConfigError(f"each content part of a reply is a text part; got {part!r}")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(index: int, item: Any) -> ToolCall:
    function = item.get("function") if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"tool_calls[{index}] needs function.name and function.arguments; got {item!r}"
        )
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return ToolCall(str(item.get("id") or f"call_{index}"), function["name"], arguments)
