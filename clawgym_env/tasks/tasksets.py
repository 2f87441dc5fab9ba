"""Sets of tasks, and the specs that name them.

    key_lookup                                   a family: its easiest level, training split
    key_lookup:level=2,split=test,n=64,start=0   some of it
    {"family": "key_lookup", "level": 2}         the same as a mapping
    my_package.my_tasks:make                     a callable that returns a TaskSet or Tasks
    [spec, spec, ...]                            one after the other

Specs are plain JSON values, so that an environment's spec can be stored. Tasks are generated when
they are asked for, whatever the length of a set; the same index always gives an equal task. This
module knows nothing of harnesses or sandboxes.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import index as as_index
from typing import TYPE_CHECKING, Any

from clawgym_env.errors import ClawgymError, ConfigError, TaskError, UnknownNameError
from clawgym_env.tasks.base import Task
from clawgym_env.tasks.families import FAMILIES, get_family

if TYPE_CHECKING:
    import numpy as np

_OPTIONS = ("level", "n", "split", "start")


class TaskSet(ABC):
    """An ordered set of tasks with random access."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What the set is called in logs; for a family a spec that gives the same set again."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Task:
        """The task at ``index``; negative ones count from the end.

        Raises:
            IndexError: The index is out of range.
        """

    @abstractmethod
    def get(self, task_id: str) -> Task:
        """The task with that id.

        Raises:
            UnknownNameError: The set has no such task.
        """

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(len(self)))

    def sample(self, rng: np.random.Generator) -> Task:
        """A task drawn uniformly."""
        return self[int(rng.integers(len(self)))]

    def _position(self, index: int) -> int:
        position = as_index(index)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"task index {index} of {self.name!r}, which holds {len(self)}")
        return position


@dataclass(frozen=True)
class FamilyTasks(TaskSet):
    """Tasks ``start`` to ``start + n``, exclusive, of one level and split of a family.

    Raises:
        ConfigError: A field is out of the family's range; the message names it.
        UnknownNameError: There is no such family or split.
    """

    family: str
    level: int
    split: str
    n: int
    start: int = 0

    def __post_init__(self) -> None:
        family = get_family(self.family)
        for field in ("level", "n", "start"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"tasks: {field} is {value!r}; expected a whole number")
        if self.level not in family.LEVELS:
            levels = ", ".join(map(str, family.LEVELS))
            raise ConfigError(f"tasks: level is {self.level}; {self.family} has {levels}")
        if self.split not in family.SPLITS:
            raise UnknownNameError(f"split of {self.family}", str(self.split), family.SPLITS)
        size = family.size(self.split)
        if not 0 <= self.start < size:
            raise ConfigError(
                f"tasks: start is {self.start}; {self.family} has {size} {self.split} tasks a level"
            )
        if not 1 <= self.n <= size - self.start:
            raise ConfigError(
                f"tasks: n is {self.n}; {self.family} has {size - self.start} {self.split} tasks "
                f"a level from start={self.start} on"
            )

    @property
    def name(self) -> str:
        """The spec that gives this set again."""
        return f"{self.family}:level={self.level},split={self.split},n={self.n},start={self.start}"

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Task:
        return _generate(self.family, self.level, self.split, self.start + self._position(index))

    def get(self, task_id: str) -> Task:
        """The task with that id, found without generating the others."""
        stem, _, number = task_id.rpartition("-")
        if stem == f"{self.family}-{self.level}-{self.split}" and number.isdecimal():
            position = int(number) - self.start
            if 0 <= position < self.n and str(int(number)) == number:
                return self[position]
        known = {
            f"{self.family}-{self.level}-{self.split}-{self.start + i}" for i in (0, self.n - 1)
        }
        raise UnknownNameError(f"task of {self.name}", task_id, known)


class ListTasks(TaskSet):
    """Tasks given one by one.

    Raises:
        TaskError: Two of them share an id, or something is not a ``Task``, or there is none.
    """

    def __init__(self, name: str, tasks: Sequence[Task]) -> None:
        self._name = name
        self._tasks = tuple(tasks)
        self._by_id: dict[str, Task] = {}
        if not self._tasks:
            raise TaskError(f"task set {name!r} is empty")
        for position, task in enumerate(self._tasks):
            if not isinstance(task, Task):
                raise TaskError(f"task set {name!r}: item {position} is {task!r}; expected a Task")
            if task.task_id in self._by_id:
                raise TaskError(f"task set {name!r} holds the id {task.task_id!r} twice")
            self._by_id[task.task_id] = task

    @property
    def name(self) -> str:
        """The name that was given."""
        return self._name

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[self._position(index)]

    def get(self, task_id: str) -> Task:
        """The task with that id."""
        if task_id not in self._by_id:
            raise UnknownNameError(f"task of {self.name}", task_id, self._by_id)
        return self._by_id[task_id]


