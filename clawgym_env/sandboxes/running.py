"""One command under the launcher, seen from the host: its pipes, its limits and its end.

Everything here runs in the event loop's own thread. Output is read as it comes and only its end is
kept, so that a program can flood neither memory nor disk, nor block. The launcher gets a pidfd of
this process, and ends with it. This module knows nothing of how a backend isolates: it is given
the command line that leads to the launcher, and how to strike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clawgym_env.errors import SandboxError
from clawgym_env.sandboxes.base import Limits, ProcessResult
from clawgym_env.sandboxes.pipes import Lines, Pump, Tail, memory_file, readable

LAUNCHER = Path(__file__).with_name("launcher.py")

_START_S = 60.0  # far above any start seen, even with hundreds at once
_STRIKE_S = 10.0
_AGAIN_S = 0.2
_HOST_ENV = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


@dataclass(frozen=True, slots=True)
class Command:
    """What the launcher is told.

    Attributes:
        argv: The program and its arguments.
        env: Its whole environment.
        cwd: Its working directory as seen inside.
        owner: The uid and gid to give up root for, or None.
        supervise: Whether the launcher must hold its descendants together itself.
        port: The loopback port to forward from, or None.
        socket: The Unix socket to forward to, as seen inside.
        rlimits: Names of the `resource` module and their values.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    owner: tuple[int, int] | None
    supervise: bool
    port: int | None
    socket: str
    rlimits: Mapping[str, int]

    def settings(self, *, report: int, manager: int, parent: int | None) -> bytes:
        """The launcher's settings.

        Args:
            report: The descriptor it reports to.
            manager: A pidfd; it ends with that process.
            parent: A pipe at whose hang-up it ends, or None.

        Raises:
            SandboxError: the command line or the environment cannot be given to a program.
        """
        if not self.argv or not self.argv[0]:
            raise SandboxError("expected a command line with a program, got an empty one")
        argv = [os.fsencode(word) for word in self.argv]
        env = {os.fsencode(name): os.fsencode(value) for name, value in self.env.items()}
        for word in [*argv, *env, *env.values()]:
            if b"\0" in word:
                raise SandboxError(f"expected no NUL in arguments and variables, got {word!r}")
        for name in env:
            if not name or b"=" in name:
                raise SandboxError(f"expected a variable's name without '=', got {name!r}")
        return marshal.dumps(
            {
                "argv": argv,
                "env": env,
                "cwd": self.cwd,
                "owner": self.owner,
                "supervise": self.supervise,
                "port": self.port,
                "socket": self.socket,
                "limits": dict(self.rlimits),
                "report": report,
                "manager": manager,
                "parent": parent,
            },
            4,
        )


class _Report:
    """What the launcher says of the command, and bubblewrap of the launcher."""

    def __init__(self) -> None:
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pidfd: int | None = None  # of process 1 of the sandbox's PID namespace
        self.doomed = False  # whether process 1 is to be killed as soon as it is known
        self.failure: str | None = None
        self.returncode: int | None = None
        self._lines = Lines()
        self._status = Lines()

    def take(self, data: bytes) -> None:
        """A piece of the launcher's report."""
        for line in self._lines.add(data):
            word, _, rest = line.decode("utf-8", "replace").partition(" ")
            if word == "started":
                self._settle()
            elif word == "failed":
                self.failure = rest
                self._settle()
            elif word == "exit":
                self.returncode = int(rest)
            elif word == "signal":
                self.returncode = -int(rest)

    def take_status(self, data: bytes) -> None:
        """A piece of bubblewrap's status: a JSON object a line."""
        for line in self._status.add(data):
            pid = json.loads(line).get("child-pid")
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    self.pidfd = os.pidfd_open(pid)
                if self.doomed:
                    _signal(self.pidfd, signal.SIGKILL)

    def _settle(self) -> None:
        if not self.started.done():
            self.started.set_result(None)

    def end(self) -> None:
        if not self.started.done():
            self.failure = "its launcher ended before the command was started"
            self.started.set_result(None)


