from __future__ import annotations

import json
import pickle
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clawgym_env.errors import ConfigError, TaskError, UnknownNameError
from clawgym_env.tasks import (
    FAMILIES,
    FamilyTasks,
    JoinedTasks,
    ListTasks,
    Task,
    TaskSet,
    Verifier,
    get_family,
    load_tasks,
    tasksets,
)


def task(name: str) -> Task:
    return Task(name, "Do it.", {}, Verifier(("true",)))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_keeps_the_interface(name: str) -> None:
    family = get_family(name)
    assert name == family.NAME
    assert family.SPLITS == ("train", "validation", "test")
    for level in family.LEVELS:
        for split in family.SPLITS:
            last = family.size(split) - 1
            made = family.generate(level, split, last)
            assert made == family.generate(level, split, last)
            assert made.task_id == f"{name}-{level}-{split}-{last}"
            assert made.solution


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ("key_lookup", {"family": "key_lookup", "level": 1, "split": "train"}),
        ("key_lookup:level=2", {"family": "key_lookup", "level": 2}),
        (
            "key_lookup: level = 2, split = test, n = 64, start = 3",
            {"family": "key_lookup", "start": 3, "n": 64, "split": "test", "level": 2},
        ),
    ],
)
def test_a_text_and_a_mapping_name_the_same_tasks(spec: str, same: dict[str, Any]) -> None:
    tasks = load_tasks(spec)
    assert tasks == load_tasks(same)
    assert tasks == load_tasks(tasks.name)
    assert tasks == pickle.loads(pickle.dumps(tasks))
    assert tasks == load_tasks(json.loads(json.dumps(same)))


def test_order_is_index_order_from_start() -> None:
    tasks = load_tasks("key_lookup:level=2,split=test,n=4,start=10")
    ids = [f"key_lookup-2-test-{i}" for i in range(10, 14)]
    assert [t.task_id for t in tasks] == ids
    assert [tasks[i].task_id for i in (-1, 0)] == [ids[3], ids[0]]
    assert tasks[np.int64(1)].task_id == ids[1]  # type: ignore[index]
    assert tasks.get(ids[2]) == tasks[2]
    for index in (4, -5):
        with pytest.raises(IndexError, match="which holds 4"):
            tasks[index]
    with pytest.raises(TypeError):
        tasks["0"]  # type: ignore[index]


@pytest.mark.parametrize(
    "task_id",
    ["key_lookup-2-test-9", "key_lookup-2-test-14", "key_lookup-2-test-010", "key_lookup-2-test--1"]
    + ["key_lookup-1-test-10", "key_lookup-2-train-10", "", "10"],
)
def test_ids_that_are_not_in_the_set(task_id: str) -> None:
    tasks = load_tasks("key_lookup:level=2,split=test,n=4,start=10")
    with pytest.raises(UnknownNameError, match="unknown task of key_lookup:level=2"):
        tasks.get(task_id)


def test_a_set_without_n_reaches_to_the_end() -> None:
    size = get_family("key_lookup").size("test")
    tasks = load_tasks("key_lookup:split=test,start=5")
    assert len(tasks) == size - 5
    assert tasks[-1].task_id == f"key_lookup-1-test-{size - 1}"


def test_sampling_is_uniform_over_the_set_and_seeded() -> None:
    tasks = load_tasks("key_lookup:n=3,start=7")
    rng, again = np.random.default_rng(0), np.random.default_rng(0)
    drawn = [tasks.sample(rng).task_id for _ in range(60)]
    assert drawn == [tasks.sample(again).task_id for _ in range(60)]
    assert set(drawn) == {t.task_id for t in tasks}


class Counting:
    """A family of a million tasks that counts what it generates."""

    NAME = "counting"
    LEVELS = (1,)
    SPLITS = ("train", "validation", "test")
    generated = 0

    def size(self, split: str) -> int:
        return 10**6

    def generate(self, level: int, split: str, index: int) -> Task:
        self.generated += 1
        return task(f"counting-{level}-{split}-{index}" if index != 13 else "wrong")


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    family = Counting()
    monkeypatch.setattr(tasksets, "get_family", lambda name: family)
    tasksets._generate.cache_clear()
    yield family
    tasksets._generate.cache_clear()


def test_tasks_are_generated_when_asked_for_and_few_are_kept(counting: Counting) -> None:
    tasks = load_tasks({"family": "counting"})
    assert len(tasks) == 10**6
    assert counting.generated == 0
    assert tasks[-1] is tasks.get("counting-1-train-999999")
    assert counting.generated == 1
    for index in range(100, 2200):
        tasks[index]
    assert tasksets._generate.cache_info().currsize <= 1024


def test_a_family_that_breaks_the_rule_for_ids_is_told_so(counting: Counting) -> None:
    with pytest.raises(TaskError, match="gave the id 'wrong'; expected 'counting-1-train-13'"):
        load_tasks({"family": "counting"})[13]


