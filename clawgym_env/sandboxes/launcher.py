"""The program that stands between a sandbox and the command it runs.

It reads its settings from an inherited file descriptor, gives up root where it has it, listens on
the loopback port that leads to the model, forks and executes the command under its limits, and
stays: as the forwarder from that port to the model's Unix socket, as the reaper of orphans, and as
the reporter of how the command ended. When the command ends, so does everything it started. In a
PID namespace this program is process 1 and the kernel does that; elsewhere it is a child subreaper
and kills its descendants itself, also when it is told to stop. It never outlives the manager.

It knows nothing of HTTP, tasks or rollouts, imports the standard library only, and runs as
``python3 -I -S launcher.py SETTINGS_FD`` on any Python from 3.8.

Reports are lines: ``started``, ``failed REASON``, ``exit STATUS``, ``signal NUMBER``.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would cost a quarter of the whole start
    from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_CHUNK = 65_536
_BACKLOG = 1_024
_RETRY_S = 0.005


class _Half:
    """One direction of a connection: what was read from ``source`` and not yet sent to ``sink``."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.buffer = bytearray()
        self.ended = False  # the source has no more
        self.done = False  # and the sink knows
        self.refused = False  # the sink takes no more: what still comes is dropped

    @property
    def reading(self) -> bool:
        """Whether more may be read now: a slow sink holds its source back."""
        return not self.ended and len(self.buffer) < _CHUNK

    def read(self) -> None:
        """Read once and pass on at once."""
        try:
            data = self.source.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            if not self.refused:
                self.buffer += data
        else:
            self.ended = True
        self.write()

    def write(self) -> None:
        """Send what the sink takes now; pass the end on after the last byte."""
        if self.buffer:
            try:
                del self.buffer[: self.sink.send(self.buffer)]
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.refused = True
                self.buffer.clear()
        if self.ended and not self.buffer and not self.done:
            self.done = True
            try:
                self.sink.shutdown(socket.SHUT_WR)
            except OSError:
                self.refused = True


class _Link:
    """One client's connection and the connection to the model that serves it."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.setblocking(False)
        self.up = _Half(self.client, self.server)
        self.down = _Half(self.server, self.client)
        self.closed = False

    def halves(self, sock: socket.socket) -> tuple[_Half, _Half]:
        """The half that reads from this socket, and the one that writes to it."""
        return (self.up, self.down) if sock is self.client else (self.down, self.up)

    def close(self) -> None:
        self.closed = True
        self.client.close()
        self.server.close()


class Forwarder:
    """Carries each connection to a loopback port over to a Unix socket, byte by byte.

    Args:
        selector: Where the sockets are watched; keys carry a callable of the ready events.
        port: The loopback port to listen on.
        path: The Unix socket.
    """

    def __init__(self, selector: selectors.BaseSelector, port: int, path: str) -> None:
        self.selector = selector
        self.path = path
        self.waiting: list[_Link] = []  # accepted, and the Unix socket's backlog was full
        self.listener = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        self.listener.setblocking(False)
        self.listening = False
        self._listen(True)

    def _listen(self, on: bool) -> None:
        if on and not self.listening:
            self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        elif self.listening and not on:
            self.selector.unregister(self.listener)
        self.listening = on

    def _accept(self, events: int) -> None:
        while True:
            try:
                client = self.listener.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # out of descriptors: go on when a connection has closed
                self._listen(False)
                return
            try:
                link = _Link(client)
            except OSError:
                client.close()
                self._listen(False)
                return
            self._connect(link)

    def _connect(self, link: _Link) -> None:
        try:
            link.server.connect(self.path)
        except BlockingIOError:
            self.waiting.append(link)
        except OSError:
            link.close()
        else:
            self._watch(link)

    def retry(self) -> bool:
        """Connect what waits for the Unix socket's backlog; True where some still waits."""
        links, self.waiting = self.waiting, []
        for link in links:
            self._connect(link)
        return bool(self.waiting)

    def _watch(self, link: _Link) -> None:
        """Watch both sockets for what the link can do next, or end it when both halves are done."""
        if link.up.done and link.down.done:
            for sock in (link.client, link.server):
                if sock in self.selector.get_map():
                    self.selector.unregister(sock)
            link.close()
            self._listen(True)
            return
        for sock in (link.client, link.server):
            reader, writer = link.halves(sock)
            wanted = selectors.EVENT_READ if reader.reading else 0
            wanted |= selectors.EVENT_WRITE if writer.buffer else 0
            known = self.selector.get_map().get(sock)
            if known is None and wanted:
                self.selector.register(sock, wanted, self._handler(link, sock))
            elif known is not None and not wanted:
                self.selector.unregister(sock)
            elif known is not None and known.events != wanted:
                self.selector.modify(sock, wanted, known.data)

    def _handler(self, link: _Link, sock: socket.socket) -> Any:
        reader, writer = link.halves(sock)

        def handle(events: int) -> None:
            if link.closed:  # by the event of its other socket, in this same round
                return
            if events & selectors.EVENT_READ and reader.reading:
                reader.read()
            if events & selectors.EVENT_WRITE:
                writer.write()
            self._watch(link)

        return handle


