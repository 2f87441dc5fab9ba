"""Find the file that holds a key, copy or compute its value, write the answer to a named file.

The workspace holds ``data/*.ini`` files of ``key=value`` lines; the instruction names a key and the
file to write. Levels: 1 copies from the one file named; 2 has several files, near-miss keys and
out-of-date lines that start with ``#``; 3 adds the values of two keys; 4 follows a reference
(``key=@other``) to another key. This module knows nothing of harnesses, sandboxes or policies.

Invariants, by construction and not by luck of a seed:

- Splits share no key: a key joins a first and a second word, and (first + second) mod 5 tells the
  split (0, 1, 2 train, 3 validation, 4 test). Every key in a task, decoys included, belongs to the
  task's split, while each word occurs in all three, so a model has seen the words but no such key.
- Tasks of one level and split differ: the index picks the pair (target key, answer file), each pair
  once, by a stride that is coprime with the number of pairs.
- An untouched workspace scores 0: the answer file does not exist.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product

from clawgym_env.calls import Move
from clawgym_env.errors import ConfigError, UnknownNameError
from clawgym_env.tasks.base import Task, TaskLimits, Verifier

NAME = "key_lookup"
LEVELS: tuple[int, ...] = (1, 2, 3, 4)
SPLITS: tuple[str, ...] = ("train", "validation", "test")

_FIRST = (
    "amber azure black brave brown clear cold crisp dark deep dry early fair fast firm free "
    "fresh gold grand gray green high iron keen kind late light lone loud low mild neat"
).split()
_SECOND = (
    "anvil apple arrow badge baker beach bell bird boat bridge cabin candle castle chair cloud "
    "coast crane crown drum eagle field flame forest garden hammer harbor island kettle ladder "
    "lake lamp lion"
).split()
_FILES = (
    "able acid atom axis band bean bolt bond book cage cake card cart cave chip city claw clay "
    "coal coin cook copy cork crab"
).split()
_WORDS = (
    "actor album alpha angle basil bench berry blade brick brush canoe cedar chalk cider civic "
    "cliff cloth coral daisy dance delta diary drift ember fancy ferry fiber flint flute frost "
    "giant glass globe grape habit honey ivory jelly judge lemon"
).split()
_RESIDUES: Mapping[str, tuple[int, ...]] = {
    "train": (0, 1, 2),
    "validation": (3,),
    "test": (4,),
}
_STRIDE = 1_000_003  # a prime above every number of pairs, hence coprime with it

_FORM = "Files in data/ hold lines of the form key=value. "
_STALE = "Lines that start with # are out of date. "
_INSTRUCTIONS: Mapping[int, str] = {
    1: _FORM + "Find the value of '{key}' in '{source}' and write it to '{answer_file}'.",
    2: _FORM + _STALE + "Find the value of '{key}' and write it to '{answer_file}'.",
    3: _FORM
    + _STALE
    + "Add the values of '{key}' and '{other}' and write the sum to '{answer_file}'.",
    4: _FORM
    + _STALE
    + "A value like @name stands for the value of the key name. "
    + "Find the value of '{key}' and write it to '{answer_file}'.",
}

_VERIFY = b'''\
"""Scores a workspace: 1 when the answer file holds exactly the expected answer."""
import json
import os
import stat
import sys

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "expected.json")) as stream:
    expected = json.load(stream)

LIMIT = 4096


def read_answer():
    path = os.path.join(os.environ["CLAWGYM_WORKSPACE"], expected["file"])
    # Neither follow a link out of the workspace nor wait for a writer on a FIFO.
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        data = b""
        while len(data) <= LIMIT:
            block = os.read(handle, LIMIT + 1 - len(data))
            if not block:
                return data
            data += block
        return b""  # longer than any answer: written, but wrong
    finally:
        os.close(handle)


data = read_answer()
right = data is not None and data.strip() == expected["answer"].encode()
scores = {"answer": float(right), "written": float(data is not None)}
sys.stdout.write(json.dumps({"reward": scores["answer"], "rewards": scores}) + "\\n")
'''


def size(split: str) -> int:
    """How many distinct tasks a level has in ``split``; indices run from 0 to this, exclusive."""
    return len(_keys(split)) * len(_FILES)


def generate(level: int, split: str, index: int) -> Task:
    """The task at ``index`` of a level and split; the same arguments give an equal task.

    Raises:
        ConfigError: The level is not in ``LEVELS`` or the index is out of range.
        UnknownNameError: The split is not in ``SPLITS``.
    """
    if level not in LEVELS:
        raise ConfigError(f"{NAME}: level is one of {', '.join(map(str, LEVELS))}; got {level!r}")
    keys = _keys(split)
    pairs = size(split)
    if not 0 <= index < pairs:
        raise ConfigError(f"{NAME}: index of split {split!r} is 0 to {pairs - 1}; got {index!r}")
    key_index, file_index = divmod(index * _STRIDE % pairs, len(_FILES))
    rng = random.Random(f"{NAME}/{level}/{split}/{index}")
    key, answer_file = keys[key_index], f"{_FILES[file_index]}.txt"
    values = [str(number) for number in range(10, 100)] if level == 3 else _WORDS
    draw = _Draw(rng, key, keys, values, [name for name in _FILES if name != _FILES[file_index]])
    words = {"key": key, "answer_file": answer_file}

    if level == 1:
        answer = draw.value()
        lines = [f"{key}={answer}", *(f"{draw.key()}={draw.value()}" for _ in range(5))]
        layout = draw.spread(lines, files=1)
        (words["source"],) = layout
    elif level == 2:
        answer = draw.value()
        layout = draw.spread(draw.entry(key, answer, stale=2) + draw.noise(4), files=3)
    elif level == 3:
        words["other"] = other = draw.key()
        first, second = draw.value(), draw.value()
        answer = str(int(first) + int(second))
        lines = draw.entry(key, first) + draw.entry(other, second)
        layout = draw.spread(lines + draw.noise(5), files=3)
    else:
        answer = draw.value()
        target, stale = draw.key(), draw.key()
        lines = [f"{key}=@{target}", f"#{key}=@{stale}", f"{stale}={draw.value()}"]
        layout = draw.spread(lines + draw.entry(target, answer) + draw.noise(4), files=3)

    expected = json.dumps({"file": answer_file, "answer": answer})
    return Task(
        task_id=f"{NAME}-{level}-{split}-{index}",
        instruction=_INSTRUCTIONS[level].format(**words),
        files=layout,
        verifier=Verifier(
            argv=("{python}", "verify.py"),
            files={"verify.py": _VERIFY, "expected.json": expected.encode()},
        ),
        limits=TaskLimits(max_calls=16),
        solution=_solution(level, words),
        metadata={"family": NAME, "level": level, "split": split, "index": index, **words},
    )


def novice(task: Task, rng: random.Random) -> tuple[Move, ...]:
    """A fallible demonstrator's moves: right tools and format, but decisions that often go wrong.

    It is meant for cloning a weak policy that explores. It sees only the instruction's words (from
    the metadata) and the workspace, and decides at random:

    - It searches for the exact key (15 %), for the key anywhere, out-of-date lines included (35 %),
      or for the key's first word alone, which finds other keys too (50 %).
    - It takes the value of any line that it found, out of date or of another key as it may be.
    - One time in four it finishes without having written anything.

    Raises:
        ConfigError: The task is of another family.
    """
    if task.metadata.get("family") != NAME:
        raise ConfigError(f"{NAME}: novice wants a task of this family; got {task.task_id!r}")
    lines = [line for path in sorted(task.files) for line in task.files[path].decode().split()]
    moves: list[Move] = []

    def look_up(key: str) -> str:
        patterns = (f"^{key}=", f"{key}=", f"{key.split('-')[0]}-")
        (pattern,) = rng.choices(patterns, weights=(3, 7, 10))
        moves.append(Move("shell", command=f"grep -h '{pattern}' data/*"))
        found = [line for line in lines if pattern in f"^{line}"]
        return rng.choice(found).split("=")[1]

    value = look_up(task.metadata["key"])
    if "other" in task.metadata:
        other = look_up(task.metadata["other"])
        moves.append(Move("shell", command=f"echo $(({value}+{other}))"))
        value = str(int(value) + int(other))
    elif value.startswith("@"):
        value = look_up(value[1:])
    if rng.random() < 3 / 4:
        moves.append(Move("write", path=task.metadata["answer_file"], content=value))
    moves.append(Move("finish", content=value))
    return tuple(moves)


class _Draw:
    """Draws a task's keys and values without repeats."""

    def __init__(
        self,
        rng: random.Random,
        key: str,
        keys: Sequence[str],
        values: Sequence[str],
        names: Sequence[str],
    ) -> None:
        self._rng = rng
        self._names = names
        words = set(key.split("-"))
        near = [k for k in keys if k != key and words & set(k.split("-"))]
        far = [k for k in keys if not words & set(k.split("-"))]
        self._near = rng.sample(near, len(near))
        self._far = rng.sample(far, 12)
        self._values = rng.sample(values, 30)

    def value(self) -> str:
        return self._values.pop()

    def key(self) -> str:
        """A key unlike the target's."""
        return self._far.pop()

    def entry(self, key: str, value: str, stale: int = 1) -> list[str]:
        """The key's line and out-of-date ones of the same key."""
        return [f"{key}={value}", *(f"#{key}={self.value()}" for _ in range(stale))]

    def noise(self, count: int) -> list[str]:
        """Lines of other keys, every second one a near miss of the target key."""
        return [
            f"{self._near.pop() if i % 2 else self._far.pop()}={self.value()}" for i in range(count)
        ]

    def spread(self, lines: list[str], files: int) -> dict[str, bytes]:
        """The lines in random order over ``files`` files, each of which gets one at least."""
        self._rng.shuffle(lines)
        names = sorted(self._rng.sample(self._names, files))
        return {
            f"data/{name}.ini": "".join(f"{line}\n" for line in lines[i::files]).encode()
            for i, name in enumerate(names)
        }


@cache
def _keys(split: str) -> tuple[str, ...]:
    if split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    residues = _RESIDUES[split]
    return tuple(
        f"{first}-{second}"
        for (i, first), (j, second) in product(enumerate(_FIRST), enumerate(_SECOND))
        if (i + j) % 5 in residues
    )


def _solution(level: int, words: Mapping[str, str]) -> tuple[Move, ...]:
    """Looks first, then lets the shell find, compute and write the answer from the files alone."""
    key, answer_file = words["key"], words["answer_file"]
    value = "$(grep -h '^{}=' data/* | cut -d= -f2)".format
    if level <= 2:
        work = f"echo {value(key)} > {answer_file}"
    elif level == 3:
        work = f"echo $(({value(key)} + {value(words['other'])})) > {answer_file}"
    else:
        work = (
            f"name={value(key)}; name=${{name#@}}; "
            f'grep -h "^$name=" data/* | cut -d= -f2 > {answer_file}'
        )
    return (
        Move("shell", command=f"grep -n '{key}' data/*"),
        Move("shell", command=work),
        Move("finish", content="done"),
    )