class JoinedTasks(TaskSet):
    """Several sets, one after the other."""

    def __init__(self, parts: Sequence[TaskSet]) -> None:
        self._parts = tuple(parts)
        self._ends = list(accumulate(len(part) for part in parts))

    @property
    def name(self) -> str:
        """The parts' names, joined."""
        return " + ".join(part.name for part in self._parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Task:
        position = self._position(index)
        part = bisect_right(self._ends, position)
        return self._parts[part][position - (self._ends[part - 1] if part else 0)]

    def get(self, task_id: str) -> Task:
        """The task with that id, of the first set that holds it."""
        known: list[str] = []
        for part in self._parts:
            try:
                return part.get(task_id)
            except UnknownNameError as error:
                known += error.known
        raise UnknownNameError(f"task of {self.name}", task_id, known)


def load_tasks(spec: str | Mapping[str, Any] | Task | TaskSet | Sequence[Any]) -> TaskSet:
    """The tasks that a spec names (the module's docstring shows the forms).

    A family's spec may leave out ``level`` (the lowest), ``split`` (``train``), ``start`` (0) and
    ``n`` (all from ``start`` on). Tasks and sets that exist already are taken as they are.

    Raises:
        ConfigError: The spec is malformed; the message names the part at fault.
        UnknownNameError: A family, split or option of that name does not exist.
        TaskError: A callable gave something that is not a set of tasks.
    """
    if isinstance(spec, TaskSet):
        return spec
    if isinstance(spec, Task):
        return ListTasks(spec.task_id, (spec,))
    if isinstance(spec, str):
        name, colon, rest = spec.partition(":")
        if colon and rest and "=" not in rest and name not in FAMILIES:
            return _from_callable(spec, name, rest)
        return _from_options(spec, {"family": name, **_split_options(spec, rest)})
    if isinstance(spec, Mapping):
        return _from_options(spec, spec)
    if isinstance(spec, Sequence) and not isinstance(spec, bytes | bytearray):
        if not spec:
            raise ConfigError("tasks: the sequence of specs is empty; give at least one")
        parts = [load_tasks(part) for part in spec]
        return parts[0] if len(parts) == 1 else JoinedTasks(parts)
    raise ConfigError(
        f"tasks: {spec!r} is a {type(spec).__name__}; expected a text such as "
        "'key_lookup:level=1', a mapping, or a sequence of those"
    )


def _split_options(spec: str, text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not value:
            raise ConfigError(f"tasks {spec!r}: the part {part!r} is not of the form name=value")
        if name in options:
            raise ConfigError(f"tasks {spec!r}: {name} is given twice")
        options[name] = value if name == "split" else _whole(spec, name, value)
    return options


def _whole(spec: str, name: str, value: str) -> int:
    _check_option(name)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"tasks {spec!r}: {name} is {value!r}; expected a whole number") from None


def _check_option(name: str) -> None:
    if name not in _OPTIONS:
        raise UnknownNameError("task option", str(name), _OPTIONS)


def _from_options(spec: object, options: Mapping[str, Any]) -> FamilyTasks:
    values = dict(options)
    name = values.pop("family", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"tasks {spec!r}: no family; expected a name such as 'key_lookup'")
    family = get_family(name)
    for option in values:
        _check_option(option)
    split = values.get("split", "train")
    start = values.get("start", 0)
    if "n" not in values and split in family.SPLITS and isinstance(start, int):
        values["n"] = family.size(split) - start
    return FamilyTasks(
        name, values.get("level", min(family.LEVELS)), split, values.get("n", 1), start
    )


def _from_callable(spec: str, module_name: str, attribute: str) -> TaskSet:
    try:
        made = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"tasks {spec!r}: cannot import it: {error}; give package.module:function of an "
            "importable function"
        ) from error
    if not callable(made):
        raise ConfigError(f"tasks {spec!r}: {attribute} is not callable")
    try:
        tasks = made()
    except ClawgymError:
        raise
    except Exception as error:
        raise TaskError(
            f"tasks {spec!r}: the function raised {type(error).__name__}: {error}; it takes no "
            "argument and returns a TaskSet or a sequence of Task"
        ) from error
    if isinstance(tasks, TaskSet):
        return tasks
    if isinstance(tasks, Sequence):
        return ListTasks(spec, tasks)
    raise TaskError(f"tasks {spec!r} returned {tasks!r}; expected a TaskSet or a sequence of Task")


@lru_cache(maxsize=1024)
def _generate(family: str, level: int, split: str, index: int) -> Task:
    task = get_family(family).generate(level, split, index)
    expected = f"{family}-{level}-{split}-{index}"
    if task.task_id != expected:
        raise TaskError(f"family {family!r} gave the id {task.task_id!r}; expected {expected!r}")
    return task
