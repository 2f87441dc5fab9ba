"""Group-relative advantages: what each rollout earned beside the others of its group.

Works on rewards alone. It knows nothing of calls, tokens or trees; a rollout counts once whatever
its length. Invariant: rollouts without a reward take no part in any statistic and get no advantage,
and a group whose rewards are equal gets exactly zero, rounding residue included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from clawgym_env.calls import Rollout
from clawgym_env.errors import ConfigError

Scale = Literal["none", "std", "sample_std"]
Baseline = Literal["mean", "leave_one_out"]

RESIDUE = 1e-6
"""Rewards nearer than this, relative to the largest, are equal: they differ by rounding only."""


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """How advantages are computed.

    Attributes:
        baseline: ``mean`` of the group (GRPO, arXiv 2402.03300), or ``leave_one_out``, the mean of
            the others (RLOO, arXiv 2402.14740, eq. 8).
        scale: Divide by nothing (Dr. GRPO, arXiv 2503.20783), by the group's population standard
            deviation ``std``, or by ``sample_std`` (one degree of freedom less).
    """

    baseline: Baseline = "mean"
    scale: Scale = "none"

    def __post_init__(self) -> None:
        _check("baseline", self.baseline, ("mean", "leave_one_out"))
        _check("scale", self.scale, ("none", "std", "sample_std"))


@dataclass(frozen=True, slots=True)
class AdvantageCounts:
    """What the groups were like.

    Attributes:
        groups: Groups with at least one reward.
        equal: Groups of two or more whose rewards are all equal; they give no gradient.
        single: Groups with one reward, which has nothing to be compared with.
        failed: Rollouts without a reward.
    """

    groups: int = 0
    equal: int = 0
    single: int = 0
    failed: int = 0


def group_advantages(
    rewards: Sequence[float | None], settings: AdvantageSettings | None = None
) -> NDArray[np.float64]:
    """Advantages within one group.

    Args:
        rewards: One reward a rollout; None for a rollout that failed for reasons of infrastructure.
        settings: Baseline and scale.

    Returns:
        (len(rewards),) float64, NaN where the reward is None.

    Raises:
        ConfigError: A reward is NaN or infinite.
    """
    settings = settings or AdvantageSettings()
    values = np.array([np.nan if r is None else float(r) for r in rewards], dtype=np.float64)
    known = np.array([r is not None for r in rewards], dtype=np.bool_)
    r = values[known]
    if not np.isfinite(r).all():
        raise ConfigError(f"rewards must be finite or None, got {list(rewards)!r}")
    advantages = np.full(len(values), np.nan)
    if len(r) < 2 or np.ptp(r) <= RESIDUE * max(1.0, float(np.abs(r).max())):
        advantages[known] = 0.0
        return advantages
    if settings.baseline == "mean":
        centred = r - r.mean()
    else:
        centred = r - (r.sum() - r) / (len(r) - 1)
    if settings.scale != "none":
        centred = centred / r.std(ddof=1 if settings.scale == "sample_std" else 0)
    advantages[known] = centred
    return advantages


def rollout_advantages(
    rollouts: Sequence[Rollout], settings: AdvantageSettings | None = None
) -> tuple[dict[str, float], AdvantageCounts]:
    """Advantages of many rollouts, normalised within each group.

    A group is the rollouts of one (group_id, task, harness), so that an easy harness does not drown
    a hard one; a rollout without a ``group_id`` belongs to the group of its task and harness.

    Returns:
        Advantage by rollout id, rollouts without a reward left out, and counts for the log.

    Raises:
        ConfigError: A reward is NaN or infinite.
    """
    groups: dict[tuple[str | None, str, str], list[Rollout]] = {}
    for rollout in rollouts:
        key = (rollout.group_id, rollout.task_id, rollout.harness)
        groups.setdefault(key, []).append(rollout)
    advantages: dict[str, float] = {}
    scored = equal = single = failed = 0
    for members in groups.values():
        values = group_advantages([member.reward for member in members], settings)
        known = [
            (member.rollout_id, float(value))
            for member, value in zip(members, values, strict=True)
            if member.reward is not None
        ]
        advantages.update(known)
        failed += len(members) - len(known)
        scored += len(known) > 0
        single += len(known) == 1
        equal += len(known) > 1 and all(value == 0.0 for _, value in known)
    return advantages, AdvantageCounts(scored, equal, single, failed)


def _check(field: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{field} must be one of {', '.join(known)}; got {value!r}")
