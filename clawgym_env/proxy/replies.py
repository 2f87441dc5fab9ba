"""The HTTP replies of the proxy as ASGI messages: whole bodies, event streams, errors.

It knows status lines and headers and nothing of what the bodies say. Invariant: an error that a
retry cannot mend says so in ``x-should-retry``, which the vendors' clients obey.
"""

from __future__ import annotations

from starlette.types import Send

from clawgym_env.errors import ProtocolError
from clawgym_env.protocols import WireProtocol

_JSON = (b"content-type", b"application/json")
_FINAL_CODES = frozenset(
    {"rollout_limit", "rollout_sealed", "rollout_ended", "policy_error", "capture_error"}
)


async def start_whole(send: Send, call_id: str, length: int) -> None:
    """Start a reply whose JSON body of ``length`` bytes follows in one piece."""
    headers = [
        _JSON,
        (b"content-length", str(length).encode()),
        (b"x-request-id", call_id.encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def start_stream(send: Send, call_id: str) -> None:
    """Start a reply that follows as server-sent events."""
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-request-id", call_id.encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_event(send: Send, body: bytes, *, more: bool = True) -> None:
    """Send a piece of a reply; ``more=False`` makes it the last."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def send_json(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Send a whole JSON reply."""
    length = (b"content-length", str(len(body)).encode())
    await send(
        {"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]}
    )
    await send_event(send, body, more=False)


async def send_error(
    send: Send, wire: WireProtocol, exc: ProtocolError, *, close: bool = False
) -> None:
    """Send an error in the protocol's shape.

    Args:
        send: The ASGI channel, nothing sent on it yet.
        wire: The protocol.
        exc: The error.
        close: Whether the connection ends with it, because the request was not read to its end.
    """
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if exc.code in _FINAL_CODES:
        headers += ((b"x-should-retry", b"false"),)
    if close:
        headers += ((b"connection", b"close"),)
    await send_json(send, wire.error(exc), status=exc.status, headers=headers)