class RunningProcess:
    """A command that runs under the launcher; made by `launch`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        pipes: tuple[int, int, int, int],
        limits: Limits,
        strike: Callable[[RunningProcess], None],
    ) -> None:
        self._process = process
        self._limits = limits
        self._strike = strike
        self._timed_out = False
        self._flooded = False
        self._struck = False
        self._clock: asyncio.TimerHandle | None = None
        self._again: asyncio.TimerHandle | None = None
        self._began = time.monotonic()
        self.report = _Report()
        self._out, self._err = Tail(limits.tail_kb << 10), Tail(limits.tail_kb << 10)
        self._pumps = (
            Pump(pipes[0], lambda data: self._output(self._out, data), lambda: None),
            Pump(pipes[1], lambda data: self._output(self._err, data), lambda: None),
            Pump(pipes[2], self.report.take, self.report.end),
            Pump(pipes[3], self.report.take_status, lambda: None),
        )
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._pidfd = os.pidfd_open(process.pid)
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._watching.add_done_callback(_seen)

    @property
    def pid(self) -> int:
        """Host pid of the process that holds the command and its descendants together."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the command and its descendants are dead."""
        return self._watching.done()

    @property
    def stderr_tail(self) -> str:
        """The end of what was written to standard error so far."""
        return self._err.data.decode("utf-8", "replace").strip()

    async def started(self) -> None:
        """Wait until the command runs; the clock of the wall time starts here.

        Raises:
            SandboxError: it could not be started.
        """
        try:
            async with asyncio.timeout(_START_S):
                await self.report.started
        except TimeoutError:
            self.report.failure = f"the command had not started after {_START_S:.0f} s"
        if self.report.failure is not None and not self._flooded:
            await self.kill()
            tail = f"; stderr: {self.stderr_tail}" if self.stderr_tail else ""
            raise SandboxError(f"cannot start a command: {self.report.failure}{tail}")
        self._began = time.monotonic()
        if self._limits.wall_s is not None and not self.ended:
            loop = asyncio.get_running_loop()
            self._clock = loop.call_later(self._limits.wall_s, self._time_out)

    async def wait(self) -> ProcessResult:
        """Wait until the command has ended and its descendants are dead.

        Raises:
            SandboxError: the launcher died under the command.
        """
        return await asyncio.shield(self._watching)

    async def kill(self) -> None:
        """Kill the command and its descendants; all are dead on return.

        Raises:
            SandboxError: something survived SIGKILL.
        """
        self.strike()
        for last in (False, True):
            done, _ = await asyncio.wait([self._watching], timeout=_STRIKE_S)
            if done:
                return
            if not last:
                self.send_signal(signal.SIGKILL)
        raise SandboxError(f"process {self.pid} survived SIGKILL for {_STRIKE_S:.0f} s")

    def strike(self) -> None:
        """Kill the command and its descendants, without waiting.

        Struck again until it has ended: a launcher that supervises may be stopped in between.
        """
        if self.ended:
            return
        self._struck = True
        self._strike(self)
        if self._again is not None:
            self._again.cancel()
        self._again = asyncio.get_running_loop().call_later(_AGAIN_S, self.strike)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process that holds the others together, if it is still there."""
        # Through a descriptor: the pid may be reaped, and taken by another, at any moment.
        _signal(self._pidfd, number)

    def _output(self, tail: Tail, data: bytes) -> None:
        tail.add(data)
        limit = self._limits.output_kb
        if limit is not None and self._out.total + self._err.total > limit << 10:
            if not self._flooded:
                self._flooded = True
                self.strike()

    def _time_out(self) -> None:
        self._timed_out = True
        self.strike()

    async def _watch(self) -> ProcessResult:
        try:
            status = await self._process.wait()
            if self.report.pidfd is not None:
                # Usually dead by now; not so where somebody killed the outer process alone.
                await readable(self.report.pidfd)
        except BaseException:
            self.strike()
            raise
        finally:
            wall_s = time.monotonic() - self._began
            for timer in (self._clock, self._again):
                if timer is not None:
                    timer.cancel()
            for pump in self._pumps:
                pump.close()
            for pidfd in (self._pidfd, self.report.pidfd):
                if pidfd is not None:
                    os.close(pidfd)
            self._pidfd = self.report.pidfd = None
        returncode = self.report.returncode
        if returncode is None and not self._struck and self.report.failure is None:
            raise SandboxError(
                f"the launcher of a command died under it (wait status {status}): "
                f"it was killed from outside, or the machine ran out of memory; "
                f"stderr: {self.stderr_tail or 'empty'}"
            )
        return ProcessResult(
            returncode=returncode,
            stdout=self._out.data,
            stderr=self._err.data,
            timed_out=self._timed_out and returncode is None,
            flooded=self._flooded and returncode is None,
            truncated=max(self._out.total, self._err.total) > self._out.keep,
            stdout_bytes=self._out.total,
            stderr_bytes=self._err.total,
            wall_s=wall_s,
        )


async def launch(
    wrap: Callable[[list[str], int], list[str]],
    python: str,
    launcher: str,
    command: Command,
    *,
    stdin: bytes | None,
    limits: Limits,
    strike: Callable[[RunningProcess], None],
    host_env: Mapping[str, str],
) -> RunningProcess:
    """Spawn the launcher; the command may not have started yet on return.

    Args:
        wrap: Makes the host's command line of the launcher's and of the descriptor of a pipe: one
            that bubblewrap writes its status to and keeps open while it lives.
        python: The interpreter as seen inside.
        launcher: The launcher as seen inside.
        command: What to run.
        stdin: What it reads.
        limits: Wall time and output are enforced here.
        strike: Sends what kills a running command and all its descendants.
        host_env: Variables of the launcher itself.

    Raises:
        SandboxError: the command cannot be given to a program, or nothing can be spawned.
    """
    ours: list[int] = []
    theirs: list[int] = []
    try:
        for _ in range(4):
            reader, writer = os.pipe()
            ours.append(reader)
            theirs.append(writer)
            if command.owner is not None:
                os.fchown(writer, *command.owner)  # else /dev/stdout cannot be opened inside
        out, err, report, status = theirs
        manager = os.pidfd_open(os.getpid())
        theirs.append(manager)
        parent = None if command.supervise else ours[3]
        settings = memory_file(command.settings(report=report, manager=manager, parent=parent))
        theirs.append(settings)
        passed = [report, manager, settings]
        if parent is not None:
            passed += [status, parent]
        if stdin is not None:
            theirs.append(memory_file(stdin))
        argv = wrap([python, "-I", "-S", launcher, str(settings)], status)
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else theirs[-1],
            stdout=out,
            stderr=err,
            pass_fds=passed,
            start_new_session=True,
            env={**_HOST_ENV, **host_env},
            cwd="/",
        )
    except BaseException as exc:
        for fd in ours:
            os.close(fd)
        if isinstance(exc, OSError):
            raise SandboxError(f"cannot start a command: {exc}") from exc
        raise
    finally:
        for fd in theirs:
            os.close(fd)
    return RunningProcess(process, (ours[0], ours[1], ours[2], ours[3]), limits, strike)


def strike_namespace(process: RunningProcess) -> None:
    """Kill process 1 of the command's PID namespace, and so the whole namespace.

    Never bubblewrap's outer process: killed while it sets the namespaces up, it would leave a
    process 1 that waits for it forever.
    """
    process.report.doomed = True
    _signal(process.report.pidfd, signal.SIGKILL)


def strike_supervisor(process: RunningProcess) -> None:
    """Tell a supervising launcher to kill its descendants and end; it may have been stopped."""
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)


def _signal(pidfd: int | None, number: int) -> None:
    if pidfd is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)


def _seen(task: asyncio.Task[ProcessResult]) -> None:
    """Mark a failure as seen: it is for those who wait, and there may be none."""
    if not task.cancelled():
        task.exception()
