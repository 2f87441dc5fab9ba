"""Making sandboxes in tests, and finding what they leave behind."""

import os
import time
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clawgym_env.sandboxes import get_backend
from clawgym_env.sandboxes.bubblewrap import BubblewrapBackend

BACKENDS = {
    "process": lambda: get_backend("process"),
    "bubblewrap": lambda: get_backend("bubblewrap"),
    "bubblewrap-userns": lambda: BubblewrapBackend(separate_uids=False),
}


def usable(name):
    backend = BACKENDS[name]()
    missing = backend.check()
    if missing is not None:
        pytest.skip(missing)
    return backend


def maker(backend, tmp_path):
    @asynccontextmanager
    async def make(sandbox_id="box", **options):
        root = tmp_path / "root"
        sandbox = await backend.create(sandbox_id=sandbox_id, root=root, **options)
        try:
            yield sandbox
        finally:
            await sandbox.destroy()
        assert not (root / sandbox_id).exists()

    return make


class Mark:
    """A variable by which a test's processes are found in /proc, wherever they went."""

    def __init__(self):
        self.env = {"TEST_MARK": uuid.uuid4().hex}

    def alive(self):
        entry = f"TEST_MARK={self.env['TEST_MARK']}".encode()
        return [pid for pid in pids() if entry in read(pid, "environ").split(b"\0")]

    def gone(self):
        """Whether they are all dead before long, for deaths that nobody waits for."""
        deadline = time.monotonic() + 30
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.alive()


def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def children():
    parents = {pid: read(pid, "stat").rpartition(b")")[2].split()[1:2] for pid in pids()}
    return {pid for pid, parent in parents.items() if parent == [str(os.getpid()).encode()]}
