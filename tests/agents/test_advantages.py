from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.advantages import AdvantageSettings, group_advantages, rollout_advantages
from clawgym_env.calls import Outcome, Rollout
from clawgym_env.errors import ConfigError


def test_the_baseline_is_per_rollout_whatever_the_turns() -> None:
    assert group_advantages([1, 0, 1, 0]).tolist() == [0.5, -0.5, 0.5, -0.5]


def test_leave_one_out_by_hand() -> None:
    rewards = [0.35] * 7 + [0.0]
    advantages = group_advantages(rewards, AdvantageSettings(baseline="leave_one_out"))
    assert advantages[-1] == pytest.approx(-0.35)
    assert advantages[0] == pytest.approx(0.05)
    assert np.isfinite(advantages.astype(np.float32)).all()


def test_standard_deviations_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    population = group_advantages(rewards, AdvantageSettings(scale="std"))
    sample = group_advantages(rewards, AdvantageSettings(scale="sample_std"))
    assert population.tolist() == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert sample.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


@given(
    st.floats(-10, 10),
    st.integers(2, 16),
    st.sampled_from(["none", "std", "sample_std"]),
    st.sampled_from(["mean", "leave_one_out"]),
)
def test_equal_rewards_give_exactly_zero(reward: float, n: int, scale: str, baseline: str) -> None:
    settings = AdvantageSettings(scale=scale, baseline=baseline)  # type: ignore[arg-type]
    residue = [float(np.float32(reward)) if i % 2 else reward for i in range(n)]
    for rewards in ([reward] * n, residue):
        assert (group_advantages(rewards, settings) == 0.0).all()


def test_failed_rollouts_are_outside_the_statistics() -> None:
    advantages = group_advantages([1.0, None, 0.0, None])
    assert advantages[[0, 2]].tolist() == [0.5, -0.5]
    assert np.isnan(advantages[[1, 3]]).all()
    assert group_advantages([None, 0.7])[1] == 0.0
    assert np.isnan(group_advantages([None])).all()


def test_groups_are_apart_and_counted() -> None:
    base = Rollout("", "t", "react", Outcome.COMPLETED)
    members = [("t", "react", 1.0), ("t", "react", 0.0), ("t", "react", None), ("t", "mini", 1.0)]
    members += [("u", "react", 0.5), ("u", "react", 0.5), ("v", "react", None)]
    rollouts = [
        replace(base, rollout_id=f"r{n}", task_id=task, harness=harness, reward=reward)
        for n, (task, harness, reward) in enumerate(members)
    ]
    advantages, counts = rollout_advantages(rollouts)
    assert advantages == {"r0": 0.5, "r1": -0.5, "r3": 0.0, "r4": 0.0, "r5": 0.0}
    assert (counts.groups, counts.equal, counts.single, counts.failed) == (3, 1, 1, 2)


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match="finite"):
        group_advantages([1.0, float("nan")])
    with pytest.raises(ConfigError, match="scale must be one of none, std, sample_std; got 'var'"):
        AdvantageSettings(scale="var")  # type: ignore[arg-type]