def _prctl(option: int, value: int) -> None:
    import ctypes  # here, since it costs 3 ms and is not always needed

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _close_all_but(kept: set[int]) -> None:
    """Close what was inherited and is not ours, so that the command cannot inherit it either."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue  # the one that read the directory
    for fd in kept - {0, 1, 2}:
        os.set_inheritable(fd, False)


def _watch_lives(
    selector: selectors.BaseSelector, manager: int, parent: int | None, stop: list[int]
) -> None:
    """Stop when the manager ends, or the process between it and us.

    The kernel's signal at a parent's death (PR_SET_PDEATHSIG, bubblewrap's --die-with-parent) does
    not do: it follows a thread and not a process; it comes with the parent's credentials, which
    may not signal another uid; and it leaves a process behind where it strikes bubblewrap early.

    Args:
        selector: Where the rest is watched.
        manager: A pidfd.
        parent: A pipe whose other end the process between holds, and nobody else; others read it.
        stop: Gets an entry.
    """
    selector.register(manager, selectors.EVENT_READ, lambda events: stop.append(signal.SIGHUP))
    if parent is not None:
        life = select.epoll()
        life.register(parent, 0)  # no event but the hang-up, which always comes
        selector.register(life, selectors.EVENT_READ, lambda events: stop.append(signal.SIGHUP))


def _drop_root(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _limit(limits: dict[str, int]) -> None:
    """Set each limit, soft and hard; one that is already tighter stays."""
    for name, value in limits.items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # One second between the limits on CPU time: SIGXCPU comes first and can be told apart.
        over = value + 1 if name == "RLIMIT_CPU" and hard == resource.RLIM_INFINITY else value
        resource.setrlimit(which, (value, over))


def _execute(settings: dict[str, Any], files: tuple[int, int]) -> NoReturn:
    """Become the command."""
    argv = settings["argv"]
    try:
        os.setsid()  # its own group, so that signals to the group miss the launcher
        if settings["supervise"]:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)  # whatever the manager was told to ignore
        os.umask(0o022)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        _limit(settings["limits"])
        os.execvpe(argv[0], argv, settings["env"])
    except OSError as exc:
        name = argv[0].decode("utf-8", "replace")
        text = f"clawgym: cannot run {name!r}: {exc.strerror}\n"
        os.write(2, text.encode("utf-8", "replace"))
        os._exit(127 if isinstance(exc, FileNotFoundError) else 126)


def _descendants(root: int) -> list[int]:
    """Every living descendant of a process, from one pass over /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue  # it ended meanwhile
            children.setdefault(parent, []).append(int(entry))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _kill_descendants() -> None:
    """Kill and reap until no child is left; orphans of the killed come here and are next."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.001)


def _serve(
    selector: selectors.BaseSelector, forwarder: Forwarder | None, command: int, stop: list[int]
) -> int | None:
    """Forward and reap until the command ends; its wait status, or None when told to stop."""
    while not stop:
        blocked = forwarder is not None and forwarder.retry()
        for key, events in selector.select(_RETRY_S if blocked else None):
            key.data(events)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == command:
                return status
            if pid == 0:
                break
    return None


def main() -> int:
    """Run one command; returns its exit status, or 128 and the number of the signal that ended it.

    Raises:
        OSError: the reader of the reports is gone.
    """
    with open(int(sys.argv[1]), "rb") as file:
        # marshal and not json: the settings come from our own parent, and the import is free.
        settings: dict[str, Any] = marshal.loads(file.read())
    report_fd: int = settings["report"]
    manager_fd: int = settings["manager"]
    parent_fd: int | None = settings["parent"]
    supervise: bool = settings["supervise"]
    stop: list[int] = []
    try:
        between = set() if parent_fd is None else {parent_fd}
        _close_all_but({0, 1, 2, report_fd, manager_fd} | between)
        if settings["owner"] is not None:
            _drop_root(*settings["owner"])  # after that nobody of this uid may trace us
        elif not supervise:
            _prctl(_PR_SET_DUMPABLE, 0)  # here neither: a stopped launcher would outlive all
        if supervise:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        os.chdir(settings["cwd"])

        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
        selector = selectors.DefaultSelector()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        selector.register(wake_read, selectors.EVENT_READ, lambda _: os.read(wake_read, 4_096))
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        if supervise:
            signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
        _watch_lives(selector, manager_fd, parent_fd, stop)
        forwarder = None
        if settings["port"] is not None:
            forwarder = Forwarder(selector, settings["port"], settings["socket"])
        executed, executing = os.pipe()  # closed in the child by the execution of the command
        command = os.fork()
    except OSError as exc:
        os.write(report_fd, f"failed {exc}\n".encode("utf-8", "replace"))
        return 1
    if command == 0:
        _execute(settings, files)
    os.close(executing)
    os.read(executed, 1)
    os.close(executed)

    status = None
    try:
        os.write(report_fd, b"started\n")
        status = _serve(selector, forwarder, command, stop)
    finally:
        if supervise:
            _kill_descendants()
    if status is None:
        return 128 + signal.SIGTERM
    if os.WIFSIGNALED(status):
        os.write(report_fd, b"signal %d\n" % os.WTERMSIG(status))
        return 128 + os.WTERMSIG(status)
    os.write(report_fd, b"exit %d\n" % os.WEXITSTATUS(status))
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    os._exit(main())
