"""The procedural task families, by name; a family's module is imported when it is first asked for.

A family is one module. Its ``generate`` is a pure function of its arguments, and its splits share
no task. A task's id is ``FAMILY-LEVEL-SPLIT-INDEX``, so that an id alone names the task.
"""

from __future__ import annotations

import importlib
import random
from typing import Protocol, cast

from clawgym_env.calls import Move
from clawgym_env.errors import UnknownNameError
from clawgym_env.tasks.base import Task

_MODULES = {
    "key_lookup": "clawgym_env.tasks.families.key_lookup",
}

FAMILIES: tuple[str, ...] = tuple(sorted(_MODULES))
"""Names of the families."""


class Family(Protocol):
    """What a family's module holds."""

    NAME: str
    LEVELS: tuple[int, ...]
    SPLITS: tuple[str, ...]

    def size(self, split: str) -> int:
        """How many distinct tasks each level has in a split."""

    def generate(self, level: int, split: str, index: int) -> Task:
        """The task at ``index`` (from 0 to ``size(split)``, exclusive); always the same one."""

    def novice(self, task: Task, rng: random.Random) -> tuple[Move, ...]:
        """A fallible demonstrator's moves: right in form, often wrong in what it decides."""


def get_family(name: str) -> Family:
    """The family of that name.

    Raises:
        UnknownNameError: There is none; the message suggests the nearest.
    """
    if name not in _MODULES:
        raise UnknownNameError("task family", name, FAMILIES)
    return cast(Family, importlib.import_module(_MODULES[name]))
