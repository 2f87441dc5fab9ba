"""OpenAI Chat Completions: request bodies to ``ModelCall``, ``Completion`` to replies and events.

This module knows the wire format alone: no HTTP server, key, tokenizer or policy. Unknown request
fields are served and stay in ``ModelCall.raw``; a field it knows must have the documented type.
Invariant: ``parse`` returns a call or raises ``ProtocolError`` that names the field, whatever the
bytes; every reply, event and error body has the shape of the vendor's own types.

Beyond the vendor's format it reads and writes ``reasoning_content`` (what open reasoning models'
servers use; ``reasoning`` is read too) and reads ``top_k``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from clawgym_env.calls import (
    Completion,
    ContentPart,
    FinishReason,
    ImagePart,
    Message,
    ModelCall,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
)
from clawgym_env.errors import PolicyError, ProtocolError
from clawgym_env.protocols import fields

NAME = "openai_chat"

ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_CHOICES = ("none", "auto", "required")
_LEAST_LOGPROB = -9999.0  # what the vendor sends for a token too unlikely to give a figure
_PIECE = 512  # characters of text in one streamed event
_DONE = b"data: [DONE]\n\n"


# --- requests -------------------------------------------------------------------------------


def parse(
    body: bytes, *, rollout_id: str, call_id: str, index: int, arrived_at: float
) -> ModelCall:
    """Read a request body.

    Args:
        body: The request body, byte for byte.
        rollout_id: The rollout that the request's key belongs to.
        call_id: The new call's id, unique over all rollouts.
        index: Arrival index within the rollout, from 0.
        arrived_at: Unix time in seconds.

    Raises:
        ProtocolError: Status 400, ``param`` naming the field (such as
            ``messages[2].tool_calls[0].function``; None where the body is no JSON object).
    """
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise ProtocolError(400, f"the body must be JSON in UTF-8; {exc}") from exc
    if not isinstance(request, dict):
        raise ProtocolError(400, f"the body must be a JSON object; got {fields.shown(request)}")
    if request.get("functions") or request.get("function_call"):
        field = "functions" if request.get("functions") else "function_call"
        raise fields.invalid(
            field, "absent (send 'tools' and 'tool_choice' instead)", request[field]
        )
    if (n := fields.integer(request, "n", least=1)) is not None and n != 1:
        message = f"'n' must be 1: one reply is sampled for a request; got {n}"
        raise ProtocolError(400, message, param="n", code="unsupported_value")
    return ModelCall(
        call_id=call_id,
        rollout_id=rollout_id,
        index=index,
        protocol=NAME,
        model=fields.text(request, "model", "model", empty=False),
        messages=_messages(request),
        tools=_tools(request),
        tool_choice=_tool_choice(request),
        sampling=_sampling(request),
        stream=fields.flag(request, "stream"),
        include_usage=_include_usage(request),
        raw=body,
        arrived_at=arrived_at,
    )


def _messages(request: dict[str, Any]) -> tuple[Message, ...]:
    messages = fields.required(request, "messages", "messages")
    if not isinstance(messages, list) or not messages:
        raise fields.invalid("messages", "an array of at least one message", messages)
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: Any, at: str) -> Message:
    if not isinstance(message, dict):
        raise fields.invalid(at, "an object", message)
    role = fields.required(message, "role", f"{at}.role")
    if role not in ROLES:
        raise fields.invalid(f"{at}.role", f"one of {', '.join(ROLES)}", role, code="invalid_value")
    content = message.get("content")
    if content is None and role != "assistant":
        fields.required(message, "content", f"{at}.content")
        raise fields.invalid(f"{at}.content", "a string or an array of parts", None)
    if content is not None and not isinstance(content, str):
        content = _parts(content, f"{at}.content")
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    if role == "assistant":
        if message.get("function_call") is not None:
            field = f"{at}.function_call"
            raise fields.invalid(
                field, "absent (send 'tool_calls' instead)", message["function_call"]
            )
        tool_calls = _tool_calls(message.get("tool_calls"), f"{at}.tool_calls")
        # Neither field is the vendor's own, so a value of another type is an unknown field.
        given = (message.get("reasoning_content"), message.get("reasoning"))
        reasoning = next((text for text in given if isinstance(text, str)), None)
    elif role == "tool":
        tool_call_id = fields.text(message, "tool_call_id", f"{at}.tool_call_id")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise fields.invalid(f"{at}.name", "a string", name)
    return Message(role, content, reasoning, tool_calls, tool_call_id, name)


def _parts(content: Any, at: str) -> tuple[ContentPart, ...]:
    if not isinstance(content, list):
        raise fields.invalid(at, "a string or an array of parts", content)
    return tuple(_part(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part(part: Any, at: str) -> ContentPart:
    if not isinstance(part, dict):
        raise fields.invalid(at, "an object", part)
    kind = fields.required(part, "type", f"{at}.type")
    if kind == "text":
        return TextPart(fields.text(part, "text", f"{at}.text"))
    if kind == "refusal":
        return TextPart(fields.text(part, "refusal", f"{at}.refusal"))
    if kind == "image_url":
        image = fields.mapping(part, "image_url", f"{at}.image_url")
        return ImagePart(fields.text(image, "url", f"{at}.image_url.url"))
    raise fields.invalid(
        f"{at}.type", "one of text, image_url, refusal", kind, code="invalid_value"
    )


def _tool_calls(tool_calls: Any, at: str) -> tuple[ToolCall, ...]:
    if tool_calls is None:
        return ()
    if not isinstance(tool_calls, list):
        raise fields.invalid(at, "an array", tool_calls)
    return tuple(_tool_call(call, f"{at}[{i}]") for i, call in enumerate(tool_calls))


def _tool_call(call: Any, at: str) -> ToolCall:
    function = _function(call, at)
    return ToolCall(
        id=fields.text(call, "id", f"{at}.id"),
        name=fields.text(function, "name", f"{at}.function.name"),
        arguments=fields.text(function, "arguments", f"{at}.function.arguments"),
    )


def _tools(request: dict[str, Any]) -> tuple[Tool, ...]:
    tools = request.get("tools")
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise fields.invalid("tools", "an array", tools)
    fields.bounded(tools, "tools")
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def _tool(tool: Any, at: str) -> Tool:
    function = _function(tool, at)
    name = fields.text(function, "name", f"{at}.function.name", empty=False)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise fields.invalid(f"{at}.function.description", "a string", description)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise fields.invalid(f"{at}.function.parameters", "a JSON Schema object", parameters)
    return Tool(name, description or "", parameters or {})


def _function(holder: Any, at: str) -> dict[str, Any]:
    """The ``function`` object of a tool or a tool call."""
    if not isinstance(holder, dict):
        raise fields.invalid(at, "an object", holder)
    kind = holder.get("type", "function")
    if kind != "function":
        raise fields.invalid(f"{at}.type", "'function'", kind, code="invalid_value")
    return fields.mapping(holder, "function", f"{at}.function")


def _tool_choice(request: dict[str, Any]) -> Any:
    choice = request.get("tool_choice")
    if choice is None or isinstance(choice, dict):
        fields.bounded(choice, "tool_choice")
    elif choice not in _TOOL_CHOICES:
        expected = f"one of {', '.join(_TOOL_CHOICES)}, or an object that names a function"
        raise fields.invalid("tool_choice", expected, choice)
    return choice


def _sampling(request: dict[str, Any]) -> Sampling:
    max_tokens = fields.integer(request, "max_completion_tokens", least=1)
    older_name = fields.integer(request, "max_tokens", least=1)
    top_k = fields.integer(request, "top_k", least=-1)
    return Sampling(
        temperature=fields.number(request, "temperature", 0, 2),
        top_p=fields.number(request, "top_p", 0, 1),
        top_k=top_k if top_k and top_k > 0 else None,  # servers read 0 and -1 as no limit
        max_tokens=older_name if max_tokens is None else max_tokens,
        stop=_stop(request),
        seed=fields.integer(request, "seed"),
        presence_penalty=fields.number(request, "presence_penalty", -2, 2),
        frequency_penalty=fields.number(request, "frequency_penalty", -2, 2),
        logprobs=fields.flag(request, "logprobs"),
        top_logprobs=fields.integer(request, "top_logprobs", least=0, most=20),
    )


def _stop(request: dict[str, Any]) -> tuple[str, ...]:
    stop = request.get("stop")
    if stop is None:
        return ()
    given = [stop] if isinstance(stop, str) else stop
    if not isinstance(given, list) or not all(isinstance(s, str) and s for s in given):
        raise fields.invalid("stop", "a string or an array of strings, none of them empty", stop)
    return tuple(given)


def _include_usage(request: dict[str, Any]) -> bool:
    options = request.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise fields.invalid("stream_options", "an object", options)
    return fields.flag(options, "include_usage", "stream_options.include_usage")


# --- replies --------------------------------------------------------------------------------


def render(
    call: ModelCall,
    completion: Completion,
    *,
    prompt_tokens: int = 0,
    token_texts: Sequence[str] | None = None,
) -> bytes:
    """The JSON body of a reply that is not streamed.

    Args:
        call: The request that it answers.
        completion: The reply.
        prompt_tokens: Length of the prompt in tokens, for ``usage``; 0 where it is not known.
            ``usage.completion_tokens`` is 0 as well where the completion has no token ids:
            clients read the fields without asking whether they are there.
        token_texts: The text of each of ``completion.token_ids``. Logprobs are part of the reply
            only where the request asked for them, the completion has them, and these texts are
            given: without a tokenizer nobody knows them, and ``logprobs`` is null. Only the
            sampled token's logprob is known, so ``top_logprobs`` is empty.

    Raises:
        PolicyError: The reply holds text that no JSON can carry (lone surrogates).
        ValueError: ``token_texts`` and ``completion.logprobs`` differ in length.
    """
    message = completion.message
    calls = [_rendered_call(tool_call) for tool_call in message.tool_calls]
    # Clients call string methods on the content of a reply that calls no tool: "" and not null.
    body: dict[str, Any] = {
        "role": "assistant",
        "content": (message.text or None) if calls else message.text,
        "refusal": None,
    }
    if message.reasoning is not None:
        body["reasoning_content"] = message.reasoning
    if calls:
        body["tool_calls"] = calls
    choice = {
        "index": 0,
        "message": body,
        "logprobs": _logprobs(call, completion, token_texts),
        "finish_reason": finish_reason(completion),
    }
    reply = _envelope(call, completion, "chat.completion")
    reply["choices"] = [choice]
    reply["usage"] = _usage(completion, prompt_tokens)
    return _dumped(reply)


def stream(
    call: ModelCall,
    completion: Completion,
    *,
    prompt_tokens: int = 0,
    token_texts: Sequence[str] | None = None,
) -> Iterator[bytes]:
    """The server-sent events of a streamed reply, ``[DONE]`` included, one item each.

    The role comes first, then reasoning and content in pieces, then each tool call whole, then the
    finish reason (with the logprobs, if any: token boundaries do not follow the pieces'), then
    the usage where the request asked for it. Arguments and errors are those of ``render``; an
    error is raised by the call itself, before the first event.
    """
    envelope = _envelope(call, completion, "chat.completion.chunk")
    if call.include_usage:
        envelope["usage"] = None

    def event(
        delta: dict[str, Any], reason: FinishReason | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return _event({**envelope, "choices": [choice]})

    message = completion.message
    events = [event({"role": "assistant", "content": "", "refusal": None})]
    events += [event({"reasoning_content": piece}) for piece in _pieces(message.reasoning or "")]
    events += [event({"content": piece}) for piece in _pieces(message.text)]
    events += [
        event({"tool_calls": [{"index": i, **_rendered_call(tool_call)}]})
        for i, tool_call in enumerate(message.tool_calls)
    ]
    logprobs = _logprobs(call, completion, token_texts)
    events.append(event({}, finish_reason(completion), logprobs))
    if call.include_usage:
        usage = _usage(completion, prompt_tokens)
        events.append(_event({**envelope, "choices": [], "usage": usage}))
    events.append(_DONE)
    return iter(events)


def error(exc: ProtocolError) -> bytes:
    """The JSON body of an error reply; ``exc.status`` is the status to send it with."""
    body = {"message": exc.message, "type": exc.kind, "param": exc.param, "code": exc.code}
    return orjson.dumps({"error": body})


def stream_error(exc: ProtocolError) -> bytes:
    """The event that tells of an error once a stream has begun; clients raise on it."""
    return b"data: " + error(exc) + b"\n\n"


def keepalive() -> bytes:
    """A comment of the event stream: clients skip it, and the connection stays alive."""
    return b": keep-alive\n\n"


def models(names: Sequence[str]) -> bytes:
    """The JSON body of ``GET /v1/models``."""
    data = [{"id": n, "object": "model", "created": 0, "owned_by": "clawgym"} for n in names]
    return orjson.dumps({"object": "list", "data": data})


def finish_reason(completion: Completion) -> FinishReason:
    """The reason on the wire: ``tool_calls`` where the message has some and was not cut short."""
    if completion.finish_reason in ("stop", "tool_calls"):
        return "tool_calls" if completion.message.tool_calls else "stop"
    return completion.finish_reason


def _envelope(call: ModelCall, completion: Completion, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{call.call_id}",
        "object": kind,
        "created": int(completion.finished_at or call.arrived_at),
        "model": call.model,
        "system_fingerprint": f"policy-{completion.policy_version}",
    }


def _rendered_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _usage(completion: Completion, prompt_tokens: int) -> dict[str, int]:
    sampled = len(completion.token_ids or ())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }


def _logprobs(
    call: ModelCall, completion: Completion, token_texts: Sequence[str] | None
) -> dict[str, Any] | None:
    if not call.sampling.logprobs or completion.logprobs is None or token_texts is None:
        return None
    tokens = [
        {
            "token": text,
            # A replacement character stands for part of a character: its bytes are not known.
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "top_logprobs": [],
        }
        for text, logprob in zip(token_texts, completion.logprobs, strict=True)
    ]
    return {"content": tokens, "refusal": None}


def _pieces(text: str) -> Iterator[str]:
    return (text[i : i + _PIECE] for i in range(0, len(text), _PIECE))


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _dumped(chunk) + b"\n\n"


def _dumped(reply: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(reply)
    except TypeError as exc:
        raise PolicyError(
            f"the policy's reply cannot be sent as JSON ({exc}); answer with valid Unicode text"
        ) from exc
