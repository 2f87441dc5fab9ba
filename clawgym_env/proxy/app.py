"""The proxy's HTTP face: routes, keys, body sizes, and each error in its protocol's shape.

It knows requests up to the admitted call; what answers it is an exchange's business. Invariants:
no body is kept that has no valid key or is larger than the limit, and whatever goes wrong, the
caller gets an error of its protocol.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from clawgym_env.calls import Outcome
from clawgym_env.errors import ProtocolError, RenderError
from clawgym_env.protocols import WireProtocol, openai_chat
from clawgym_env.proxy.bodies import RequestBody
from clawgym_env.proxy.connection import ClientGoneError, connection_of
from clawgym_env.proxy.exchange import Exchange
from clawgym_env.proxy.keys import KeyRing, offered_keys
from clawgym_env.proxy.replies import send_error, send_json
from clawgym_env.proxy.session import AdmittedCall, Session

if TYPE_CHECKING:
    from clawgym_env.store import CaptureStore

log = logging.getLogger(__name__)

_DRAINED = 64 * 1024 * 1024
"""Bytes of a refused request that are read and thrown away, so that a caller that writes its whole
request before it reads gets the error and not a reset connection."""

_WILDCARD_MODELS = ("clawgym",)
"""What a session that serves any model name lists."""


@dataclass
class Frontdesk:
    """What all requests share, and which session each belongs to.

    Attributes:
        store: Where replies are committed, or None.
        keys: Which key opens which session.
        max_body: Largest request body that is served, in bytes.
        keepalive_s: Seconds between the comments in a stream whose policy thinks.
        late_calls: Requests that came with the key of a sealed rollout.
    """

    store: CaptureStore | None
    keys: KeyRing[Session] = field(default_factory=KeyRing)
    max_body: int = 16 * 1024 * 1024
    keepalive_s: float = 5.0
    late_calls: int = 0

    def session_of(self, request: HTTPConnection) -> Session:
        """The session that the request's key opens; a key in the path goes before headers.

        Raises:
            ProtocolError: No key (401), an unknown one (401), or a sealed rollout's (410).
        """
        in_path = request.path_params.get("key")
        offered = [in_path] if in_path else list(offered_keys(request.scope["headers"]))
        found = next((s for s in map(self.keys.find, offered) if s is not None), None)
        if found is not None and not found.sealed:
            return found
        if found is not None or any(map(self.keys.is_retired, offered)):
            self.late_calls += 1
            raise ProtocolError(
                410,
                "the rollout of this API key has ended; no further call is answered",
                code="rollout_sealed",
            )
        if not offered:
            raise ProtocolError(
                401,
                "no API key came; send the rollout's key as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
        # The key itself stays out of the message: harnesses log their errors.
        raise ProtocolError(
            401, "incorrect API key; send the rollout's own key", code="invalid_api_key"
        )


def make_app(desk: Frontdesk) -> ASGIApp:
    """The ASGI application: each path with and without the key prefix ``/r/KEY``."""
    routes = [
        Route("/v1/chat/completions", _Calls(desk, openai_chat)),
        Route("/v1/models", _Models(desk, openai_chat)),
        Route("/", _Root()),
    ]
    mount = Mount("/r/{key}", app=Router(routes, redirect_slashes=False, default=_unknown_path))
    return Router([*routes, mount], redirect_slashes=False, default=_unknown_path)


class _Calls:
    """The endpoint of one protocol's model calls."""

    def __init__(self, desk: Frontdesk, wire: WireProtocol) -> None:
        self._desk = desk
        self._wire = wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        desk, wire = self._desk, self._wire
        request, body = HTTPConnection(scope), RequestBody(receive)
        try:
            _expect_method(scope, "POST")
            desk.session_of(request)
            raw = await body.read(desk.max_body)
            # The rollout may have been sealed while the body came in.
            session = desk.session_of(request)
            admitted = self._admit(session, raw)
        except ClientGoneError:
            return
        except ProtocolError as exc:
            await _reject(body, send, wire, exc)
            return
        exchange = Exchange(
            session,
            admitted,
            wire,
            desk.store,
            connection_of(scope),
            receive,
            send,
            desk.keepalive_s,
        )
        await exchange.run()

    def _admit(self, session: Session, body: bytes) -> AdmittedCall:
        call = self._wire.parse(
            body,
            rollout_id=session.rollout_id,
            call_id=uuid.uuid4().hex,
            index=session.calls,
            arrived_at=time.time(),
        )
        try:
            return session.admit(call)
        except RenderError as exc:
            session.fail(Outcome.POLICY_ERROR, f"the prompt of call {call.index}: {exc}")
            raise ProtocolError(400, str(exc), param="messages", code="render_error") from exc
        except ProtocolError:
            raise
        except Exception as exc:
            # A defect of ours or of the session's hooks: the harness still gets an answer.
            log.exception("call %s could not be admitted", call.call_id)
            detail = f"call {call.index} could not be admitted: {type(exc).__name__}: {exc}"
            session.fail(Outcome.CAPTURE_ERROR, detail)
            raise ProtocolError(500, detail, code="capture_error", kind="server_error") from exc


class _Models:
    """The endpoint that lists the model names of a session."""

    def __init__(self, desk: Frontdesk, wire: WireProtocol) -> None:
        self._desk = desk
        self._wire = wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _expect_method(scope, "GET")
            session = self._desk.session_of(HTTPConnection(scope))
        except ProtocolError as exc:
            await _reject(RequestBody(receive), send, self._wire, exc)
            return
        names = session.models if "*" not in session.models else _WILDCARD_MODELS
        await send_json(send, self._wire.models(names))


class _Root:
    """What a harness gets that only looks whether the server is there."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, b'{"object":"clawgym.proxy"}')


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    # The path may hold a key, so it stays out of the message.
    exc = ProtocolError(
        404,
        "unknown request URL; this server answers POST /v1/chat/completions and GET /v1/models",
        code="unknown_url",
    )
    await _reject(RequestBody(receive), send, openai_chat, exc)


async def _reject(body: RequestBody, send: Send, wire: WireProtocol, exc: ProtocolError) -> None:
    try:
        whole = await body.discard(_DRAINED)
    except ClientGoneError:
        return
    await send_error(send, wire, exc, close=not whole)


def _expect_method(scope: Scope, method: str) -> None:
    came = scope["method"]
    if came != method and (came, method) != ("HEAD", "GET"):
        raise ProtocolError(405, f"this URL takes {method}, not {came}", code="method_not_allowed")
