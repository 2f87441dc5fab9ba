from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from clawgym_env.calls import Move
from clawgym_env.errors import TaskError
from clawgym_env.tasks import Task, TaskLimits, Verifier

VERIFIER = Verifier(("{python}", "verify.py"), {"verify.py": b"print(1)"})
GOOD: dict[str, Any] = {
    "task_id": "copy-1",
    "instruction": "Copy a to b.",
    "files": {"data/a": b"\xff\x00", "data/deep/er": b""},
    "verifier": VERIFIER,
}


def test_a_task_compares_by_value_and_pickles() -> None:
    task = Task(**GOOD, solution=(Move("shell", command="cp data/a b"), Move("finish")))
    assert task == Task(**copy.deepcopy(GOOD), solution=task.solution)
    assert pickle.loads(pickle.dumps(task)) == task
    assert task.limits == TaskLimits(max_calls=50, max_tokens=None, wall_s=300.0)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("task_id", "", "task_id is ''"),
        ("task_id", "a/b", "task_id is 'a/b'"),
        ("task_id", "..", "task_id is '..'"),
        ("task_id", "x" * 201, "1 to 200"),
        ("task_id", "a\n", "task_id"),
        ("instruction", " \n", "'copy-1': instruction is"),
        ("files", {"/etc/passwd": b""}, "the path '/etc/passwd' must be relative"),
        ("files", {"a/../../b": b""}, "must be relative and plain"),
        ("files", {"./a": b""}, "must be relative and plain"),
        ("files", {"a//b": b""}, "must be relative and plain"),
        ("files", {"a/": b""}, "must be relative and plain"),
        ("files", {".": b""}, "must be relative and plain"),
        ("files", {"": b""}, "empty"),
        ("files", {"a\0": b""}, "NUL"),
        ("files", {"a": "text"}, "the content of 'a' is str; expected bytes"),
        ("files", {"a": b"", "a/b": b""}, "'a' is both a file and a folder"),
        ("files", [("a", b"")], "expected a mapping"),
        ("verifier", None, "verifier is None; expected a Verifier"),
        ("limits", {"max_calls": 3}, "expected a TaskLimits"),
        ("solution", [Move("finish")], "expected a tuple of Move"),
        ("solution", (Move("shell"),), r"solution\[0\] is a shell move without a command"),
        ("solution", (Move("write", path="../x"),), r"solution\[0\] path: the path '../x'"),
        ("solution", (Move("finish"), Move("finish")), "finishes the task before the last move"),
        ("solution", (Move("jump"),), "expected a shell, write or finish Move"),  # type: ignore[arg-type]
        ("metadata", {"x": {1, 2}}, "metadata does not fit into JSON"),
        ("metadata", {"x": float("nan")}, "metadata does not fit into JSON"),
    ],
)
def test_a_malformed_task_names_the_field(field: str, value: Any, text: str) -> None:
    with pytest.raises(TaskError, match=text):
        Task(**{**GOOD, field: value})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"argv": ()}, "argv is ()"),
        ({"argv": ("",)}, "argv is ('',)"),
        ({"argv": "sh"}, "argv is 'sh'"),
        ({"argv": ("sh",), "files": {"../x": b""}}, "verifier files: the path '../x'"),
        ({"argv": ("sh",), "timeout_s": 0}, "timeout_s is 0; expected a finite number above 0"),
        ({"argv": ("sh",), "timeout_s": float("inf")}, "timeout_s is inf"),
    ],
)
def test_a_malformed_verifier_names_the_field(arguments: Mapping[str, Any], text: str) -> None:
    with pytest.raises(TaskError) as caught:
        Verifier(**arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_calls": 0}, "max_calls is 0"),
        ({"max_calls": True}, "max_calls is True"),
        ({"max_calls": 2.0}, "max_calls is 2.0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"wall_s": -1.0}, "wall_s is -1.0"),
        ({"wall_s": float("nan")}, "wall_s is nan"),
        ({"wall_s": "60"}, "wall_s is '60'"),
    ],
)
def test_malformed_limits_name_the_field(arguments: Mapping[str, Any], text: str) -> None:
    with pytest.raises(TaskError, match=text):
        TaskLimits(**arguments)
