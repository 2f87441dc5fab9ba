"""Counts over a batch of rollouts: reward, calls, tokens, drift, outcomes.

Works on finished records alone and knows nothing of training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from clawgym_env.calls import Rollout

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class RolloutMetrics:
    """What a batch of rollouts was like.

    Attributes:
        rollouts: How many.
        scored: How many have a reward; the others failed for reasons of infrastructure.
        reward: Mean reward of the scored ones; NaN where there is none.
        success: Share of the scored ones with reward 1; NaN where there is none.
        calls: Captured calls.
        sampled_tokens: Tokens in replies.
        prompt_tokens: Tokens in prompts, repeated ones counted each time.
        drift: Share of the continuing calls that did not extend their parent token-exactly.
        undelivered: Replies that did not reach the harness.
        outcomes: How often each outcome came.
    """

    rollouts: int
    scored: int
    reward: float
    success: float
    calls: int
    sampled_tokens: int
    prompt_tokens: int
    drift: float
    undelivered: int
    outcomes: dict[str, int]

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> RolloutMetrics:
        """The counts over finished rollouts."""
        rewards = [r.reward for r in rollouts if r.reward is not None]
        calls = [call for rollout in rollouts for call in rollout.calls]
        continuing = [c for c in calls if c.extends or c.drift is not None]
        drifted = sum(c.drift is not None for c in continuing)
        return cls(
            rollouts=len(rollouts),
            scored=len(rewards),
            reward=sum(rewards) / len(rewards) if rewards else math.nan,
            success=sum(r >= 1.0 for r in rewards) / len(rewards) if rewards else math.nan,
            calls=len(calls),
            sampled_tokens=sum(len(c.completion.token_ids or ()) for c in calls),
            prompt_tokens=sum(len(c.prompt_ids or ()) for c in calls),
            drift=drifted / len(continuing) if continuing else 0.0,
            undelivered=sum(c.delivered is False for c in calls),
            outcomes=dict(Counter(r.outcome.value for r in rollouts)),
        )

    def scalars(self) -> dict[str, float]:
        """The numbers to log, outcomes as shares."""
        out = {
            "reward": self.reward,
            "success": self.success,
            "calls": float(self.calls),
            "sampled_tokens": float(self.sampled_tokens),
            "prompt_tokens": float(self.prompt_tokens),
            "drift": self.drift,
            "failed": float(self.rollouts - self.scored),
            "undelivered": float(self.undelivered),
        }
        for name, count in self.outcomes.items():
            out[f"outcome/{name}"] = count / max(1, self.rollouts)
        return out


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % score interval of a success rate (Wilson, JASA 22, 1927).

    Args:
        successes: How many succeeded.
        trials: Of how many.

    Returns:
        Lower and upper bound in [0, 1]; (0, 1) without a trial.
    """
    if trials == 0:
        return 0.0, 1.0
    rate, z2 = successes / trials, Z95 * Z95
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    spread = rate * (1 - rate) / trials + z2 / (4 * trials * trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(spread)
    return max(0.0, centre - half), min(1.0, centre + half)
