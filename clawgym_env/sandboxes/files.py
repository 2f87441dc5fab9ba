"""File work beneath a directory whose content nobody vouches for.

A program may have planted links, FIFOs, endless sparse files or unreadable directories there, and
may still be changing it. Every path is walked one component at a time through directory
descriptors and no symbolic link is followed, so that nothing outside is ever read or written.

This module knows nothing of processes or sandboxes; its functions block.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawgym_env.errors import SandboxError

Owner = tuple[int, int]
"""A uid and a gid."""

MAX_ENTRIES = 200_000
MAX_DEPTH = 128

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_file(root: Path, path: str, data: bytes, mode: int, owner: Owner | None) -> None:
    """Write a file beneath a directory, making its parents; what was there is replaced at once.

    Args:
        root: The directory.
        path: The file, relative to it.
        data: The content.
        mode: Permission bits.
        owner: Who owns the file and the parents that are made; None leaves the caller.

    Raises:
        SandboxError: the path leaves the directory or goes through a link, or cannot be written.
    """
    *parents, name = _components(path)
    temporary = f".{secrets.token_hex(8)}.part"
    with _reported("write", path), _opened(root, parents, owner, make=True) as directory:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(temporary, flags, 0o600, dir_fd=directory)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(file, view) :]
                if owner is not None:
                    os.fchown(file, *owner)
                os.fchmod(file, mode)
            finally:
                os.close(file)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(temporary, dir_fd=directory)
            raise


def read_file(root: Path, path: str, max_bytes: int) -> bytes:
    """Read a regular file beneath a directory.

    Args:
        root: The directory.
        path: The file, relative to it.
        max_bytes: The most that is read.

    Raises:
        SandboxError: the path leaves the directory or goes through a link, is no regular file, or
            the file is larger.
    """
    *parents, name = _components(path)
    with _reported("read", path), _opened(root, parents, None, make=False) as directory:
        file = _open_readable(name, _FILE, directory)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise SandboxError(f"cannot read {path!r}: it is no regular file")
            chunks, size = [], 0
            while chunk := os.read(file, 1 << 20):
                chunks.append(chunk)
                size += len(chunk)
                if size > max_bytes:
                    raise SandboxError(f"cannot read {path!r}: it is larger than {max_bytes} bytes")
            return b"".join(chunks)
        finally:
            os.close(file)


def copy_tree(source: Path, dest: Path, max_bytes: int, owner: Owner | None = None) -> None:
    """Copy what a directory holds into another: regular files, directories, and links as links.

    Permission bits and modification times are kept, but every file stays readable and every
    directory usable for its owner; other kinds of file are left out; hard links become files.

    Args:
        source: The directory to copy.
        dest: Where to; made where it does not exist, and must be empty.
        max_bytes: The most that is copied, in bytes of apparent size.
        owner: Who owns the copies; None leaves the caller.

    Raises:
        SandboxError: there is more than ``max_bytes``, more than `MAX_ENTRIES` entries, or a
            directory deeper than `MAX_DEPTH`; or ``dest`` is not empty.
    """
    with _reported("copy", str(source)):
        dest.mkdir(parents=True, exist_ok=True)
        if any(dest.iterdir()):
            raise SandboxError(f"cannot copy to {dest}: it is not empty")
        top = os.open(source, _DIRECTORY)
        try:
            target = os.open(dest, _DIRECTORY)
            try:
                _Copy(max_bytes, owner).directory(top, target, depth=0)
            finally:
                os.close(target)
        finally:
            os.close(top)


class _Copy:
    """One copy under way, with what it may still use."""

    def __init__(self, max_bytes: int, owner: Owner | None) -> None:
        self.max_bytes = max_bytes
        self.left = max_bytes
        self.entries = MAX_ENTRIES
        self.owner = owner

    def directory(self, source: int, dest: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise SandboxError(f"cannot copy: a directory lies deeper than {MAX_DEPTH} levels")
        with os.scandir(source) as entries:
            for entry in entries:
                self.entries -= 1
                if self.entries < 0:
                    raise SandboxError(f"cannot copy: there are more than {MAX_ENTRIES} files")
                try:
                    if entry.is_symlink():
                        self._link(entry.name, source, dest)
                    elif entry.is_dir(follow_symlinks=False):
                        self._subdirectory(entry.name, source, dest, depth)
                    elif entry.is_file(follow_symlinks=False):
                        self._file(entry.name, source, dest)
                except FileNotFoundError:
                    continue  # it was removed while the copy ran

    def _link(self, name: str, source: int, dest: int) -> None:
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=dest)
        if self.owner is not None:
            os.chown(name, *self.owner, dir_fd=dest, follow_symlinks=False)

    def _subdirectory(self, name: str, source: int, dest: int, depth: int) -> None:
        inner = _open_readable(name, _DIRECTORY, source)
        try:
            os.mkdir(name, 0o700, dir_fd=dest)
            copy = os.open(name, _DIRECTORY, dir_fd=dest)
            try:
                self.directory(inner, copy, depth + 1)
                self._finish(os.fstat(inner), copy, 0o700)
            finally:
                os.close(copy)
        finally:
            os.close(inner)

    def _file(self, name: str, source: int, dest: int) -> None:
        file = _open_readable(name, _FILE, source)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return
            # A sparse file counts in full: the copy has no holes.
            self.left -= status.st_size
            if self.left < 0:
                raise SandboxError(
                    f"cannot copy: there are more than {self.max_bytes} bytes, {name!r} included"
                )
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            copy = os.open(name, flags, 0o600, dir_fd=dest)
            try:
                offset = 0
                while offset < status.st_size:  # no further, should the file still grow
                    count = min(status.st_size - offset, 1 << 24)
                    sent = os.sendfile(copy, file, offset, count)
                    if not sent:
                        break
                    offset += sent
                self._finish(status, copy, 0o400)
            finally:
                os.close(copy)
        finally:
            os.close(file)

    def _finish(self, status: os.stat_result, copy: int, least: int) -> None:
        if self.owner is not None:
            os.fchown(copy, *self.owner)
        os.fchmod(copy, stat.S_IMODE(status.st_mode) & 0o777 | least)
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))


def remove_tree(path: Path) -> None:
    """Remove a directory and all it holds, whatever its permissions and however deep.

    Links are removed and never followed. Nothing happens where there is no such directory. Nobody
    may be changing it any more.

    Raises:
        SandboxError: something could not be removed.
    """
    with _reported("remove", str(path)):
        try:
            here = os.open(path, _DIRECTORY)
        except FileNotFoundError:
            return
        try:
            os.fchmod(here, 0o700)
            # No recursion and one descriptor: the way back up is "..", and is checked.
            trail: list[tuple[str, tuple[int, int], list[str]]] = []
            directories = _remove_files(here)
            while directories or trail:
                if directories:
                    name = directories.pop()
                    os.chmod(name, 0o700, dir_fd=here)
                    trail.append((name, _inode(here), directories))
                    here = _move(here, name)
                    directories = _remove_files(here)
                else:
                    name, parent, directories = trail.pop()
                    here = _move(here, "..")
                    if _inode(here) != parent:
                        raise SandboxError(f"cannot remove {str(path)!r}: {name!r} was moved")
                    os.rmdir(name, dir_fd=here)
        finally:
            os.close(here)
        os.rmdir(path)


def _remove_files(directory: int) -> list[str]:
    """Remove what is no directory; returns the directories."""
    directories = []
    with os.scandir(directory) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=directory)
    return directories


def _move(directory: int, name: str) -> int:
    """Go from a directory to one beside it in the tree; the old descriptor is closed."""
    other = os.open(name, _DIRECTORY, dir_fd=directory)
    os.close(directory)
    return other


def _inode(directory: int) -> tuple[int, int]:
    status = os.fstat(directory)
    return status.st_dev, status.st_ino


def _components(path: str) -> list[str]:
    """The components of a path that stays beneath its directory."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise SandboxError(
            f"expected a relative path without '..' that stays in the directory, got {path!r}"
        )
    return parts


