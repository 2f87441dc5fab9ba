"""A sandbox whose workspace and home are host directories and whose commands run by the launcher.

Both local backends share everything here: files, the set of running commands, killing and removal.
What differs is the command line that leads to the launcher, which a subclass gives. The invariant:
while `kill_all` or `destroy` looks for what runs, nothing new can slip in.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from clawgym_env.errors import SandboxError
from clawgym_env.sandboxes.base import (
    COPY_BYTES,
    READ_BYTES,
    Area,
    Limits,
    Mount,
    ProcessResult,
)
from clawgym_env.sandboxes.files import Owner, copy_tree, read_file, remove_tree, write_file
from clawgym_env.sandboxes.running import Command, RunningProcess, launch

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class LocalSandbox(ABC):
    """See `clawgym_env.sandboxes.base.Sandbox`, whose methods these are.

    Args:
        name: The sandbox's id.
        directory: Its directory on the host, as `make_directory` makes it.
        workspace_path: The workspace as seen inside.
        home_path: The home as seen inside.
        model_url: The model server as seen inside.
        python: The interpreter as seen inside.
        launcher: The launcher as seen inside.
        owner: The uid and gid that own the files and run the commands; None means the caller's.
    """

    backend: str

    def __init__(
        self,
        *,
        name: str,
        directory: Path,
        workspace_path: str,
        home_path: str,
        model_url: str,
        python: str,
        launcher: str,
        owner: Owner | None,
    ) -> None:
        self.name = name
        self.workspace = directory / "workspace"
        self.home = directory / "home"
        self.workspace_path = workspace_path
        self.home_path = home_path
        self.model_url = model_url
        self.python = python
        self._launcher = launcher
        self._directory = directory
        self._owner = owner
        self._running: set[RunningProcess] = set()
        self._spawning = asyncio.Lock()
        self._destroying = asyncio.Lock()
        self._closed = False
        self._removed = False

    @abstractmethod
    def _wrap(self, launcher: list[str], report_fd: int) -> list[str]:
        """The host's command line that leads to the launcher's."""

    @abstractmethod
    def _command(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, limits: Limits
    ) -> Command:
        """What the launcher is told."""

    @abstractmethod
    def _strike(self, process: RunningProcess) -> None:
        """Send what kills a command and all its descendants."""

    def _host_env(self) -> Mapping[str, str]:
        """Variables of the launcher itself."""
        return {}

    @abstractmethod
    async def _sweep(self) -> None:
        """Kill what may have got away from its launcher."""

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        limits: Limits = Limits(),  # noqa: B008
    ) -> RunningProcess:
        """Start a command and return once it runs."""
        directory = posixpath.join(self.workspace_path, cwd or "")
        command = self._command(argv, env or {}, directory, limits)
        async with self._spawning:
            if self._closed:
                raise SandboxError(f"sandbox {self.name!r} is destroyed; create another")
            launching = asyncio.ensure_future(
                launch(
                    self._wrap,
                    self.python,
                    self._launcher,
                    command,
                    stdin=stdin,
                    limits=limits,
                    strike=self._strike,
                    host_env=self._host_env(),
                )
            )
            try:
                process = await asyncio.shield(launching)
            except asyncio.CancelledError:
                # Cancelled itself, asyncio would kill what it spawned, and not what that spawned.
                await (await launching).kill()
                raise
            self._running = {other for other in self._running if not other.ended} | {process}
        try:
            await process.started()
        except BaseException:
            await process.kill()
            raise
        return process

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        limits: Limits = Limits(),  # noqa: B008
    ) -> ProcessResult:
        """Start a command and wait for it; cancelled, it kills the command."""
        process = await self.start(argv, env=env, cwd=cwd, stdin=stdin, limits=limits)
        try:
            return await process.wait()
        finally:
            await process.kill()

    async def put(
        self, path: str, data: bytes, mode: int = 0o644, *, area: Area = "workspace"
    ) -> None:
        """Write a file, making its directories; what is inside owns it."""
        await self.put_files({path: data}, mode=mode, area=area)

    async def put_files(
        self, files: Mapping[str, bytes], *, mode: int = 0o644, area: Area = "workspace"
    ) -> None:
        """Write many files."""
        root = self._area(area)

        def write() -> None:
            for path, data in files.items():
                write_file(root, path, data, mode, self._owner)

        await asyncio.to_thread(write)

    async def get(
        self, path: str, *, area: Area = "workspace", max_bytes: int = READ_BYTES
    ) -> bytes:
        """Read a regular file."""
        return await asyncio.to_thread(read_file, self._area(area), path, max_bytes)

    async def snapshot(self, dest: Path, *, max_bytes: int = COPY_BYTES) -> None:
        """Copy the workspace to a host directory that does not exist yet or is empty."""
        await asyncio.to_thread(copy_tree, self._area("workspace"), dest, max_bytes)

    async def load(self, source: Path, *, max_bytes: int = COPY_BYTES) -> None:
        """Copy a host directory, such as a snapshot, into the workspace, which must be empty."""
        workspace = self._area("workspace")
        await asyncio.to_thread(copy_tree, source, workspace, max_bytes, self._owner)

    async def kill_all(self) -> None:
        """Kill every process of the sandbox; all are dead on return."""
        async with self._spawning:
            running, self._running = self._running, set()
            for process in running:
                process.strike()
            try:
                await asyncio.gather(*(process.kill() for process in running))
                await self._sweep()
            finally:
                self._running |= {process for process in running if not process.ended}

    async def destroy(self) -> None:
        """Kill everything and remove the sandbox's directories; again, it does nothing."""
        self._closed = True
        async with self._destroying:
            if self._removed:
                return
            await self.kill_all()
            await asyncio.to_thread(remove_tree, self._directory)
            self._removed = True

    def _area(self, area: Area) -> Path:
        if self._closed:
            raise SandboxError(f"sandbox {self.name!r} is destroyed; create another")
        if area not in ("workspace", "home"):
            raise SandboxError(f"expected area 'workspace' or 'home', got {area!r}")
        return self.workspace if area == "workspace" else self.home


