"""The directory that a manager's sandboxes live in, and the sweep of those that dead managers left.

A directory's name carries its owner's pid and start time, so that a live owner is told from a dead
one whose pid was given away. Invariant: nothing is removed that a live process owns, or that was
not made here.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from clawgym_env.errors import SandboxError

_NAME = re.compile(r"clawgym-(\d+)-(\d+)-[A-Za-z0-9_]+")


def make_room() -> Path:
    """Make a directory for this process' sandboxes.

    Raises:
        SandboxError: The temporary directory cannot be written to.
    """
    own = os.getpid()
    wanted = os.environ.get("TMPDIR")
    if wanted and not os.access(wanted, os.W_OK | os.X_OK):
        raise SandboxError(
            f"TMPDIR is {wanted!r}, which is no directory that can be written to; give one"
        )
    try:
        room = Path(tempfile.mkdtemp(prefix=f"clawgym-{own}-{_start_time(own)}-"))
        # Sandboxes run under other user ids: they may pass through, and list nothing.
        room.chmod(0o711)
    except OSError as error:
        raise SandboxError(
            f"cannot make a directory for sandboxes: {error}; set TMPDIR to a writable one"
        ) from error
    return room


def sweep() -> list[Path]:
    """Remove this user's directories whose owners are dead.

    Returns:
        What was removed.
    """
    removed = []
    for path in Path(tempfile.gettempdir()).glob("clawgym-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink() or path.stat().st_uid != os.getuid():
            continue
        if _start_time(int(match[1])) != int(match[2]):
            clear(path)
            removed.append(path)
    return removed


def clear(room: Path) -> None:
    """Remove a directory with all it holds, directories made unreadable included.

    Another process that sweeps at the same time may have been quicker.
    """

    def retry(function: object, path: str, error: BaseException) -> None:
        if isinstance(error, FileNotFoundError):
            return
        Path(path).parent.chmod(0o700)
        if Path(path).is_dir() and not Path(path).is_symlink():
            Path(path).chmod(0o700)
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)

    shutil.rmtree(room, onerror=lambda function, path, info: retry(function, path, info[1]))


def _start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    # The command's name stands in brackets and may hold anything, so count from the last one.
    return int(stat.rpartition(")")[2].split()[19])
