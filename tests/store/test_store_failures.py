"""Files and disks that cannot hold a store: each a CaptureError that says what to do."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawgym_env.calls import CapturedCall, Completion, Message, ModelCall, Outcome, Rollout
from clawgym_env.errors import CaptureError
from clawgym_env.store import CaptureStore

ROLLOUT = Rollout("r", "t", "react", Outcome.COMPLETED, 1.0)


def capture(index: int, raw: bytes = b"") -> CapturedCall:
    messages = (Message("user", "hi"),)
    call = ModelCall(f"c{index}", "r", index, "openai_chat", "m", messages, raw=raw)
    return CapturedCall(call, Completion(Message("assistant", "yes"), "stop"))


def made(path: Path, calls: int = 1) -> Path:
    with CaptureStore(path) as store:
        store.begin_rollout(ROLLOUT)
        for index in range(calls):
            store.commit_call(capture(index, random.Random(index).randbytes(3000)))
    return path


def refused(path: Path, told: str, *, read_only: bool = False) -> None:
    with pytest.raises(CaptureError, match=told) as caught:
        CaptureStore(path, read_only=read_only)
    assert str(path.parent) in str(caught.value)


# --- opening --------------------------------------------------------------------------------


def test_the_path_is_a_directory(tmp_path: Path) -> None:
    refused(tmp_path, "is a directory; give the path of a file in it, such as .*captures.sqlite")


def test_the_directory_is_missing(tmp_path: Path) -> None:
    refused(tmp_path / "no" / "s.sqlite", "does not exist; create it")


def test_reading_a_store_that_is_missing_or_empty(tmp_path: Path) -> None:
    refused(tmp_path / "s.sqlite", "there is no capture store", read_only=True)
    (tmp_path / "empty.sqlite").touch()
    refused(tmp_path / "empty.sqlite", "is empty, not a capture store", read_only=True)
    CaptureStore(tmp_path / "empty.sqlite").close()  # an empty file becomes a store


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    path.write_bytes(b"this is a log file\n" * 400)
    refused(path, "not a database; the file is damaged .* give another path")
    assert path.read_bytes() == b"this is a log file\n" * 400


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE schema (version INTEGER)")
    connection.close()
    before = path.read_bytes()
    refused(path, "of another program, not a capture store; give another path")
    refused(path, "of another program", read_only=True)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["s.sqlite"]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_store_of_a_newer_schema(tmp_path: Path, read_only: bool) -> None:
    path = made(tmp_path / "s.sqlite")
    change(path, "UPDATE schema SET version = 7")
    refused(path, "schema 7, and this clawgym reads up to 1; upgrade", read_only=read_only)


@pytest.mark.parametrize("statement", ["DELETE FROM schema", "UPDATE schema SET version = 'x'"])
def test_a_store_without_a_version(tmp_path: Path, statement: str) -> None:
    path = made(tmp_path / "s.sqlite")
    change(path, statement)
    refused(path, "no readable schema version")


def change(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


def test_a_path_with_characters_that_mean_something_in_a_uri(tmp_path: Path) -> None:
    path = made(tmp_path / "a b?mode=ro#%41.sqlite")
    assert path.is_file()
    with CaptureStore(path, read_only=True) as store:
        assert store.rollout_ids() == ("r",)


# --- damage ---------------------------------------------------------------------------------


def test_damaged_pages(tmp_path: Path) -> None:
    path = made(tmp_path / "s.sqlite", calls=20)
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)  # all but the first page
    path.write_bytes(content)
    with pytest.raises(CaptureError, match="damaged"), CaptureStore(path) as store:
        store.rollout("r")


@pytest.mark.parametrize(
    "change_to",
    [
        "raw = x'00'",
        "messages = substr(messages, 1, length(messages) - 1)",
        "reply = '{'",
        "sampling = '{\"heat\": 1}'",
        "body_base = 99",
        "logprobs = x'00'",
    ],
)
def test_a_damaged_record(tmp_path: Path, change_to: str) -> None:
    path = made(tmp_path / "s.sqlite")
    change(path, f"UPDATE calls SET {change_to}")
    with CaptureStore(path) as store:
        with pytest.raises(CaptureError, match="rollout 'r' .* is damaged"):
            store.rollout("r")
        assert len(store.summaries()) == 1


# --- disks ----------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of one megabyte; only the superuser can mount one."""
    point = tmp_path / "disk"
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(point)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system is not allowed here")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


def test_a_full_disk_loses_nothing_and_can_be_cleared(tiny_disk: Path) -> None:
    path, filler = tiny_disk / "s.sqlite", tiny_disk / "filler"
    filler.write_bytes(bytes(200_000))
    rng = random.Random(0)
    with CaptureStore(path) as store:
        store.begin_rollout(ROLLOUT)
        calls: list[CapturedCall] = []
        with pytest.raises(CaptureError, match="commit call 'c.*full; free some space"):
            while len(calls) < 200:
                captured = capture(len(calls), rng.randbytes(10_000))
                store.commit_call(captured)
                calls.append(captured)
        assert calls
        assert store.rollout("r").calls == tuple(calls)
        filler.unlink()
        captured = capture(len(calls), rng.randbytes(10_000))
        store.commit_call(captured)
        calls.append(captured)
    with CaptureStore(path) as store:
        assert store.rollout("r").calls == tuple(calls)


def test_a_directory_that_cannot_be_written(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if os.geteuid() == 0:  # to whom modes mean nothing
        disk: Path = request.getfixturevalue("tiny_disk")
        made(disk / "old.sqlite")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    else:
        disk = tmp_path / "locked"
        disk.mkdir()
        made(disk / "old.sqlite")
        disk.chmod(0o555)
    try:
        refused(disk / "new.sqlite", "check that the file and its directory may be read and writ")
        refused(disk / "old.sqlite", "writ")
        with CaptureStore(disk / "old.sqlite", read_only=True) as store:
            assert len(store.rollout("r").calls) == 1
    finally:
        if os.geteuid() != 0:
            disk.chmod(0o755)


LIMITED = """
import random, resource, sys
from pathlib import Path
from clawgym_env.errors import CaptureError
from clawgym_env.store import CaptureStore
sys.path.insert(0, sys.argv[2])
from test_store_failures import ROLLOUT, capture

store = CaptureStore(Path(sys.argv[1]))
store.begin_rollout(ROLLOUT)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
rng = random.Random(0)
for index in range(200):
    try:
        store.commit_call(capture(index, rng.randbytes(10_000)))
    except CaptureError as error:
        print(index, len(store.rollout("r").calls), error, sep="|")
        break
"""


def test_a_file_size_limit(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    path = tmp_path / "s.sqlite"
    command = [sys.executable, "-c", LIMITED, str(path), str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    index, held, message = done.stdout.strip().split("|")
    assert 0 < int(index) == int(held)
    assert "ulimit -f" in message
    with CaptureStore(path) as store:
        assert len(store.rollout("r").calls) == int(index)


def test_another_writer_holds_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawgym_env.store.database._BUSY_S", 0.05)
    path = made(tmp_path / "s.sqlite")
    other = sqlite3.connect(path, isolation_level=None)
    with CaptureStore(path) as store:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(CaptureError, match="locked; another process is writing"):
            store.commit_call(capture(5))
        other.execute("ROLLBACK")
        store.commit_call(capture(5))
        assert len(store.rollout("r").calls) == 2
    other.close()
