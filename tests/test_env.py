import json
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

import clawgym_env
from clawgym_env import CaptureStore, HarnessEnv
from clawgym_env.calls import Message, Outcome
from clawgym_env.errors import ClawgymError, ConfigError, HarnessStartError, UnknownNameError
from clawgym_env.harnesses import HARNESSES, get_harness
from clawgym_env.registration import ENV_IDS


@contextmanager
def made(**kwargs: Any) -> Iterator[HarnessEnv]:
    env = HarnessEnv(**{"harness": "small_harnesses:Echo", "tasks": "small_tasks:echo", **kwargs})
    try:
        yield env
    finally:
        env.close()


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of the test's own, empty again at its end: nothing leaks."""
    room = tmp_path / "tmp"
    room.mkdir()
    tmp_path.chmod(0o711)
    room.chmod(0o711)
    monkeypatch.setattr("tempfile.tempdir", str(room))
    yield room
    assert [p.name for p in room.iterdir() if p.name.startswith("clawgym-")] == []


@pytest.fixture(params=["process", "bubblewrap"])
def sandbox(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_harness_has_an_id() -> None:
    assert {name: get_harness(name).env_id for name in HARNESSES} == ENV_IDS
    assert set(ENV_IDS.values()) <= set(gym.registry)
    assert all(gym.spec(env_id).nondeterministic for env_id in ENV_IDS.values())


def test_react_passes_check_env(sandbox: str) -> None:
    env = gym.make("clawgym/ReAct-v0", sandbox=sandbox)
    check_env(env.unwrapped)
    env.close()


def test_module_prefixed_id_and_pickled_spec() -> None:
    env = gym.make("clawgym_env:clawgym/ReAct-v0", tasks="key_lookup:level=1,n=3")
    spec = pickle.loads(pickle.dumps(env.spec))
    env.close()
    again = gym.make(spec)
    assert len(again.unwrapped.tasks) == 3  # type: ignore[attr-defined]
    again.close()


def test_a_person_solves_a_task_by_hand(sandbox: str) -> None:
    env = gym.make("clawgym/ReAct-v0", tasks="key_lookup:level=1", sandbox=sandbox)
    obs, info = env.reset(seed=7)
    assert obs in env.observation_space
    assert [m["role"] for m in obs["messages"]] == ["system", "user"]
    tools = {tool["function"]["name"] for tool in obs["tools"]}
    assert tools == {"bash", "read_file", "write_file", "finish"}

    def call(name: str, **arguments: str) -> str:
        written = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>\n{written}\n</tool_call>"

    task = env.unwrapped.tasks.get(info["task_id"])  # type: ignore[attr-defined]
    command = task.solution[0].command
    obs, reward, terminated, truncated, info = env.step(call("bash", command=command))
    assert (reward, terminated, truncated) == (0.0, False, False)
    line = obs["messages"][-1]["content"].strip().splitlines()[-1]
    value = line.rpartition("=")[2]
    env.step(call("write_file", path=task.metadata["answer_file"], content=value))
    obs, reward, terminated, truncated, info = env.step(call("finish", answer=value))
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert obs == {"messages": [], "tools": []} and obs in env.observation_space
    assert info["outcome"] == "completed" and info["verified"]
    env.close()


def test_the_same_seed_gives_the_same_observations() -> None:
    with made(harness="react", tasks="key_lookup:level=2") as env:
        seen = []
        for seed in (5, 5, 6):
            first, _ = env.reset(seed=seed)
            command = {"name": "bash", "arguments": {"command": "cat data/*"}}
            second, *_ = env.step(f"<tool_call>{json.dumps(command)}</tool_call>")
            for message in second["messages"]:
                for field in ("tool_calls", "tool_call_id"):
                    message.pop(field, None)  # ids are new each time
            seen.append((first, second))
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize(
    "action",
    [
        "yes",
        {"role": "assistant", "content": "yes"},
        {"content": [{"type": "text", "text": "yes"}]},
        Message("assistant", "yes"),
    ],
)
def test_forms_of_an_action(action: Any) -> None:
    with made() as env:
        env.reset(seed=0)
        assert action in env.action_space
        assert env.step(action)[1] == 1.0


def test_a_bad_action_leaves_the_call_waiting() -> None:
    with made() as env:
        env.reset(seed=0)
        for bad in (7, None, {}, {"role": "user", "content": "yes"}, {"tool_calls": [{"id": "x"}]}):
            assert bad not in env.action_space
            with pytest.raises(ConfigError):
                env.step(bad)  # type: ignore[arg-type]
        assert env.step("yes")[1] == 1.0


def test_a_reply_that_does_not_parse_goes_out_as_text() -> None:
    with made() as env:
        env.reset(seed=0)
        *_, info = env.step('<tool_call>{"name": </tool_call>')
        assert "tool_call" in info["parse_error"] or "JSON" in info["parse_error"]
        assert info["outcome"] == "completed"


def test_step_needs_a_waiting_call() -> None:
    with made() as env:
        with pytest.raises(ClawgymError, match="reset"):
            env.step("yes")
        env.reset(seed=0)
        env.step("yes")
        with pytest.raises(ClawgymError, match="reset"):
            env.step("yes")


def test_choice_of_task() -> None:
    with made() as env:
        assert env.reset(options={"task": 3})[1]["task_id"] == "echo-3"
        assert env.reset(options={"task": "echo-5"})[1]["task_id"] == "echo-5"
        assert env.reset(options={"task": env.tasks[1]})[1]["task_id"] == "echo-1"
        for bad in ({"task": 8}, {"task": -1}, {"task": 1.5}, {"tasks": 1}, {"task": True}):
            with pytest.raises(ConfigError):
                env.reset(options=bad)
        with pytest.raises(ClawgymError, match="echo-1"):
            env.reset(options={"task": "echo1"})


def test_reset_in_the_middle_starts_anew(own_tmp: Path) -> None:
    with made() as env:
        first = env.reset(seed=0)[1]["rollout_id"]
        second = env.reset(seed=0)[1]["rollout_id"]
        assert first != second
        (room,) = own_tmp.glob("clawgym-*")
        assert not any(first in path.name for path in room.iterdir())
        assert env.step("yes")[1] == 1.0


def test_parallel_calls_queue_oldest_first() -> None:
    with made(harness="small_harnesses:Parallel", tasks="small_tasks:even") as env:
        obs, info = env.reset(seed=0)
        replies = {}
        deadline = time.monotonic() + 20
        while info["pending_calls"] < 2 and info["call_index"] == 0:
            if time.monotonic() > deadline:
                break
            replies[obs["messages"][0]["content"]] = f"{info['call_index']}"
            obs, _, over, _, info = env.step(f"{info['call_index']}")
            if over:
                break
        while info["outcome"] == "":
            obs, _, _, _, info = env.step(f"{info['call_index']}")
        assert env.rollout is not None
        assert [c.call.index for c in env.rollout.calls] == [0, 1, 2]
        assert [c.completion.message.text for c in env.rollout.calls] == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["ExitsAtOnce", "Silent"])