def make_directory(root: Path, sandbox_id: str, names: Sequence[str], owner: Owner | None) -> Path:
    """Make a sandbox's own directory, closed to others, with directories of its owner's in it.

    Raises:
        SandboxError: the id is malformed or taken, or the directory cannot be made.
    """
    if not _ID.fullmatch(sandbox_id):
        raise SandboxError(
            f"expected a sandbox id of letters, digits, '.', '_' and '-', got {sandbox_id!r}"
        )
    directory = root.absolute() / sandbox_id
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.mkdir(mode=0o700)
        for name in names:
            (directory / name).mkdir(mode=0o755)
            if owner is not None:
                os.chown(directory / name, *owner)
    except FileExistsError as exc:
        raise SandboxError(
            f"sandbox {sandbox_id!r} exists already under {root}; destroy it or choose another id"
        ) from exc
    except OSError as exc:
        raise SandboxError(f"cannot make sandbox {sandbox_id!r} under {root}: {exc}") from exc
    return directory


def check_mounts(mounts: Sequence[Mount]) -> None:
    """Refuse mounts that cannot be.

    Raises:
        SandboxError: a source does not exist, or a target is no absolute path.
    """
    for mount in mounts:
        if not mount.source.exists():
            raise SandboxError(f"cannot mount {mount.source}: there is no such file or directory")
        if not mount.target.startswith("/") or ".." in mount.target.split("/"):
            raise SandboxError(
                f"cannot mount {mount.source} at {mount.target!r}: expected an absolute path"
            )


def rlimits(limits: Limits) -> dict[str, int]:
    """The limits that hold for a process by itself, as names and values of `resource`."""
    values = {
        "RLIMIT_CPU": limits.cpu_s,
        # Not the address space: runtimes such as Node reserve far more of it than they use.
        "RLIMIT_DATA": None if limits.memory_mb is None else limits.memory_mb << 20,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_FSIZE": None if limits.file_mb is None else limits.file_mb << 20,
        "RLIMIT_CORE": 0,
    }
    return {name: value for name, value in values.items() if value is not None}
