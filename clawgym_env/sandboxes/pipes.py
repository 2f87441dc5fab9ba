"""Pipes read in the event loop as they fill, and what is kept of them.

Nothing here knows what writes to a pipe. The invariant: however much comes, only a bounded part is
held, and whoever may still hold the other end, `Pump.close` returns at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

_CHUNK = 65_536
_DRAIN_CHUNKS = 16  # the largest pipe that Linux makes by default
_LINES_BYTES = 65_536


class Tail:
    """The end of a stream, and how long the stream was."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.total = 0
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        """Take a piece of the stream."""
        self.total += len(data)
        self._data += data
        if len(self._data) > 2 * self.keep:
            del self._data[: -self.keep]

    @property
    def data(self) -> bytes:
        """The last ``keep`` bytes."""
        return bytes(self._data[-self.keep :])


class Lines:
    """Cuts a stream into lines; what comes after the first 64 KiB is dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._size = 0

    def add(self, data: bytes) -> list[bytes]:
        """Take a piece of the stream; returns the lines that it completes."""
        self._size += len(data)
        if self._size > _LINES_BYTES:
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


class Pump:
    """Reads a pipe whenever it has something, until its end or `close`."""

    def __init__(self, fd: int, take: Callable[[bytes], None], end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._take = take
        self._end = end
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        """Read once; False where there is nothing more for now or ever."""
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._take(data)
            return True
        self._stop()
        return False

    def _stop(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._end()

    def close(self) -> None:
        """Take what is already in the pipe and close it, though somebody may hold its other end."""
        for _ in range(_DRAIN_CHUNKS):
            if self._fd < 0 or not self._read():
                break
        self._stop()


def memory_file(data: bytes) -> int:
    """A descriptor to read the data from: no writer to wait for, no limit of a pipe."""
    fd = os.memfd_create("clawgym")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def readable(fd: int) -> None:
    """Wait until a descriptor has something to read; for a pidfd, until its process has ended."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
