"""Reading a request's body without ever holding more of it than is served.

It knows ASGI's messages and sizes, nothing of what a body says. Invariant: at most the limit given
is held in memory, whatever length the caller declares or sends.
"""

from __future__ import annotations

from starlette.types import Receive

from clawgym_env.errors import ProtocolError
from clawgym_env.proxy.connection import ClientGoneError


class RequestBody:
    """The body of one request, read once."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._whole = False

    async def read(self, limit: int) -> bytes:
        """The body.

        Args:
            limit: Largest size that is read, in bytes.

        Raises:
            ProtocolError: It is larger (413).
            ClientGoneError: The caller hung up in the middle.
        """
        pieces: list[bytes] = []
        size = 0
        while not self._whole:
            piece = await self._piece()
            size += len(piece)
            if size > limit:
                raise ProtocolError(
                    413,
                    f"the request body is larger than {limit} bytes; send less",
                    code="request_too_large",
                )
            pieces.append(piece)
        return b"".join(pieces)

    async def discard(self, limit: int) -> bool:
        """Read what is left and throw it away.

        Args:
            limit: Bytes after which to give up.

        Returns:
            Whether the body was read to its end.

        Raises:
            ClientGoneError: The caller hung up in the middle.
        """
        size = 0
        while not self._whole and size <= limit:
            size += len(await self._piece())
        return self._whole

    async def _piece(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._whole = not message.get("more_body", False)
        body = message.get("body", b"")
        assert isinstance(body, bytes)
        return body