def test_sequences_are_joined() -> None:
    joined = load_tasks(["key_lookup:n=2", {"family": "key_lookup", "level": 3, "n": 1}, task("x")])
    ids = ["key_lookup-1-train-0", "key_lookup-1-train-1", "key_lookup-3-train-0", "x"]
    assert isinstance(joined, JoinedTasks)
    assert [t.task_id for t in joined] == ids
    assert [joined[i - 4].task_id for i in range(4)] == ids
    assert [joined.get(i).task_id for i in ids] == ids
    assert joined.name.count(" + ") == 2
    with pytest.raises(UnknownNameError, match="did you mean 'key_lookup-3-train-0'"):
        joined.get("key_lookup-3-train-")
    with pytest.raises(IndexError):
        joined[4]
    assert load_tasks(["key_lookup:n=2"]) == load_tasks("key_lookup:n=2")
    assert load_tasks(joined) is joined


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        ("key_lokup", UnknownNameError, "unknown task family 'key_lokup'; did you mean 'key_look"),
        ("key_lookup:levl=2", UnknownNameError, "task option 'levl'; did you mean 'level'?"),
        ({"family": "key_lookup", "seed": 1}, UnknownNameError, "unknown task option 'seed'"),
        (
            "key_lookup:split=tst",
            UnknownNameError,
            "split of key_lookup 'tst'; did you mean 'test'",
        ),
        ("key_lookup:level=9", ConfigError, "level is 9; key_lookup has 1, 2, 3, 4"),
        ("key_lookup:level=one", ConfigError, "level is 'one'; expected a whole number"),
        ({"family": "key_lookup", "level": 1.5}, ConfigError, "level is 1.5; expected a whole"),
        ({"family": "key_lookup", "n": True}, ConfigError, "n is True; expected a whole"),
        ({"family": "key_lookup", "start": None}, ConfigError, "start is None; expected a whole"),
        ({"family": "key_lookup", "split": 3}, UnknownNameError, "split of key_lookup '3'"),
        ("key_lookup:n=0", ConfigError, "n is 0; key_lookup has"),
        ("key_lookup:n=10000000", ConfigError, "n is 10000000; key_lookup has"),
        ("key_lookup:start=-1", ConfigError, "start is -1; key_lookup has"),
        ("key_lookup:start=10000000", ConfigError, "start is 10000000; key_lookup has"),
        ("key_lookup:level", ConfigError, "the part 'level' is not of the form name=value"),
        ("key_lookup:level=", ConfigError, "the part 'level=' is not of the form"),
        ("key_lookup:level=1,,n=2", ConfigError, "the part '' is not of the form"),
        ("key_lookup:n=1,n=2", ConfigError, "n is given twice"),
        ("", ConfigError, "no family"),
        ({}, ConfigError, "no family"),
        ({"family": 3}, ConfigError, "no family"),
        ([], ConfigError, "empty"),
        (3, ConfigError, "3 is a int"),
        (b"key_lookup", ConfigError, "is a bytes"),
        (["key_lookup", None], ConfigError, "None is a NoneType"),
        ("no_such_module:make", ConfigError, "No module named 'no_such_module'"),
        ("json:no_such", ConfigError, "no attribute 'no_such'"),
        ("json:__name__", ConfigError, "__name__ is not callable"),
    ],
)
def test_wrong_specs_name_the_part(spec: Any, error: type[ConfigError], text: str) -> None:
    with pytest.raises(error) as caught:
        load_tasks(spec)
    assert text in str(caught.value)


def test_tasks_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_tasks.py").write_text(
        textwrap.dedent(
            """
            from clawgym_env.tasks import Task, Verifier, load_tasks

            def listed():
                return [Task(f"own-{i}", "Do it.", {}, Verifier(("true",))) for i in range(3)]

            def twice():
                return listed()[:1] * 2

            def a_set():
                return load_tasks("key_lookup:n=2")

            def nothing():
                return []

            def number():
                return 3

            def numbers():
                return [3]
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_own_tasks", raising=False)
    own = load_tasks("my_own_tasks:listed")
    assert isinstance(own, ListTasks)
    assert own.name == "my_own_tasks:listed"
    assert [t.task_id for t in own] == ["own-0", "own-1", "own-2"]
    assert own.get("own-1") is own[1]
    with pytest.raises(UnknownNameError, match="did you mean 'own-"):
        own.get("own-7")
    assert isinstance(load_tasks("my_own_tasks:a_set"), FamilyTasks)
    for name, text in (
        ("twice", "holds the id 'own-0' twice"),
        ("nothing", "is empty"),
        ("number", "returned 3; expected a TaskSet or a sequence of Task"),
        ("numbers", "item 0 is 3; expected a Task"),
    ):
        with pytest.raises(TaskError, match=text):
            load_tasks(f"my_own_tasks:{name}")


def test_a_set_of_ones_own_class() -> None:
    class Endless(TaskSet):
        @property
        def name(self) -> str:
            return "endless"

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Task:
            return task(f"endless-{self._position(index)}")

        def get(self, task_id: str) -> Task:
            return self[int(task_id.rpartition("-")[2])]

    tasks = load_tasks([Endless(), "key_lookup:n=1"])
    assert [t.task_id for t in tasks][3:] == ["endless-3", "endless-4", "key_lookup-1-train-0"]
