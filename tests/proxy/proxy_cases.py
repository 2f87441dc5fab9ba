"""What the proxy's tests share: a served session, and HTTP spoken by hand over raw sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym_env.calls import (
    CapturedCall,
    Message,
    Outcome,
    PolicyRequest,
    Reply,
    Rollout,
    ToolCall,
)
from clawgym_env.policies import Policy
from clawgym_env.proxy import Proxy, Session
from clawgym_env.store import CaptureStore


@dataclass
class Served:
    proxy: Proxy
    session: Session
    key: str
    settled: list[CapturedCall]

    @property
    def api(self) -> str:
        return f"{self.proxy.url}/v1"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds; the test's own timeout bounds it."""
        while not condition():
            await asyncio.sleep(0.002)

    async def until_settled(self, count: int) -> tuple[CapturedCall, ...]:
        await self.until(lambda: len(self.settled) >= count)
        return tuple(self.settled)


@asynccontextmanager
async def serving(
    policy: Policy,
    *,
    store: CaptureStore | None = None,
    socket_path: Path | None = None,
    keepalive_s: float = 5.0,
    rollout_id: str = "rollout-1",
    **session: Any,
) -> AsyncIterator[Served]:
    """A started proxy with one registered session."""
    proxy = Proxy(store, keepalive_s=keepalive_s)
    await proxy.start(socket_path=socket_path)
    try:
        settled: list[CapturedCall] = []
        live = Session(rollout_id, policy, on_call=settled.append, **session)
        begin(store, rollout_id)
        yield Served(proxy, live, proxy.register(live), settled)
    finally:
        await proxy.close()


def begin(store: CaptureStore | None, rollout_id: str) -> None:
    if store is not None:
        store.begin_rollout(Rollout(rollout_id, "task", "test", Outcome.CANCELLED))


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A request body."""
    return {"model": "clawgym", "messages": [{"role": "user", "content": text}], **fields}


def echo(request: PolicyRequest) -> Reply:
    """Say which rollout was asked what."""
    text = f"{request.call.rollout_id}: {request.call.messages[-1].text}"
    return Reply(message=Message("assistant", text))


def bash(identifier: str, command: str) -> Message:
    """An assistant message that calls the tool ``bash``."""
    arguments = json.dumps({"command": command})
    return Message("assistant", None, tool_calls=(ToolCall(identifier, "bash", arguments),))


BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def raw_request(
    key: str, body: bytes | dict[str, Any], path: str = "/v1/chat/completions"
) -> bytes:
    """The bytes of a POST."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: proxy\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def connect(
    served: Served, *, limit: int = 65536
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection, over the Unix socket where there is one; reads at most 2 * limit ahead."""
    if served.proxy.socket_path is not None:
        path = str(served.proxy.socket_path)
        return await asyncio.open_unix_connection(path, limit=limit)
    host, port = served.proxy.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port), limit=limit)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        pass  # the server may have dropped it first
