"""The interface of sandboxes: what a backend offers, and the plain types that cross it.

Nothing here knows how isolation is done, nor what runs inside. The invariant every backend keeps:
what is started in a sandbox, and everything that starts from it, is dead when `Process.wait`
returns, and `Sandbox.destroy` leaves no process, mount or file.

All methods are coroutines of one event loop, which may run in any thread. Should the process that
made a sandbox be killed, every process in the sandbox dies too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from clawgym_env.errors import ConfigError

Area = Literal["workspace", "home"]
"""The two directories of a sandbox that files are put to and got from."""

COPY_BYTES = 1 << 30
"""The default bound on what `Sandbox.snapshot` and `Sandbox.load` copy, in bytes."""

READ_BYTES = 64 << 20
"""The default bound on what `Sandbox.get` reads, in bytes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on one command; None leaves a limit out.

    The limits on CPU time, memory, open files and file size hold for each process by itself.

    Attributes:
        wall_s: Wall time from the start, in seconds; then everything is killed.
        cpu_s: CPU time of a process, in whole seconds.
        memory_mb: Private writable memory of a process, in MiB.
        pids: Processes and threads at once; only where the backend gives each sandbox its own uid.
        open_files: Open file descriptors of a process.
        file_mb: Size of a file that is written, in MiB.
        output_kb: Standard output and error together, in KiB; then everything is killed.
        tail_kb: How much of the end of each is kept, in KiB.
    """

    wall_s: float | None = None
    cpu_s: int | None = None
    memory_mb: int | None = None
    pids: int | None = None
    open_files: int | None = None
    file_mb: int | None = None
    output_kb: int | None = 65_536
    tail_kb: int = 64

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"limit {name} must be above 0 or None, got {value!r}")


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory or file that is seen inside.

    Attributes:
        source: Where it is on the host.
        target: The absolute path at which it is seen inside.
        read_only: Whether it cannot be written there.
    """

    source: Path
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """How a command ended.

    Attributes:
        returncode: Exit status; ``-N`` where signal N ended it; 127 where the command was not found
            and 126 where it could not be run; None where the sandbox killed it (a limit on wall
            time or output, or `Process.kill`).
        stdout: The end of its standard output, as bytes.
        stderr: The end of its standard error, as bytes.
        timed_out: Whether the limit on wall time killed it.
        flooded: Whether the limit on output killed it.
        truncated: Whether `stdout` or `stderr` is only the end of more.
        stdout_bytes: How much it wrote to standard output, in bytes.
        stderr_bytes: How much it wrote to standard error, in bytes.
        wall_s: How long it ran, in seconds.
    """

    returncode: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    flooded: bool = False
    truncated: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    wall_s: float = 0.0


class Process(Protocol):
    """A command that runs in a sandbox, with everything it starts."""

    @property
    def pid(self) -> int:
        """Host pid of the process that holds the command and its descendants together."""
        ...

    async def wait(self) -> ProcessResult:
        """Wait until the command has ended and its descendants are dead; may be called repeatedly.

        Raises:
            SandboxError: the sandbox itself died under the command.
        """
        ...

    async def kill(self) -> None:
        """Kill the command and its descendants; all are dead on return.

        Raises:
            SandboxError: something survived SIGKILL.
        """
        ...


