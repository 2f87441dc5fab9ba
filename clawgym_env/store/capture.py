"""The capture store: rollouts and their calls in one SQLite file, each call durable on return.

The store knows nothing of wire protocols, tokenizers or how replies are delivered, and no key ever
reaches it. It keeps these invariants: a call whose ``commit_call`` returned is in the file once,
whatever happens to the process; a rollout reads back equal to what was given; a finished rollout
gets no further calls.

What calls of a rollout repeat of each other (prompt ids, messages, tools, the raw body) is kept
once, so that a file grows with the length of the conversations and not with its square.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from clawgym_env.calls import CapturedCall, Outcome, Rollout
from clawgym_env.errors import CaptureError, UnknownNameError
from clawgym_env.store import rows
from clawgym_env.store.database import explained, open_database
from clawgym_env.store.lineage import Earlier, Lineage
from clawgym_env.store.rows import RolloutSummary

_SHOWN = 5  # how many ids an error lists


class CaptureStore:
    """The store at ``path``, made if there is none; a context manager.

    Every method may be called from any thread. None waits for anything but the disk and the lock:
    to commit a call takes about a millisecond, so that an event loop may do it directly. Other
    processes may read a store while one writes to it.

    Args:
        path: The SQLite file. ``-wal`` and ``-shm`` files lie beside it while it is open.
        read_only: Change nothing; the file must be there.

    Raises:
        CaptureError: Of every method: the file cannot be read or written, is damaged or full, or
            the record contradicts what is stored. The message says what to do.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.path = Path(path)
        self._connection: sqlite3.Connection | None = open_database(self.path, read_only=read_only)
        self._lock = threading.RLock()
        self._lineages: dict[str, Lineage] = {}
        self._marks: dict[str, bool] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- writing ----------------------------------------------------------------------------

    def begin_rollout(self, rollout: Rollout) -> None:
        """Enter a rollout, so that calls can be committed to it; it is unfinished until finished.

        Outcome, rewards, detail and calls are not kept: ``finish_rollout`` gives the record anew.

        Raises:
            CaptureError: As every method; besides, there is a rollout of that id.
        """
        rollout_id = rollout.rollout_id
        with self._writing(f"begin rollout {rollout_id!r} in", rollout_id) as connection:
            self._insert_rollout(connection, rollout)

    def commit_call(self, captured: CapturedCall) -> None:
        """Keep a call; when this returns, no end of the process can lose it.

        Raises:
            CaptureError: As every method; besides, the call is in the store already, or its
                rollout was not begun or is finished.
        """
        call = captured.call
        with self._writing(f"commit call {call.call_id!r} to", call.rollout_id) as connection:
            self._insert_call(connection, captured)

    def mark_delivered(self, call_id: str, delivered: bool) -> None:
        """Say whether a committed call's reply reached the harness; cheap, for it writes nothing.

        The mark is held in memory and written with the next write, read, ``flush`` or ``close``.
        A process killed before leaves the call as committed, usually with ``delivered`` None.
        """
        with self._reading("mark a call in", flush=False) as connection:
            query = "SELECT 1 FROM calls WHERE call_id = ?"
            if connection.execute(query, (call_id,)).fetchone() is None:
                raise CaptureError(f"no call {call_id!r} in {self.path}; commit it before marking")
            self._marks[call_id] = delivered

    def finish_rollout(self, rollout: Rollout) -> None:
        """Write the rollout's end, all of it or nothing.

        Calls of ``rollout.calls`` that are not in the store are committed with it (so that a
        rollout captured elsewhere can be entered whole, even one that was not begun here). Those
        that are in it stay as committed but for ``delivered``, which is brought up to date where
        the rollout knows it; those that ``rollout.calls`` lacks stay too, and read back.

        Raises:
            CaptureError: As every method; besides, the rollout is finished already, or one of its
                calls belongs to another.
        """
        rollout_id = rollout.rollout_id
        with self._writing(f"finish rollout {rollout_id!r} in", rollout_id) as connection:
            query = "SELECT outcome FROM rollouts WHERE rollout_id = ?"
            row = connection.execute(query, (rollout_id,)).fetchone()
            if row is None:
                self._insert_rollout(connection, rollout)
            elif row["outcome"] is not None:
                raise CaptureError(
                    f"rollout {rollout_id!r} is finished already ({row['outcome']}); "
                    "finish it once, or give the new one another id"
                )
            query = "SELECT call_id FROM calls WHERE rollout_id = ?"
            stored = {row["call_id"] for row in connection.execute(query, (rollout_id,))}
            for captured in rollout.calls:
                call = captured.call
                if call.rollout_id != rollout_id:
                    raise CaptureError(
                        f"rollout {rollout_id!r} has a call of rollout {call.rollout_id!r} "
                        f"({call.call_id!r}); give each rollout its own calls"
                    )
                if call.call_id not in stored:
                    self._insert_call(connection, captured)
                elif captured.delivered is not None:
                    _mark(connection, call.call_id, captured.delivered)
            columns = rows.rollout_columns(rollout)
            changes = ", ".join(f"{name} = :{name}" for name in columns)
            query = f"UPDATE rollouts SET {changes} WHERE rollout_id = :rollout_id"
            connection.execute(query, columns)
        self._lineages.pop(rollout_id, None)

    def flush(self) -> None:
        """Write what ``mark_delivered`` was told."""
        with self._lock:
            if self._marks:
                with self._writing("write to"):
                    pass

    def close(self) -> None:
        """Flush and close; closing again does nothing."""
        with self._lock:
            if self._connection is None:
                return
            try:
                self.flush()
            finally:
                connection, self._connection = self._connection, None
                connection.close()

    # --- reading ----------------------------------------------------------------------------

    def rollout(self, rollout_id: str) -> Rollout:
        """The rollout with all its calls, in arrival order.

        One that was begun and not finished reads as ``Outcome.CANCELLED`` with the detail
        ``"unfinished"`` (``UNFINISHED``): an infrastructure outcome, which nothing trains on. It
        has the calls so far.

        Raises:
            CaptureError: As every method; besides, there is no such rollout (see ``resolve``).
        """
        with self._reading("read") as connection:
            query = "SELECT * FROM rollouts WHERE rollout_id = ?"
            row = connection.execute(query, (rollout_id,)).fetchone()
            if row is None:
                raise CaptureError(f"no rollout {rollout_id!r} in {self.path}{self._newest()}")
            query = "SELECT * FROM calls WHERE rollout_id = ? ORDER BY seq"
            calls = connection.execute(query, (rollout_id,)).fetchall()
        try:
            return rows.rollout_of(row, rows.captured_calls(calls))
        except (KeyError, TypeError, ValueError, zlib.error) as exc:
            raise CaptureError(
                f"the record of rollout {rollout_id!r} in {self.path} is damaged ({exc!r}); "
                "restore the file from a copy, or leave this rollout out"
            ) from exc

    def rollout_ids(
        self,
        *,
        harness: str | None = None,
        task: str | None = None,
        outcome: Outcome | str | None = None,
        finished: bool | None = None,
        limit: int | None = None,
    ) -> tuple[str, ...]:
        """The ids of the rollouts that ``summaries`` gives for the same filters."""
        found = self.summaries(
            harness=harness, task=task, outcome=outcome, finished=finished, limit=limit
        )
        return tuple(summary.rollout_id for summary in found)

    def summaries(
        self,
        *,
        harness: str | None = None,
        task: str | None = None,
        outcome: Outcome | str | None = None,
        finished: bool | None = None,
        limit: int | None = None,
    ) -> tuple[RolloutSummary, ...]:
        """Rollouts in the order in which they began, without loading their calls.

        Args:
            harness: Only those of this harness.
            task: Only those whose task id starts with this.
            outcome: Only those that ended so.
            finished: Only those that are finished, or only those that are not.
            limit: Only the latest so many.

        Raises:
            CaptureError: As every method.
            UnknownNameError: No outcome has that name.
        """
        conditions = ["1"]
        if harness is not None:
            conditions.append("harness = :harness")
        if task is not None:
            conditions.append("substr(task_id, 1, length(:task)) = :task")
        if outcome is not None:
            conditions.append("outcome = :outcome")
        if finished is not None:
            conditions.append("(outcome IS NOT NULL) = :finished")
        query = (
            "SELECT rollout_id, task_id, harness, outcome, reward, calls, tokens, started_at "
            f"FROM rollouts WHERE {' AND '.join(conditions)} ORDER BY rowid DESC LIMIT :limit"
        )
        values = {
            "harness": harness,
            "task": task,
            "outcome": None if outcome is None else _outcome(outcome).value,
            "finished": finished,
            "limit": -1 if limit is None else limit,
        }
        with self._reading("read") as connection:
            found = connection.execute(query, values).fetchall()
        return tuple(rows.summary_of(row) for row in reversed(found))

    def resolve(self, prefix: str) -> str:
        """The id of the one rollout whose id is ``prefix`` or starts with it.

        Raises:
            CaptureError: As every method; besides, no rollout or several have such an id.
        """
        query = (
            "SELECT rollout_id FROM rollouts WHERE substr(rollout_id, 1, length(:id)) = :id "
            "ORDER BY rollout_id"
        )
        with self._reading("read") as connection:
            found = [row["rollout_id"] for row in connection.execute(query, {"id": prefix})]
            if prefix in found:
                return prefix
            if not found:
                raise CaptureError(
                    f"no rollout in {self.path} has an id that starts with {prefix!r}"
                    f"{self._newest()}"
                )
        if len(found) > 1:
            raise CaptureError(
                f"{len(found)} rollouts have an id that starts with {prefix!r} "
                f"({_listed(found)}); give more of the id"
            )
        return str(found[0])

    # --- inside -----------------------------------------------------------------------------

    @contextmanager
    def _writing(self, doing: str, rollout_id: str | None = None) -> Iterator[sqlite3.Connection]:
        """One transaction, which also writes the pending marks; all of it or nothing."""
        with self._lock:
            connection = self._opened()
            try:
                connection.execute("BEGIN IMMEDIATE")
                for call_id, delivered in self._marks.items():
                    _mark(connection, call_id, delivered)
                yield connection
                connection.execute("COMMIT")
            except BaseException as exc:
                # The lineage may name rows that are now gone: the next call is kept in full.
                self._lineages.pop(rollout_id or "", None)
                try:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                except sqlite3.Error as second:
                    raise explained(second, self.path, "undo a write to") from exc
                self._refuse(exc, doing)
            self._marks.clear()

    @contextmanager
    def _reading(self, doing: str, *, flush: bool = True) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if flush:
                self.flush()
            try:
                yield self._opened()
            except BaseException as exc:
                self._refuse(exc, doing)

    def _refuse(self, exc: BaseException, doing: str) -> NoReturn:
        if isinstance(exc, sqlite3.Error):
            raise explained(exc, self.path, doing) from exc
        if isinstance(exc, OverflowError | UnicodeEncodeError):
            raise CaptureError(
                f"cannot {doing} the capture store {self.path}: a field is no valid Unicode text "
                f"or no integer of 64 bits ({exc})"
            ) from exc
        raise exc

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise CaptureError(f"the capture store {self.path} is closed; open it again")
        return self._connection

    def _newest(self) -> str:
        query = "SELECT rollout_id FROM rollouts ORDER BY rowid DESC LIMIT ?"
        newest = self._opened().execute(query, (_SHOWN,)).fetchall()
        ids = ", ".join(repr(row["rollout_id"]) for row in newest)
        return f"; the newest are {ids}" if ids else "; it holds none"

    def _insert_rollout(self, connection: sqlite3.Connection, rollout: Rollout) -> None:
        ending = {"outcome": None, "reward": None, "rewards": "{}", "detail": ""}
        columns = {**rows.rollout_columns(rollout), **ending}
        try:
            _insert(connection, "rollouts", columns)
        except sqlite3.IntegrityError as exc:
            if exc.sqlite_errorcode != sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY:
                raise
            raise CaptureError(
                f"rollout {rollout.rollout_id!r} is in {self.path} already; give the new one "
                "another id"
            ) from exc

    def _insert_call(self, connection: sqlite3.Connection, captured: CapturedCall) -> None:
        call = captured.call
        counted = connection.execute(
            "UPDATE rollouts SET calls = calls + 1, tokens = tokens + ? "
            "WHERE rollout_id = ? AND outcome IS NULL",
            (len(captured.completion.token_ids or ()), call.rollout_id),
        )
        if not counted.rowcount:
            raise CaptureError(
                f"call {call.call_id!r} belongs to rollout {call.rollout_id!r}, which was not "
                f"begun in {self.path} or is finished; begin a rollout before its calls"
            )
        lineage = self._lineages.setdefault(call.rollout_id, Lineage())
        columns, kept = rows.call_columns(captured, lineage)
        try:
            seq = _insert(connection, "calls", columns)
        except sqlite3.IntegrityError as exc:
            if exc.sqlite_errorcode != sqlite3.SQLITE_CONSTRAINT_UNIQUE:
                raise
            raise CaptureError(
                f"call {call.call_id!r} is in {self.path} already; a call is committed once"
            ) from exc
        lineage.add(Earlier(seq, call, *kept))


def _insert(connection: sqlite3.Connection, table: str, columns: Mapping[str, Any]) -> int:
    names, values = ", ".join(columns), ", ".join(f":{name}" for name in columns)
    cursor = connection.execute(f"INSERT INTO {table} ({names}) VALUES ({values})", columns)
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _mark(connection: sqlite3.Connection, call_id: str, delivered: bool) -> None:
    connection.execute("UPDATE calls SET delivered = ? WHERE call_id = ?", (delivered, call_id))


def _outcome(name: Outcome | str) -> Outcome:
    try:
        return Outcome(name)
    except ValueError:
        raise UnknownNameError("outcome", name, [o.value for o in Outcome]) from None


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ", ".join(repr(i) for i in ids[:_SHOWN]) + more