@contextmanager
def _opened(root: Path, parents: list[str], owner: Owner | None, *, make: bool) -> Iterator[int]:
    """A descriptor of the directory that the parents lead to."""
    directory = os.open(root, _DIRECTORY)
    try:
        for part in parents:
            if make:
                try:
                    os.mkdir(part, 0o755, dir_fd=directory)
                    if owner is not None:
                        os.chown(part, *owner, dir_fd=directory, follow_symlinks=False)
                except FileExistsError:
                    pass
            inner = _open_readable(part, _DIRECTORY, directory)
            os.close(directory)
            directory = inner
        yield directory
    finally:
        os.close(directory)


def _open_readable(name: str, flags: int, directory: int) -> int:
    """Open an entry for reading, giving its owner permission first where that is missing."""
    try:
        return os.open(name, flags, dir_fd=directory)
    except PermissionError:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            mode = stat.S_IMODE(os.fstat(handle).st_mode)
            os.chmod(f"/proc/self/fd/{handle}", mode | 0o700)
        finally:
            os.close(handle)
        return os.open(name, flags, dir_fd=directory)


@contextmanager
def _reported(verb: str, path: str) -> Iterator[None]:
    """Turn an OSError into a SandboxError that names the path."""
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        if isinstance(exc, NotADirectoryError) or reason.startswith("Too many levels"):
            reason = "a component is a symbolic link or no directory"
        raise SandboxError(f"cannot {verb} {path!r}: {reason}") from exc
