"""The proxy as its owner sees it: start, register rollouts, seal them, close.

It joins the HTTP face, the sessions and the store, and knows none of their insides. Invariants: a
sealed rollout gets no further call, and its captured calls are final; closing takes a bounded time
and leaves no task, socket or file behind.

Everything here belongs to the event loop that :meth:`Proxy.start` ran in, which may run in any
thread.
"""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from clawgym_env.calls import CapturedCall
from clawgym_env.errors import CaptureError, ConfigError
from clawgym_env.proxy.app import Frontdesk, make_app
from clawgym_env.proxy.server import HttpServer
from clawgym_env.proxy.session import Session

if TYPE_CHECKING:
    from clawgym_env.store import CaptureStore

MAX_BODY = 16 * 1024 * 1024
"""Largest request body that is served, in bytes."""

_ABORT_S = 2.0
"""Seconds that aborted calls have to end before their connections are dropped."""


class Proxy:
    """A model server whose every call is captured and answered by its rollout's policy.

    Args:
        store: Where each reply is committed before it is sent; None keeps the calls in memory.
        keepalive_s: Seconds between the comments that keep a streamed reply's connection alive
            while the policy thinks.
    """

    def __init__(self, store: CaptureStore | None = None, *, keepalive_s: float = 5.0) -> None:
        self._desk = Frontdesk(store=store, max_body=MAX_BODY, keepalive_s=keepalive_s)
        self._sessions: dict[str, Session] = {}
        # Weak, so that a proxy that serves for days does not keep every rollout it ever had.
        self._sealed: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        self._server: HttpServer | None = None
        self._address = ("", 0)
        self._socket_path: Path | None = None
        self._closed = False

    async def start(
        self, host: str = "127.0.0.1", port: int = 0, socket_path: Path | None = None
    ) -> None:
        """Listen on TCP and, where a path is given, on a Unix socket as well.

        Raises:
            ConfigError: It was started before, or an address cannot be listened on.
        """
        if self._server is not None or self._closed:
            raise ConfigError("this proxy was started before; make another one")
        server = HttpServer(make_app(self._desk))
        bound = await server.listen(host, port, socket_path)
        self._server, self._address, self._socket_path = server, (host, bound), socket_path

    @property
    def url(self) -> str:
        """``http://HOST:PORT``, without ``/v1``.

        Raises:
            ConfigError: The proxy is not started.
        """
        host, port = self._address
        if not port:
            raise ConfigError("the proxy is not started; await its start() first")
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def socket_path(self) -> Path | None:
        """The Unix socket that it listens on, if it does."""
        return self._socket_path

    @property
    def in_flight(self) -> int:
        """Calls of all rollouts whose delivery is not yet known."""
        return sum(session.in_flight for session in self._sessions.values())

    @property
    def late_calls(self) -> int:
        """Requests refused because their rollout was sealed."""
        return self._desk.late_calls

    def register(self, session: Session, key: str | None = None) -> str:
        """Serve a rollout.

        Args:
            session: The rollout's side. Where the proxy has a store, the rollout must have been
                begun in it.
            key: The key that its harness will send; a fresh secret one where it is None.

        Returns:
            The key. It is held nowhere in clear, so this is the only time it is told.

        Raises:
            ConfigError: The rollout is registered, or the key is in use or unusable.
        """
        if session.rollout_id in self._sessions:
            raise ConfigError(
                f"rollout {session.rollout_id!r} is registered already; rollout ids are unique"
            )
        if session.sealed:
            raise ConfigError(f"rollout {session.rollout_id!r} is sealed; make another session")
        key = self._desk.keys.add(session, key)
        self._sessions[session.rollout_id] = session
        return key

    async def seal(self, rollout_id: str, timeout: float | None = 5.0) -> tuple[CapturedCall, ...]:
        """End a rollout: refuse new calls, wait for those in flight, and let go of the session.

        Sealing again gives the same calls for as long as the owner holds the session, so that
        clean-up code may seal whatever happened before it.

        Args:
            rollout_id: The rollout.
            timeout: Seconds to wait before calls in flight are aborted: a policy that still thinks
                is cancelled, a reply that is still being sent is recorded as undelivered. None
                waits for ever.

        Returns:
            The captured calls in arrival order, each delivered or not; empty where no such rollout
            was registered. Of a session that does not retain them, they are read from the store.

        Raises:
            CaptureError: A call could not be ended; what it captured may still change.
        """
        session = self._sessions.get(rollout_id) or self._sealed.get(rollout_id)
        if session is None:
            return ()
        session.sealed = True
        try:
            for patience in (timeout, _ABORT_S, _ABORT_S):
                if await session.settled(patience):
                    return self._captured(session)
                session.abort()
            raise CaptureError(
                f"rollout {rollout_id!r} has {session.in_flight} calls that do not end; "
                "its policy must let asyncio.CancelledError pass"
            )
        finally:
            if self._sessions.pop(rollout_id, None) is not None:
                self._desk.keys.retire(session)
                self._sealed[rollout_id] = session

    def _captured(self, session: Session) -> tuple[CapturedCall, ...]:
        if session.retain or self._desk.store is None:
            return session.captured
        return self._desk.store.rollout(session.rollout_id).calls

    async def close(self) -> None:
        """Refuse and end everything within seconds; calling it again does nothing."""
        self._closed = True
        sessions = list(self._sessions.values())
        for session in sessions:
            session.sealed = True
            session.abort()
        deadline = time.monotonic() + _ABORT_S
        for session in sessions:
            await session.settled(max(0.0, deadline - time.monotonic()))
            self._desk.keys.retire(session)
            self._sealed[session.rollout_id] = session
        self._sessions.clear()
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def __aenter__(self) -> Self:
        """Start on a free loopback port, unless it is started."""
        if self._server is None:
            await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()
