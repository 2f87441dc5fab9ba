"""The policy that asks another server: any that speaks OpenAI Chat Completions.

It knows the canonical records and the upstream's wire format, nothing of who asked. Invariant: one
call makes one upstream request, whole and not streamed; there is no retry here, because the
program that asked has its own. Replies carry no token ids, so their captures cannot be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import orjson

from clawgym_env.calls import (
    FinishReason,
    Message,
    ModelCall,
    PolicyRequest,
    Reply,
    ToolCall,
)
from clawgym_env.errors import PolicyError, ProtocolError
from clawgym_env.spaces import message_to_dict, tool_to_dict

_FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}

_HARNESS_STATUS = frozenset({400, 413, 422, 429})
"""What the harness' own request or pace caused: it gets the upstream's answer as its own."""


class OpenAICompatiblePolicy:
    """Forwards each call to an OpenAI-compatible server and returns its message.

    Args:
        base_url: The server's API root, such as ``http://127.0.0.1:8000/v1``.
        api_key: Sent as a bearer token, unless it is None or empty; never part of an error or a
            repr.
        model: The upstream model's name; None forwards the name that the harness asked for.
        timeout: Seconds until a reply must have come; None waits for ever.
        transport: An httpx transport in place of TCP, such as one for a Unix socket.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        model: str | None = None,
        *,
        timeout: float | None = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._model = model
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=30.0),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
        )

    async def complete(self, request: PolicyRequest) -> Reply:
        """The upstream's reply to this call.

        Raises:
            ProtocolError: The upstream refused the request itself (400, 413, 422) or its pace
                (429); the harness gets the same.
            PolicyError: The upstream cannot be reached, failed, or answered what is no completion.
        """
        body = orjson.dumps(_request_body(request.call, self._model or request.call.model))
        try:
            response = await self._client.post(self._url, content=body)
        except httpx.HTTPError as exc:
            raise PolicyError(
                f"upstream {self._url} gave no answer: {type(exc).__name__}: {exc}; "
                "check that the server runs and the base URL is its API root"
            ) from exc
        if response.status_code in _HARNESS_STATUS:
            raise _forwarded(response)
        if response.status_code != 200:
            raise PolicyError(f"upstream {self._url} {_refusal(response)}")
        return _reply(response.content, self._url)

    async def close(self) -> None:
        """Close the connections; calling it again does nothing."""
        await self._client.aclose()


def _request_body(call: ModelCall, model: str) -> dict[str, Any]:
    sampling = call.sampling
    optional: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop) or None,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "tools": [tool_to_dict(tool) for tool in call.tools] or None,
        # Each protocol has its own terms for the choice; only this one's are the upstream's too.
        "tool_choice": call.tool_choice if call.protocol == "openai_chat" else None,
    }
    body: dict[str, Any] = {"model": model, "messages": [message_to_dict(m) for m in call.messages]}
    body.update((name, value) for name, value in optional.items() if value is not None)
    return body


def _reply(body: bytes, url: str) -> Reply:
    try:
        choice = orjson.loads(body)["choices"][0]
        message = choice["message"]
        tool_calls = tuple(
            ToolCall(
                id=str(call.get("id") or ""),
                name=call["function"]["name"],
                arguments=call["function"]["arguments"] or "{}",
            )
            for call in message.get("tool_calls") or ()
        )
        content = message.get("content")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        finish_reason = _FINISH_REASONS.get(choice.get("finish_reason") or "stop", "stop")
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError) as exc:
        raise PolicyError(
            f"upstream {url} answered 200 with what is no chat completion "
            f"({type(exc).__name__}: {exc}); it starts {body[:200]!r}"
        ) from exc
    return Reply(
        message=Message(
            role="assistant", content=content, reasoning=reasoning, tool_calls=tool_calls
        ),
        finish_reason=finish_reason,
    )


def _forwarded(response: httpx.Response) -> ProtocolError:
    try:
        error = orjson.loads(response.content)["error"]
        return ProtocolError(
            response.status_code,
            str(error["message"]),
            param=error.get("param"),
            code=error.get("code"),
            kind=error.get("type") or "invalid_request_error",
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return ProtocolError(response.status_code, f"the upstream model {_refusal(response)}")


def _refusal(response: httpx.Response) -> str:
    if response.status_code in (401, 403):
        # Servers quote the key that they refuse, so the body stays out.
        return f"answered {response.status_code}; check the upstream's API key"
    return f"answered {response.status_code}: {response.text[:500]}"
