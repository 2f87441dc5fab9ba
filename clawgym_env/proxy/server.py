"""Listening: uvicorn's HTTP protocol on loopback TCP and a Unix socket, inside the caller's loop.

It knows sockets and an ASGI application, nothing of what the application does. It installs no
signal handlers and starts no threads or processes. Invariant: after :meth:`HttpServer.close`, which
takes a bounded time, no socket, task or socket file of the server is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from clawgym_env.errors import ConfigError
from clawgym_env.proxy.connection import Connection

_BACKLOG = 2048
_IDLE_S = 600
"""Seconds that an idle connection stays open: a harness' tool may run for minutes between calls,
and a connection that is closed just as it is used again looks like a fault to the harness."""
_LONGEST_SOCKET_PATH = 107
"""Bytes that Linux has room for in a Unix socket's address."""
_CLOSE_STEP_S = 1.0


class HttpServer:
    """Serves one ASGI application.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._config = Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_IDLE_S,
        )
        self._config.load()
        # Loading may have wrapped the application in a logger of whole requests, keys included.
        self._config.loaded_app = app
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._socket_path: Path | None = None

    async def listen(self, host: str, port: int, socket_path: Path | None) -> int:
        """Start to serve.

        Args:
            host: The address to listen on.
            port: The TCP port; 0 takes a free one.
            socket_path: Where to listen on a Unix socket as well.

        Returns:
            The TCP port.

        Raises:
            ConfigError: An address cannot be listened on.
        """
        listeners = [_tcp_listener(host, port)]
        try:
            if socket_path is not None:
                listeners.append(_unix_listener(socket_path))
                self._socket_path = socket_path
            loop = asyncio.get_running_loop()
            for listener in listeners:
                server = await loop.create_server(
                    lambda: Connection(self._config, self._state, {}),
                    sock=listener,
                    backlog=_BACKLOG,
                )
                self._servers.append(server)
        except BaseException:
            for listener in listeners:
                listener.close()
            await self.close()
            raise
        bound: int = listeners[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening, end all connections and requests; calling it again does nothing."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)
            self._socket_path = None
        connections = [c for c in self._state.connections if isinstance(c, Connection)]
        for connection in connections:
            connection.shutdown()
        await self._until_idle()
        for connection in connections:
            connection.abort()
        await self._until_idle()
        tasks = set(self._state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_STEP_S)
        for server in servers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.wait_closed(), _CLOSE_STEP_S)

    async def _until_idle(self) -> None:
        """Wait until no connection or request is left, for a bounded time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_STEP_S):
                while self._state.connections or self._state.tasks:
                    await asyncio.sleep(0.005)


def _tcp_listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as exc:
        raise ConfigError(
            f"the proxy cannot listen on host {host!r}, port {port}: {exc.strerror or exc}; "
            "give an address of this machine and a free port, or port 0 for any"
        ) from exc
    # Connections inherit it; without it, a reply in several writes waits 40 ms for the peer's ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _unix_listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_address(path) as address:
            _remove_stale(path, address)
            listener.bind(address)
        # Sandboxes connect under uids of their own; the rollout's key is what lets them in.
        path.chmod(0o666)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"the proxy cannot listen on the socket {str(path)!r}: {exc.strerror or exc}"
        ) from exc
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _short_address(path: Path) -> Iterator[bytes]:
    """The path, or where an address has no room for it, one through a descriptor of its folder."""
    address = os.fsencode(path)
    if len(address) <= _LONGEST_SOCKET_PATH:
        yield address
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        address = b"/proc/self/fd/%d/%s" % (folder, os.fsencode(path.name))
        if len(address) > _LONGEST_SOCKET_PATH:
            raise ConfigError(
                f"the socket name {path.name!r} makes an address of {len(address)} bytes, and a "
                f"Unix socket's may have {_LONGEST_SOCKET_PATH}; give a shorter one"
            )
        yield address
    finally:
        os.close(folder)


def _remove_stale(path: Path, address: bytes) -> None:
    """Remove the socket file of a server that was killed; refuse whatever else is there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{str(path)!r} exists and is no socket; give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(address)
        except OSError as exc:
            if exc.errno != errno.ECONNREFUSED:
                raise
            path.unlink()
            return
    raise ConfigError(f"another server listens on the socket {str(path)!r}; give another path")
