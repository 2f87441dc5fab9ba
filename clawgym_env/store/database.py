"""The store's file: opening it, its tables, and SQLite's errors said in plain words.

This module knows nothing of what the rows mean. Invariant: ``open_database`` returns a connection
to a store of exactly this schema, or raises ``CaptureError`` and leaves a file that is not a
capture store as it was.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from clawgym_env.errors import CaptureError

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x434C4157  # "CLAW": tells a capture store from any other SQLite file
_BUSY_S = 10.0  # how long a write waits for another process' write

# A call's long fields are kept relative to an earlier call of its rollout (a "base", by seq):
# messages: the first `messages_shared` are the base's; tools: the base's where null; raw: the
# base's first `raw_prefix` and last `raw_suffix` bytes around the blob; prompt: the first
# `prompt_shared` ids are those of the base's prompt and reply. Ids are int32 and log-probabilities
# float64, little-endian; `messages`, `tools` and `raw` are zlib streams, `raw` with this call's
# messages as its dictionary.
_TABLES = """
CREATE TABLE schema (version INTEGER NOT NULL);
CREATE TABLE rollouts (
    rollout_id TEXT PRIMARY KEY NOT NULL,
    task_id TEXT NOT NULL,
    harness TEXT NOT NULL,
    outcome TEXT,
    reward REAL,
    rewards TEXT NOT NULL,
    group_id TEXT,
    seed TEXT,
    policy_version INTEGER NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL NOT NULL,
    detail TEXT NOT NULL,
    metadata TEXT NOT NULL,
    calls INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE calls (
    seq INTEGER PRIMARY KEY,
    call_id TEXT NOT NULL UNIQUE,
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id),
    call_index INTEGER NOT NULL,
    protocol TEXT NOT NULL,
    model TEXT NOT NULL,
    kind TEXT NOT NULL,
    stream INTEGER NOT NULL,
    include_usage INTEGER NOT NULL,
    tool_choice TEXT NOT NULL,
    sampling TEXT NOT NULL,
    arrived_at REAL NOT NULL,
    body_base INTEGER,
    messages_shared INTEGER NOT NULL,
    messages BLOB NOT NULL,
    tools BLOB,
    raw_prefix INTEGER NOT NULL,
    raw_suffix INTEGER NOT NULL,
    raw BLOB NOT NULL,
    prompt_parent INTEGER,
    prompt_shared INTEGER NOT NULL,
    prompt BLOB,
    parent_id TEXT,
    extends INTEGER NOT NULL,
    drift TEXT,
    reply TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    token_ids BLOB,
    logprobs BLOB,
    policy_version INTEGER NOT NULL,
    parse_error TEXT,
    started_at REAL NOT NULL,
    finished_at REAL NOT NULL,
    delivered INTEGER
);
CREATE INDEX calls_of_rollout ON calls (rollout_id, seq);
"""


def open_database(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """Open the store at ``path``, or make one there unless ``read_only``.

    The connection is in autocommit mode, may be used by any thread (one at a time), and returns
    ``sqlite3.Row``. Commits survive the death of the process at any moment; against loss of power
    the last ones before the latest checkpoint are not safe (``synchronous=NORMAL``).

    Raises:
        CaptureError: The path is a directory or cannot be opened or written, the file is damaged,
            is no capture store, or is one of a newer schema.
    """
    if path.is_dir():
        raise CaptureError(
            f"{path} is a directory; give the path of a file in it, such as "
            f"{path / 'captures.sqlite'}"
        )
    if not path.parent.is_dir():
        raise CaptureError(f"the capture store's directory {path.parent} does not exist; create it")
    if read_only and not path.exists():
        raise CaptureError(
            f"there is no capture store at {path}; give the file that clawgym rollout --store, "
            "clawgym proxy or a run wrote"
        )
    connection: sqlite3.Connection | None = None
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{_mode(path, read_only)}",
            uri=True,
            timeout=_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.row_factory = sqlite3.Row
        _prepare(connection, path, read_only)
    except sqlite3.Error as exc:
        if connection is not None:
            connection.close()
        raise explained(exc, path, "open") from exc
    except BaseException:
        if connection is not None:
            connection.close()
        raise
    return connection


def explained(exc: sqlite3.Error, path: Path, doing: str) -> CaptureError:
    """SQLite's error with what to do about it.

    Args:
        exc: What SQLite said.
        path: The store's file.
        doing: What failed, as a verb that takes the file as its object, such as ``"open"``.
    """
    code = getattr(exc, "sqlite_errorcode", None)
    remedy = _REMEDIES.get(code & 0xFF) if code is not None else None
    tail = f"; {remedy}" if remedy else ""
    return CaptureError(f"cannot {doing} the capture store {path}: {exc}{tail}")


_DAMAGED = (
    "the file is damaged or is not a capture store: move it away or give another path (sqlite3's "
    "'.recover' may save what is in it)"
)
_REMEDIES = {
    sqlite3.SQLITE_FULL: "free some space on the disk, or give a path on another",
    sqlite3.SQLITE_IOERR: "the disk or the file-size limit may be full, or the disk failing: "
    "check with 'df' and 'ulimit -f'",
    sqlite3.SQLITE_READONLY: "make the file and its directory writable, or give another path",
    sqlite3.SQLITE_PERM: "make the file and its directory writable, or give another path",
    sqlite3.SQLITE_CANTOPEN: "check that the file and its directory may be read and written",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_BUSY: "another process is writing to it: end that process or give another path",
    sqlite3.SQLITE_LOCKED: "another process is writing to it: end that process or give another "
    "path",
}


def _mode(path: Path, read_only: bool) -> str:
    if not read_only:
        return "mode=rwc"
    # In a directory where nothing can be written, a store that was closed cleanly (no -wal file)
    # can be read only if SQLite is told that nobody writes to it.
    closed = not Path(f"{path}-wal").exists()
    return "mode=ro&immutable=1" if closed and not os.access(path.parent, os.W_OK) else "mode=ro"


def _prepare(connection: sqlite3.Connection, path: Path, read_only: bool) -> None:
    made = _is_store(connection, path)
    if made:
        _check_version(connection, path)
    elif read_only:
        raise CaptureError(f"{path} is empty, not a capture store; check the path")
    if read_only:
        return
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise CaptureError(
            f"the file system of {path} has no shared memory, which write-ahead logging needs "
            f"(journal mode {mode!r}); give a path on a local disk"
        )
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    # A write lock is taken even where nothing is to be made: a file or directory that cannot be
    # written is found now and not at the first call.
    connection.execute("BEGIN IMMEDIATE")
    if not _is_store(connection, path):  # another process may have made it since
        for statement in _TABLES.split(";"):
            connection.execute(statement)
        connection.execute("INSERT INTO schema VALUES (?)", (SCHEMA_VERSION,))
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute("COMMIT")


def _is_store(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is a capture store; False where it is new or empty, else CaptureError."""
    if connection.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION_ID:
        return True
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise CaptureError(
            f"{path} is a SQLite file of another program, not a capture store; give another path"
        )
    return False


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    row = connection.execute("SELECT max(version) FROM schema").fetchone()
    version = row[0]
    if version == SCHEMA_VERSION:
        return
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise CaptureError(
            f"{path} has schema {version}, and this clawgym reads up to {SCHEMA_VERSION}; upgrade "
            f"clawgym or give another path"
        )
    raise CaptureError(f"{path} has no readable schema version (it says {version!r}); {_DAMAGED}")
