from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from clawgym_env import HarnessVectorEnv
from clawgym_env.errors import ClawgymError, ConfigError, HarnessStartError


@contextmanager
def made(num_envs: int, **kwargs: Any) -> Iterator[HarnessVectorEnv]:
    kwargs = {"harness": "small_harnesses:Echo", "tasks": "small_tasks:echo", **kwargs}
    env = HarnessVectorEnv(num_envs, sandbox="process", **kwargs)
    try:
        yield env
    finally:
        env.close()


def test_make_vec_uses_one_event_loop() -> None:
    env = gym.make_vec(
        "clawgym/ReAct-v0",
        num_envs=3,
        vectorization_mode="vector_entry_point",
        tasks="key_lookup:level=1",
    )
    assert isinstance(env.unwrapped, HarnessVectorEnv)
    obs, info = env.reset(seed=1)
    assert obs in env.observation_space
    assert env.action_space.sample() in env.action_space
    assert len({rollout for rollout in info["rollout_id"]}) == 3
    env.close()


def test_next_step_resets_on_the_step_after_the_end() -> None:
    with made(2) as env:
        assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        env.reset(seed=0)
        obs, rewards, terminated, truncated, info = env.step(["yes", "no"])
        assert rewards.tolist() == [1.0, 0.0] and rewards.dtype == np.float64
        assert terminated.all() and not truncated.any()
        assert obs["messages"] == ([], [])
        obs, rewards, terminated, truncated, info = env.step(["ignored", "ignored"])
        assert rewards.tolist() == [0.0, 0.0] and not terminated.any()
        assert all(messages for messages in obs["messages"])
        assert info["outcome"].tolist() == ["", ""]


def test_same_step_carries_the_final_observation_and_info() -> None:
    with made(2, autoreset_mode="SameStep") as env:
        env.reset(seed=0)
        obs, rewards, terminated, _, info = env.step(["yes", "no"])
        assert rewards.tolist() == [1.0, 0.0] and terminated.all()
        assert all(messages for messages in obs["messages"])
        assert info["_final_obs"].all()
        assert info["final_obs"][0] == {"messages": [], "tools": []}
        assert info["final_info"]["outcome"].tolist() == ["completed"] * 2


def test_disabled_needs_a_reset_mask() -> None:
    with made(2, autoreset_mode=AutoresetMode.DISABLED) as env:
        env.reset(seed=0)
        env.step(["yes", "no"])
        with pytest.raises(ClawgymError, match="reset_mask"):
            env.step(["yes", "yes"])
        obs, info = env.reset(options={"reset_mask": np.array([True, False])})
        assert obs["messages"][0] and not obs["messages"][1]
        assert info["_task_id"].tolist() == [True, False]
        env.reset(options={"reset_mask": np.array([False, True])})
        assert env.step(["yes", "yes"])[1].tolist() == [1.0, 1.0]


def test_seeds_choose_tasks_and_repeat() -> None:
    with made(4, tasks="key_lookup:level=2", harness="react") as env:
        first = env.reset(seed=3)[1]["task_id"].tolist()
        assert env.reset(seed=3)[1]["task_id"].tolist() == first
        assert env.reset(seed=[3, 4, 5, 6])[1]["task_id"].tolist() == first
        assert env.reset(seed=99)[1]["task_id"].tolist() != first


def test_recv_returns_fast_environments_while_a_slow_one_runs() -> None:
    with made(3, harness="small_harnesses:Naps", tasks="small_tasks:naps") as env:
        env.reset(options={"task": None})
        env.reset(options={"task": "nap-short", "reset_mask": np.array([True, True, False])})
        env.reset(options={"task": "nap-long", "reset_mask": np.array([False, False, True])})
        env.send(["a", "b", "c"], [0, 1, 2])
        *_, terminated, _, _, ids = env.recv(min_ready=2)
        assert ids.tolist() == [0, 1] and terminated.all()
        with pytest.raises(ConfigError, match="under way"):
            env.send(["x"], [2])
        env.send(["a"], [0])
        obs, rewards, *_, ids = env.recv(min_ready=1)
        assert 2 not in ids.tolist()
        env.close()


def test_send_and_recv_refuse_wrong_arguments_and_move_nothing() -> None:
    with made(2) as env:
        with pytest.raises(ClawgymError, match="reset"):
            env.step(["yes", "yes"])
        env.reset(seed=0)
        for actions, ids in ((["yes"], [0, 1]), (["a", "b"], [0, 0]), (["a"], [2])):
            with pytest.raises(ConfigError):
                env.send(actions, ids)
        with pytest.raises(ConfigError):
            env.step(["yes", 7])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="min_ready"):
            env.recv(1)
        assert env.step(["yes", "yes"])[1].tolist() == [1.0, 1.0]


def test_a_failing_environment_leaves_the_others_be() -> None:
    with made(3, harness="small_harnesses:FailsOnEcho1") as env:
        env.reset(options={"task": "echo-0"})
        mask = np.array([False, True, False])
        with pytest.raises(HarnessStartError):
            env.reset(options={"task": "echo-1", "reset_mask": mask})
        _, rewards, terminated, truncated, info = env.step(["yes", "yes", "yes"])
        assert rewards.tolist() == [1.0, 0.0, 1.0]
        assert truncated.tolist() == [False, True, False]
        assert info["outcome"].tolist() == ["completed", "start_failed", "completed"]


def test_all_failing_is_an_error() -> None:
    with made(2, harness="small_harnesses:ExitsAtOnce") as env:
        with pytest.raises(HarnessStartError, match="--headless"):
            env.reset(seed=0)


@pytest.mark.parametrize(
    "kwargs", [{"num_envs": 0}, {"num_envs": True}, {"autoreset_mode": "Sometimes"}]
)
def test_bad_settings(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HarnessVectorEnv(**{"num_envs": 1, "harness": "react", **kwargs})


def test_sixteen_at_once_close_in_the_middle() -> None:
    with made(16, harness="react", tasks="key_lookup:level=1") as env:
        env.reset(seed=0)
        env.send(["hello"] * 16, range(16))
        env.recv(min_ready=1)
        env.close()
