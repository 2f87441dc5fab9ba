from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import small_run_settings

from agents.curve import read_metrics
from agents.models.policy import CausalPolicy
from agents.runs import RunResult, RunSettings, execute, report
from clawgym_env import CaptureStore
from clawgym_env.errors import ConfigError, UnknownNameError

CLAWGYM = [sys.executable, "-m", "clawgym_env.cli"]


def test_a_run_leaves_what_it_promises(small_run: RunResult) -> None:
    directory = small_run.directory
    assert small_run.curve.read_bytes().startswith(b"\x89PNG")
    metrics = read_metrics(directory / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert all({"eval/success", "rollout/reward", "rollout/drift"} <= set(row) for row in metrics)
    assert list((directory / "tensorboard").iterdir())
    assert CausalPolicy.load(directory / "policy").version <= 2
    assert small_run.before.tasks == small_run.after.tasks == 12
    lines = report(small_run)
    assert "before training" in lines[0] and "95 % interval" in lines[1]
    shown = subprocess.run(
        [*CLAWGYM, *lines[-1].split("clawgym ")[1].split()], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert small_run.after.example[:8] in shown.stdout and "reward" in shown.stdout


def test_even_the_demonstrations_are_captured_calls(small_run: RunResult) -> None:
    with CaptureStore(small_run.directory / "captures.db", read_only=True) as store:
        rollouts = [store.rollout(rollout_id) for rollout_id in store.rollout_ids()]
    shown = [r for r in rollouts if r.calls and r.calls[0].completion.logprobs is None]
    sampled = [r for r in rollouts if r not in shown]
    assert len(shown) == 80 and {r.harness for r in rollouts} == {"react"}
    # Before, after, and two steps of 2 groups of 4 with an evaluation of 4 tasks each.
    assert len(sampled) == 12 + 12 + 2 * (8 + 4)
    assert all(call.drift is None for r in sampled for call in r.calls)


def test_a_finished_run_is_not_done_again(small_run: RunResult) -> None:
    again = execute(small_run.directory)
    assert (again.before, again.after) == (small_run.before, small_run.after)
    with pytest.raises(ConfigError, match="holds a run already; go on with it by --resume"):
        execute(small_run.directory, small_run_settings())


def after_step_1(directory: Path) -> bool:
    return (directory / "checkpoints" / "step-000001").is_dir()


def while_cloning(directory: Path) -> bool:
    return (directory / "base").is_dir()


@pytest.mark.parametrize(
    ("moment", "stop"),
    [
        (while_cloning, signal.SIGKILL),
        (after_step_1, signal.SIGKILL),
        (after_step_1, signal.SIGINT),
    ],
)
def test_an_interrupted_run_goes_on(
    tmp_path: Path, moment: Callable[[Path], bool], stop: signal.Signals
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    settings = replace(small_run_settings(), steps=3)
    (directory / "run.json").write_text(settings.to_json())
    resume = [*CLAWGYM, "train", "--resume", "--run", str(directory)]
    # The rooms of its sandboxes are here, so that what it leaves can be seen.
    env = os.environ | {"TMPDIR": str(tmp_path)}
    running = subprocess.Popen(
        resume, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while not moment(directory):
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    running.send_signal(stop)
    _, errors = running.communicate(timeout=60)
    if stop is signal.SIGINT:
        assert running.returncode == 130
        assert f"go on with: clawgym train --resume --run {directory}" in errors
        assert "Traceback" not in errors
    assert not (directory / "after.json").exists()

    done = subprocess.run(resume, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert ("going on from" in done.stderr) == (moment is after_step_1)
    assert "success after training" in done.stdout
    rows = (directory / "metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in read_metrics(directory / "metrics.jsonl")] == [1, 2, 3]
    assert len(rows) <= 4, "one step at most is done twice"
    assert json.loads((directory / "after.json").read_text())["tasks"] == 12
    assert not list(tmp_path.glob("clawgym-*")), "rooms of the killed manager are swept"


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLAWGYM, *map(str, words)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--harness", "nope", "unknown harness 'nope'"),
        ("--tasks", "key_lookup:level=99", "level is 99"),
        ("--sandbox", "nope", "unknown sandbox backend 'nope'"),
        ("--wall-s", "nan", "wall_s"),
        ("--model", "tests", "no model directory"),
    ],
)
def test_settings_that_cannot_be_met_leave_no_run(
    tmp_path: Path, option: str, value: str, named: str
) -> None:
    done = run("train", "--run", tmp_path / "r", option, value)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and named in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "r" / "run.json").exists()


def test_resume_and_demo_keep_to_the_runs_settings(tmp_path: Path, small_run: RunResult) -> None:
    done = run("train", "--resume", "--run", small_run.directory, "--steps", 5, "--lora", 4)
    assert done.returncode == 2 and "drop --lora, --steps" in done.stderr
    done = run("demo", "--run", small_run.directory, "--seed", 3)
    assert done.returncode == 2 and "holds a run with seed 0" in done.stderr
    assert run("demo", "--run", small_run.directory).returncode == 0
    (tmp_path / "file").touch()
    done = run("train", "--run", tmp_path / "file")
    assert done.returncode == 2 and "cannot be made: File exists" in done.stderr
    (tmp_path / "run.json").write_text("{")
    done = run("train", "--resume", "--run", tmp_path)
    assert done.returncode == 2 and "holds no run's settings" in done.stderr


def test_bad_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to go on with"):
        execute(tmp_path)
    with pytest.raises(ConfigError, match="demonstrator is"):
        RunSettings(demonstrator="expert")
    with pytest.raises(ConfigError, match="give --model or a number of"):
        RunSettings(demonstrations=0)
    with pytest.raises(UnknownNameError, match="did you mean 'react'"):
        execute(tmp_path / "a", RunSettings(harness="reakt"))
    text = RunSettings().to_json().replace('"steps"', '"stepz"')
    with pytest.raises(ConfigError, match=r"unknown run settings \['stepz'\]"):
        RunSettings.from_json(text)
