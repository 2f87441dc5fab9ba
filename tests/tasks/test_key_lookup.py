"""The family's tasks are solved by real shells and scored by the real verifier program."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from math import gcd
from pathlib import Path

import pytest

from clawgym_env.calls import Move
from clawgym_env.errors import ConfigError, UnknownNameError
from clawgym_env.tasks import Task
from clawgym_env.tasks.families import key_lookup
from clawgym_env.tasks.verifying import VerifierResult, parse_score

EVERY = [(level, split) for level in key_lookup.LEVELS for split in key_lookup.SPLITS]

PINNED_INSTRUCTION = (
    "Files in data/ hold lines of the form key=value. "
    "Lines that start with # are out of date. "
    "Find the value of 'keen-island' and write it to 'cave.txt'."
)
PINNED_FILES = {
    "data/acid.ini": "neat-ladder=flint\n#keen-island=habit\nfast-island=glass\n",
    "data/cage.ini": "keen-island=civic\n#keen-island=delta\n",
    "data/cork.ini": "green-bridge=cliff\nkeen-flame=blade\n",
}


def lay_out(task: Task, root: Path) -> Path:
    workspace = root / "workspace"
    for path, content in task.files.items():
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_bytes(content)
    hidden = root / "hidden"
    hidden.mkdir()
    for path, content in task.verifier.files.items():
        (hidden / path).write_bytes(content)
    return workspace


def act(moves: Sequence[Move], workspace: Path) -> None:
    for move in moves:
        if move.kind == "shell":
            subprocess.run(["bash", "-c", move.command], cwd=workspace, capture_output=True)
        elif move.kind == "write":
            (workspace / move.path).write_text(move.content)


def score(task: Task, root: Path) -> VerifierResult:
    argv = [sys.executable, "-I", "-S", *task.verifier.argv[1:]]
    assert task.verifier.argv[0] == "{python}"
    done = subprocess.run(
        argv,
        cwd=root / "hidden",
        env={"CLAWGYM_WORKSPACE": str(root / "workspace")},
        capture_output=True,
        timeout=20,
        check=True,
    )
    return parse_score(done.stdout)


def answer(task: Task) -> dict[str, str]:
    loaded: dict[str, str] = json.loads(task.verifier.files["expected.json"])
    return loaded


@pytest.mark.parametrize(("level", "split"), EVERY)
def test_the_oracle_scores_1_and_an_untouched_workspace_0(
    level: int, split: str, tmp_path: Path
) -> None:
    for index in (*range(8), key_lookup.size(split) - 1):
        task = key_lookup.generate(level, split, index)
        root = tmp_path / str(index)
        workspace = lay_out(task, root)
        assert score(task, root) == VerifierResult(0.0, {"answer": 0.0, "written": 0.0})
        act(task.solution, workspace)
        assert score(task, root) == VerifierResult(1.0, {"answer": 1.0, "written": 1.0})


@pytest.mark.parametrize("level", key_lookup.LEVELS)
def test_the_oracle_looks_and_does_not_know_the_answer(level: int) -> None:
    for index in range(50):
        task = key_lookup.generate(level, "train", index)
        assert all(move.kind != "write" for move in task.solution)
        moves = " ".join(move.command + move.content for move in task.solution)
        assert answer(task)["answer"] not in moves.replace(answer(task)["file"], "").split()


@pytest.mark.parametrize("level", key_lookup.LEVELS)
def test_the_novice_sometimes_succeeds(level: int, tmp_path: Path) -> None:
    rewards = []
    for index in range(30):
        task = key_lookup.generate(level, "train", index)
        root = tmp_path / str(index)
        workspace = lay_out(task, root)
        moves = key_lookup.novice(task, random.Random(index))
        assert [move.kind for move in moves][-1] == "finish"
        assert moves == key_lookup.novice(task, random.Random(index))
        act(moves, workspace)
        rewards.append(score(task, root).reward)
    assert 0 < sum(rewards) < len(rewards)


@pytest.mark.parametrize("level", key_lookup.LEVELS)
def test_the_novice_takes_only_what_its_search_shows(level: int, tmp_path: Path) -> None:
    for index in range(15):
        task = key_lookup.generate(level, "validation", index)
        root = tmp_path / str(index)
        workspace = lay_out(task, root)
        seen = ""
        for move in key_lookup.novice(task, random.Random(index)):
            if move.kind == "shell":
                done = subprocess.run(
                    ["bash", "-c", move.command], cwd=workspace, capture_output=True, text=True
                )
                assert done.returncode == 0 and not done.stderr, move.command
                seen += "=" + done.stdout
            else:
                assert f"={move.content}\n" in seen


def test_the_novice_refuses_a_task_of_another_family() -> None:
    task = key_lookup.generate(1, "train", 0)
    other = Task("other", "Do it.", {}, task.verifier)
    with pytest.raises(ConfigError, match="'other'"):
        key_lookup.novice(other, random.Random(0))


@pytest.mark.parametrize("level", key_lookup.LEVELS)
def test_splits_share_no_key_and_tasks_differ(level: int) -> None:
    keys: dict[str, set[str]] = {}
    for split in key_lookup.SPLITS:
        tasks = [key_lookup.generate(level, split, index) for index in range(1000)]
        assert len({task.instruction for task in tasks}) >= (1000 if level > 1 else 990)
        assert len({(task.metadata["key"], task.metadata["answer_file"]) for task in tasks}) == 1000
        keys[split] = {
            word
            for task in tasks
            for content in task.files.values()
            for line in content.decode().split()
            for word in line.lstrip("#").replace("@", "").split("=")
            if "-" in word
        }
    train, validation, test = (keys[split] for split in key_lookup.SPLITS)
    assert not train & validation and not train & test and not validation & test


@pytest.mark.parametrize("split", key_lookup.SPLITS)
def test_every_index_has_its_own_key_and_file(split: str) -> None:
    size = key_lookup.size(split)
    assert size >= 1000
    assert gcd(key_lookup._STRIDE, size) == 1
    assert size == len(key_lookup._keys(split)) * len(set(key_lookup._FILES))


@pytest.mark.parametrize("level", key_lookup.LEVELS)
def test_the_answer_is_not_what_a_wrong_line_gives(level: int) -> None:
    for index in range(200):
        task = key_lookup.generate(level, "train", index)
        lines = b"".join(task.files.values()).decode().split()
        values = [line.split("=")[1] for line in lines]
        assert answer(task)["file"] not in task.files
        if level != 3:
            assert values.count(answer(task)["answer"]) == 1


def test_a_task_stays_what_it_was() -> None:
    task = key_lookup.generate(2, "test", 7)
    assert task == key_lookup.generate(2, "test", 7)
    assert task.task_id == "key_lookup-2-test-7"
    assert task.instruction == PINNED_INSTRUCTION
    assert {path: content.decode() for path, content in task.files.items()} == PINNED_FILES


@pytest.mark.parametrize("content", [b"{answer}", b" {answer}\n", b"\n\t{answer}\r\n\n"])
def test_white_space_around_the_answer_does_not_matter(content: bytes, tmp_path: Path) -> None:
    task = key_lookup.generate(2, "train", 3)
    workspace = lay_out(task, tmp_path)
    wanted = answer(task)
    (workspace / wanted["file"]).write_bytes(
        content.replace(b"{answer}", wanted["answer"].encode())
    )
    assert score(task, tmp_path).reward == 1.0


@pytest.mark.parametrize(
    "content",
    [b"", b"{answer}x", b"the answer is {answer}", b"{answer} {answer}", b"\xff{answer}"]
    + [b" " * 5000 + b"{answer}", b"'{answer}'"],
)
def test_anything_else_scores_0(content: bytes, tmp_path: Path) -> None:
    task = key_lookup.generate(2, "train", 3)
    workspace = lay_out(task, tmp_path)
    wanted = answer(task)
    (workspace / wanted["file"]).write_bytes(
        content.replace(b"{answer}", wanted["answer"].encode())
    )
    assert score(task, tmp_path) == VerifierResult(0.0, {"answer": 0.0, "written": 1.0})


@pytest.mark.parametrize("kind", ["link", "hidden link", "fifo", "folder", "huge", "loop"])
def test_odd_answer_files_score_0_in_bounded_time(kind: str, tmp_path: Path) -> None:
    task = key_lookup.generate(3, "train", 3)
    workspace = lay_out(task, tmp_path)
    wanted = answer(task)
    path = workspace / wanted["file"]
    if kind == "link":
        (workspace / "elsewhere").write_text(wanted["answer"])
        path.symlink_to("elsewhere")
    elif kind == "hidden link":
        path.symlink_to(tmp_path / "hidden" / "expected.json")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        path.write_text(wanted["answer"])
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to(wanted["file"])
    assert score(task, tmp_path).reward == 0.0


def test_wrong_arguments_name_themselves() -> None:
    with pytest.raises(ConfigError, match="level is one of 1, 2, 3, 4; got 5"):
        key_lookup.generate(5, "train", 0)
    with pytest.raises(UnknownNameError, match="did you mean 'train'"):
        key_lookup.generate(1, "trian", 0)
    size = key_lookup.size("test")
    for index in (-1, size):
        with pytest.raises(ConfigError, match=f"0 to {size - 1}; got {index}"):
            key_lookup.generate(1, "test", index)