class Sandbox(Protocol):
    """One place where commands run: a workspace, a home, and at most one way out, to the model."""

    @property
    def name(self) -> str:
        """The id it was created under."""
        ...

    @property
    def backend(self) -> str:
        """The name of its backend."""
        ...

    @property
    def workspace(self) -> Path:
        """The workspace on the host."""
        ...

    @property
    def home(self) -> Path:
        """The home on the host."""
        ...

    @property
    def workspace_path(self) -> str:
        """The workspace as seen inside."""
        ...

    @property
    def home_path(self) -> str:
        """The home as seen inside."""
        ...

    @property
    def model_url(self) -> str:
        """The model server's base URL as seen inside, without a path; empty where there is none."""
        ...

    @property
    def python(self) -> str:
        """A Python 3 interpreter as seen inside, for ``-I -S`` and the standard library."""
        ...

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        limits: Limits = Limits(),  # noqa: B008
    ) -> Process:
        """Start a command and return once it runs.

        Args:
            argv: The program, looked up in PATH, and its arguments.
            env: Variables beside and over PATH, HOME, USER, LANG, TZ and TMPDIR; nothing is
                inherited from the host.
            cwd: Working directory as seen inside, relative to the workspace; default the workspace.
            stdin: What it reads; nothing where None.
            limits: What it may use.

        Raises:
            SandboxError: the sandbox is destroyed, the working directory does not exist, or the
                sandbox could not be set up. A program that does not exist is no error but a result
                with exit status 127.
        """
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        limits: Limits = Limits(),  # noqa: B008
    ) -> ProcessResult:
        """Start a command and wait for it; cancelled, it kills the command. See `start`."""
        ...

    async def put(
        self, path: str, data: bytes, mode: int = 0o644, *, area: Area = "workspace"
    ) -> None:
        """Write a file, making its directories; what is inside owns it.

        Args:
            path: Where, relative to the area.
            data: The content.
            mode: Permission bits.
            area: ``workspace`` or ``home``.

        Raises:
            SandboxError: the path leaves the area or goes through a symbolic link, or the file
                cannot be written.
        """
        ...

    async def put_files(
        self, files: Mapping[str, bytes], *, mode: int = 0o644, area: Area = "workspace"
    ) -> None:
        """Write many files; see `put`."""
        ...

    async def get(
        self, path: str, *, area: Area = "workspace", max_bytes: int = READ_BYTES
    ) -> bytes:
        """Read a regular file.

        Raises:
            SandboxError: there is none, the path leaves the area or goes through a symbolic link,
                or the file is larger than ``max_bytes``.
        """
        ...

    async def snapshot(self, dest: Path, *, max_bytes: int = COPY_BYTES) -> None:
        """Copy the workspace to a host directory that does not exist yet or is empty.

        Links are kept as links; FIFOs, devices and sockets are left out.

        Raises:
            SandboxError: the workspace holds more than ``max_bytes`` (apparent size), too many or
                too deep files, or ``dest`` is not empty; ``dest`` is then incomplete.
        """
        ...

    async def load(self, source: Path, *, max_bytes: int = COPY_BYTES) -> None:
        """Copy a host directory, such as a snapshot, into the workspace, which must be empty.

        Raises:
            SandboxError: as for `snapshot`.
        """
        ...

    async def kill_all(self) -> None:
        """Kill every process of the sandbox; all are dead on return, and new ones may be started.

        Raises:
            SandboxError: something survived SIGKILL.
        """
        ...

    async def destroy(self) -> None:
        """Kill everything and remove the sandbox's directories; again, it does nothing.

        Raises:
            SandboxError: a process or a file could not be removed.
        """
        ...


class SandboxBackend(Protocol):
    """A way of making sandboxes."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""
        ...

    def check(self) -> str | None:
        """What this machine lacks for it and the command that fixes it; None where it works."""
        ...

    async def create(
        self,
        *,
        sandbox_id: str,
        root: Path,
        proxy_url: str = "",
        proxy_socket: Path | None = None,
        mounts: Sequence[Mount] = (),
        network: bool = False,
    ) -> Sandbox:
        """Make a sandbox with an empty workspace and an empty home.

        Args:
            sandbox_id: Unique under ``root``: letters, digits, dots, dashes and underscores.
            root: A host directory of the manager's; made where it does not exist.
            proxy_url: The model server's URL on the host.
            proxy_socket: The same server's Unix socket, the only way to it where there is no
                network.
            mounts: What else is seen inside.
            network: Whether the host's network is reachable from inside.

        Raises:
            SandboxUnavailableError: this machine lacks what the backend needs.
            SandboxError: the id is malformed or taken, or a mount is impossible.
        """
        ...
