"""The connection under a request: whether its peer is still there, and when all bytes are out.

ASGI tells an application neither; this module adds both to uvicorn's HTTP protocol and hands them
on as an ASGI extension. It knows nothing of calls or sessions. Invariant: ``delivered`` is true
only if the operating system took over every byte while the peer held its end open.
"""

from __future__ import annotations

import asyncio
import select
from typing import Any

from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_EXTENSION = "clawgym.connection"


class ClientGoneError(Exception):
    """The harness hung up before it could be answered."""


class Connection(HttpToolsProtocol):
    """Uvicorn's HTTP/1.1 protocol with eyes on the peer."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # An access log would hold the keys that came in paths.
        self.access_log = False
        self._broken = False
        self._lost = asyncio.Event()
        self._peer = select.poll() if hasattr(select, "POLLRDHUP") else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to watch the peer."""
        super().connection_made(transport)
        # With no room to buffer, the flow control's drain() means that every byte is out.
        transport.set_write_buffer_limits(high=0)
        if self._peer is not None:
            self._peer.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note whether bytes were lost."""
        self._broken = self._broken or exc is not None
        super().connection_lost(exc)
        self._lost.set()

    def on_message_begin(self) -> None:
        """Hand the connection on with each request."""
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"connection": self}}

    def gone(self) -> bool:
        """Whether the peer has closed its end, as far as the operating system knows by now."""
        if self._broken or self.transport.is_closing():
            return True
        # The event loop may not have come to read the end of the stream yet.
        return self._peer is not None and bool(self._peer.poll(0))

    async def drain(self) -> None:
        """Wait until every byte written so far is out or the connection is lost."""
        await self.flow.drain()

    async def delivered(self) -> bool:
        """Wait as :meth:`drain` does, and tell whether every byte went out."""
        await self.flow.drain()
        # A write that failed is reported by a callback that the loop has already scheduled.
        await asyncio.sleep(0)
        return not self._broken

    def abort(self) -> None:
        """Drop the connection and what is still to be written."""
        self._broken = True
        self.transport.abort()

    async def dropped(self) -> None:
        """Abort, and wait until the server has taken notice."""
        self.abort()
        await self._lost.wait()


def connection_of(scope: Scope) -> Connection:
    """The connection that a request came over."""
    connection = scope["extensions"][_EXTENSION]["connection"]
    assert isinstance(connection, Connection)
    return connection