def test_a_harness_that_never_asks_is_a_start_error(name: str, sandbox: str) -> None:
    with made(harness=f"small_harnesses:{name}", sandbox=sandbox) as env:
        with pytest.raises(HarnessStartError) as caught:
            env.reset(seed=0)
        if name == "ExitsAtOnce":
            assert caught.value.returncode == 7
            assert "no such option: --headless" in str(caught.value)


def test_a_harness_that_hangs_before_its_first_call_is_a_start_error() -> None:
    with made(harness="small_harnesses:HangsAtOnce", wall_s=1.0) as env:
        with pytest.raises(HarnessStartError, match="no model call came: still running after 1 s"):
            env.reset(seed=0)


def test_after_a_reset_that_failed_the_next_one_works() -> None:
    options = {"tasks": "small_tasks:echo", "sandbox": "process"}
    env = gym.make("clawgym/ReAct-v0", harness="small_harnesses:FailsOnEcho1", **options)
    with pytest.raises(HarnessStartError, match="exit status 9"):
        env.reset(options={"task": 1})
    with pytest.raises(ConfigError, match="task"):
        env.reset(options={"task": 99})
    env.reset(options={"task": 0})
    assert env.step("yes")[1] == 1.0
    env.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LaunchRaises", "launch raised ValueError: no such flag"),
        ("LaunchesNothing", "launch returned None; expected a LaunchPlan"),
    ],
)
def test_an_adapter_that_cannot_launch_is_a_start_error(name: str, why: str) -> None:
    with made(harness=f"small_harnesses:{name}") as env:
        with pytest.raises(HarnessStartError, match=why):
            env.reset(seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sandbox": 3}, "sandbox is a backend's name or None; got 3"),
        ({"store": 3}, "store is a path or None; got 3"),
        ({"model": 3}, "model is a path or None; got 3"),
        ({"harness": 3}, "harness is a name or package.module:Class; got 3"),
        ({"max_calls": 1.5}, "max_calls is a whole number or None; got 1.5"),
        ({"harness": "small_harnesses:Unfinished"}, "cannot be made: TypeError"),
        ({"tasks": "json:dumps"}, "tasks 'json:dumps': the function raised TypeError"),
    ],
)
def test_options_of_the_wrong_kind_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ClawgymError, match=message), made(**options):
        pass


