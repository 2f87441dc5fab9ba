"""The ``process`` backend: plain child processes, **for trusted code only**.

It isolates nothing: commands run as the caller, see the caller's files and network, and reach the
model through the proxy's TCP port. What it does keep is order: a private workspace, home and
temporary directory, a clean environment, and no process left behind. Each command runs under a
launcher that adopts its orphans and kills them at the end, or when the manager ends. Should
somebody kill the launcher, its processes are found by a mark in their environment.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from clawgym_env.errors import SandboxError, SandboxUnavailableError
from clawgym_env.sandboxes.base import Limits, Mount
from clawgym_env.sandboxes.local import (
    PATH,
    LocalSandbox,
    check_mounts,
    make_directory,
    rlimits,
)
from clawgym_env.sandboxes.running import (
    LAUNCHER,
    Command,
    RunningProcess,
    strike_supervisor,
)

_MARK = "CLAWGYM_SANDBOX"
_SWEEP_S = 10.0


class ProcessSandbox(LocalSandbox):
    """A workspace, a home and processes of the caller's own; made by `ProcessBackend.create`."""

    backend = "process"

    def __init__(self, *, name: str, directory: Path, model_url: str) -> None:
        super().__init__(
            name=name,
            directory=directory,
            workspace_path=str(directory / "workspace"),
            home_path=str(directory / "home"),
            model_url=model_url,
            python=shutil.which("python3", path=PATH) or sys.executable,
            launcher=str(LAUNCHER),
            owner=None,
        )
        self._mark = f"{name}-{secrets.token_hex(8)}"

    def _wrap(self, launcher: list[str], report_fd: int) -> list[str]:
        # Our own interpreter is certain to be there and to run the launcher.
        return [sys.executable, *launcher[1:]]

    def _command(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, limits: Limits
    ) -> Command:
        base = {
            "PATH": PATH,
            "HOME": self.home_path,
            "USER": "agent",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "TMPDIR": str(self._directory / "tmp"),
        }
        return Command(
            argv=argv,
            env={**base, **env, _MARK: self._mark},
            cwd=cwd,
            owner=None,
            supervise=True,
            port=None,
            socket="",
            rlimits=rlimits(limits),
        )

    def _host_env(self) -> Mapping[str, str]:
        return {_MARK: self._mark}

    def _strike(self, process: RunningProcess) -> None:
        strike_supervisor(process)

    async def _sweep(self) -> None:
        """Kill every process that carries this sandbox's mark, until there is none.

        Raises:
            SandboxError: one survived SIGKILL.
        """
        entry = f"{_MARK}={self._mark}".encode()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SWEEP_S
        while pids := await asyncio.to_thread(_kill_marked, entry):
            if loop.time() > deadline:
                raise SandboxError(f"processes {pids} survived SIGKILL for {_SWEEP_S:.0f} s")
            await asyncio.sleep(0.005)


class ProcessBackend:
    """Makes sandboxes of plain processes, for trusted code; they see the host as the caller does.

    A mount is possible only at its own path, where it is seen anyway. The network is always there.
    """

    name = "process"

    def check(self) -> str | None:
        """What this machine lacks for it; None where it works."""
        return _check()

    async def create(
        self,
        *,
        sandbox_id: str,
        root: Path,
        proxy_url: str = "",
        proxy_socket: Path | None = None,
        mounts: Sequence[Mount] = (),
        network: bool = False,
    ) -> ProcessSandbox:
        """Make a sandbox with an empty workspace and an empty home; see `SandboxBackend.create`."""
        missing = self.check()
        if missing is not None:
            raise SandboxUnavailableError(missing)
        check_mounts(mounts)
        for mount in mounts:
            if str(mount.source) != mount.target:
                raise SandboxError(
                    f"the process backend cannot mount {mount.source} at {mount.target!r}: "
                    "it shows files at their own paths only; use the bubblewrap backend"
                )
        directory = make_directory(root, sandbox_id, ("workspace", "home", "tmp"), None)
        return ProcessSandbox(name=sandbox_id, directory=directory, model_url=proxy_url)


@functools.cache
def _check() -> str | None:
    if not sys.platform.startswith("linux"):
        return f"the process backend needs Linux (/proc, prctl), this is {sys.platform}"
    if not os.path.exists("/proc/self/environ"):
        return "the process backend needs /proc; mount it with: mount -t proc proc /proc"
    return None


def _kill_marked(entry: bytes) -> list[int]:
    """Kill each process that has this entry in its environment; returns their pids."""
    killed = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if entry not in file.read().split(b"\0"):
                    continue
            os.kill(int(name), signal.SIGKILL)
        except OSError:
            continue  # it has ended, or is another user's and so none of ours
        killed.append(int(name))
    return killed
