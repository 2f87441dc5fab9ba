"""What a task is: an instruction, the workspace it starts from, limits, and how it is scored.

This module knows nothing of harnesses, sandboxes or policies, and runs nothing. Its invariant: a
``Task`` that exists is well-formed, so no later stage checks paths, limits or types again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from clawgym_env.calls import Move
from clawgym_env.errors import TaskError

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,199}")


@dataclass(frozen=True, slots=True)
class Verifier:
    """How a task is scored, after the harness is dead, on a copy of the workspace.

    The program runs in the folder that holds ``files``, which the harness never saw, and finds the
    workspace in ``CLAWGYM_WORKSPACE``. Its last line on stdout is the score
    (see ``clawgym_env.tasks.verifying``).

    Attributes:
        argv: The command; a first word ``{python}`` stands for a system Python.
        files: The verifier's own files, path to content.
        timeout_s: Seconds of wall time it may take.

    Raises:
        TaskError: A field is malformed; the message names it.
    """

    argv: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        argv_ok = isinstance(self.argv, tuple) and all(isinstance(arg, str) for arg in self.argv)
        if not argv_ok or not self.argv or not self.argv[0]:
            raise TaskError(f"verifier argv is {self.argv!r}; expected a tuple of words, not empty")
        _check_files("verifier files", self.files)
        _check_positive("verifier timeout_s", self.timeout_s)


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """What a rollout on the task may use before it is cut off and scored as it stands.

    Attributes:
        max_calls: Model calls.
        max_tokens: Sampled tokens over all calls, or None for no limit.
        wall_s: Seconds of wall time from the harness' start.

    Raises:
        TaskError: A limit is not positive.
    """

    max_calls: int = 50
    max_tokens: int | None = None
    wall_s: float = 300.0

    def __post_init__(self) -> None:
        _check_count("limits max_calls", self.max_calls)
        if self.max_tokens is not None:
            _check_count("limits max_tokens", self.max_tokens)
        _check_positive("limits wall_s", self.wall_s)


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Attributes:
        task_id: Unique within its set; letters, digits and ``._+=@-``, fit for a file name.
        instruction: What the harness is asked to do.
        files: The workspace at the start, path relative to it to content.
        verifier: How the end is scored.
        limits: What a rollout may use.
        solution: Moves that score 1, for oracles and demonstrations; empty where none is known.
        metadata: Plain JSON values, such as the level.

    Raises:
        TaskError: A field is malformed; the message names the task, the field and the value.
    """

    task_id: str
    instruction: str
    files: Mapping[str, bytes]
    verifier: Verifier
    limits: TaskLimits = field(default_factory=TaskLimits)
    solution: tuple[Move, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.task_id, str) or not _ID.fullmatch(self.task_id):
            raise TaskError(
                f"task_id is {self.task_id!r}; expected 1 to 200 letters, digits or ._+=@-, "
                "with a letter or digit first"
            )
        where = f"task {self.task_id!r}: "
        if not isinstance(self.instruction, str) or not self.instruction.strip():
            raise TaskError(f"{where}instruction is {self.instruction!r}; expected a text")
        _check_files(f"{where}files", self.files)
        for name, kind in (("verifier", Verifier), ("limits", TaskLimits)):
            if not isinstance(getattr(self, name), kind):
                value = getattr(self, name)
                raise TaskError(f"{where}{name} is {value!r}; expected a {kind.__name__}")
        self._check_solution(where)
        try:
            json.dumps(dict(self.metadata), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TaskError(f"{where}metadata does not fit into JSON: {error}") from None

    def _check_solution(self, where: str) -> None:
        if not isinstance(self.solution, tuple):
            raise TaskError(f"{where}solution is {self.solution!r}; expected a tuple of Move")
        for index, move in enumerate(self.solution):
            name = f"{where}solution[{index}]"
            if not isinstance(move, Move) or move.kind not in ("shell", "write", "finish"):
                raise TaskError(f"{name} is {move!r}; expected a shell, write or finish Move")
            if move.kind == "shell" and not move.command:
                raise TaskError(f"{name} is a shell move without a command")
            if move.kind == "write":
                _check_path(f"{name} path", move.path)
            if move.kind == "finish" and index != len(self.solution) - 1:
                raise TaskError(f"{name} finishes the task before the last move")


def _check_files(name: str, files: Mapping[Any, Any]) -> None:
    if not isinstance(files, Mapping):
        raise TaskError(f"{name} is {files!r}; expected a mapping of path to bytes")
    folders: set[str] = set()
    for path, content in files.items():
        _check_path(name, path)
        if not isinstance(content, bytes):
            kind = type(content).__name__
            raise TaskError(f"{name}: the content of {path!r} is {kind}; expected bytes")
        folders.update(str(parent) for parent in PurePosixPath(path).parents)
    for path in files:
        if path in folders:
            raise TaskError(f"{name}: {path!r} is both a file and a folder")


def _check_path(name: str, path: str) -> None:
    """Refuses whatever could name a place outside the folder, or one place in two ways."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise TaskError(f"{name}: the path {path!r} is not a text, or empty, or holds a NUL")
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == ".":
        raise TaskError(
            f"{name}: the path {path!r} must be relative and plain, such as 'data/a.txt'"
        )


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TaskError(f"{name} is {value!r}; expected a whole number of at least 1")


def _check_positive(name: str, value: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise TaskError(f"{name} is {value!r}; expected a finite number above 0")