@pytest.mark.parametrize(
    ("name", "outcome", "truncated"),
    [
        ("Hangs", Outcome.TIME_LIMIT, True),
        ("Crashes", Outcome.HARNESS_ERROR, False),
        ("Garbage", Outcome.COMPLETED, False),
        ("Floods", Outcome.HARNESS_ERROR, False),
        ("Daemon", Outcome.COMPLETED, False),
    ],
)
def test_ill_behaved_harnesses_end_with_an_outcome(
    name: str, outcome: Outcome, truncated: bool, sandbox: str, own_tmp: Path
) -> None:
    wall = 1.5 if name == "Hangs" else 30.0
    with made(harness=f"small_harnesses:{name}", sandbox=sandbox, wall_s=wall) as env:
        env.reset(seed=0)
        _, reward, terminated, cut, info = env.step("fine")
        assert info["outcome"] == outcome, info["detail"]
        assert (terminated, cut) == (not truncated, truncated)
        assert reward == 0.0 and info["verified"]
        (room,) = own_tmp.glob("clawgym-*")
        assert [p.name for p in room.iterdir()] == ["model.sock"]
        assert processes_under(own_tmp) == []


def processes_under(place: Path) -> list[str]:
    """Command lines of live processes that name a path under ``place`` or work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            cwd = os.readlink(entry / "cwd")
        except OSError:
            continue
        if str(place) in line or cwd.startswith(str(place)):
            found.append(line)
    return found


def test_the_limit_on_calls_truncates_and_is_verified() -> None:
    with made(harness="small_harnesses:Insists", max_calls=3) as env:
        env.reset(seed=0)
        steps = [env.step("no") for _ in range(3)]
        assert [s[3] for s in steps] == [False, False, True]
        info = steps[-1][4]
        assert info["outcome"] == "call_limit" and info["verified"]
        assert env.rollout is not None and len(env.rollout.calls) == 3


@pytest.mark.parametrize("index", range(7))
def test_a_verifier_without_a_score_is_no_reward(index: int) -> None:
    with made(tasks="small_tasks:broken") as env:
        env.reset(options={"task": index})
        _, reward, terminated, truncated, info = env.step("yes")
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert info["outcome"] == "verifier_error" and not info["verified"]
        assert env.tasks[index].task_id in info["detail"]
        assert env.rollout is not None and env.rollout.reward is None


def test_a_temporary_directory_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nope")
    with made() as env, pytest.raises(ClawgymError, match="TMPDIR is '/nope'"):
        env.reset(seed=0)


def test_calls_and_reward_are_in_the_store(tmp_path: Path) -> None:
    with made(store=tmp_path / "captures.db") as env:
        env.reset(seed=0)
        env.step("yes")
        rollout = env.rollout
    assert rollout is not None
    with CaptureStore(tmp_path / "captures.db") as store:
        kept = store.rollout(rollout.rollout_id)
    assert kept == rollout
    assert kept.reward == 1.0 and kept.calls[0].delivered is True


def test_render() -> None:
    with made(render_mode="ansi") as env:
        assert "reset" in env.render()
        env.reset(seed=0)
        assert "user: do echo-" in env.render()
        env.step("yes")
        assert "reward 1" in env.render()


def test_close_twice_and_use_again() -> None:
    with made() as env:
        env.close()
        env.reset(seed=0)
        env.close()
        env.close()
        env.reset(seed=0)
        assert env.step("yes")[1] == 1.0


@pytest.mark.parametrize(
    ("kwargs", "near"),
    [
        ({"harness": "reakt"}, "react"),
        ({"tasks": "key_lokup"}, "key_lookup"),
        ({"sandbox": "bublewrap"}, "bubblewrap"),
    ],
)
def test_unknown_names_come_with_the_near_one(kwargs: dict[str, str], near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{near}'") as caught:
        HarnessEnv(**{"harness": "react", **kwargs})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_unknown_id_comes_with_the_near_one() -> None:
    with pytest.raises(gym.error.NameNotFound, match="ReAct"):
        gym.make("clawgym/ReAkt-v0")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_calls": 0},
        {"wall_s": -1.0},
        {"max_tokens": "many"},
        {"render_mode": "rgb_array"},
        {"harness": "small_harnesses:Missing"},
        {"harness": "no_such_module:X"},
        {"harness": "json:loads"},
    ],
)
def test_bad_settings_are_one_clear_error(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HarnessEnv(**{"harness": "react", **kwargs})


def test_public_names_are_what_they_are() -> None:
    assert clawgym_env.__all__ == sorted(clawgym_env.__all__)
    for name in clawgym_env.__all__:
        assert getattr(clawgym_env, name).__name__ == name
