"""What a verifier's output means.

This module knows nothing of processes or sandboxes; running the verifier is the manager's part.
Its invariant: a score is a finite number from 0 to 1 that the verifier really printed. Anything
else is an error of the infrastructure, never a reward of 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clawgym_env.errors import VerifierError


@dataclass(frozen=True, slots=True)
class VerifierResult:
    """A verifier's score.

    Attributes:
        reward: From 0 to 1.
        rewards: The parts it is made of, by name; finite numbers.
    """

    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict)


def parse_score(stdout: bytes) -> VerifierResult:
    """Read the score from a verifier's standard output.

    The last line that is not blank holds it: a number, or a JSON object
    ``{"reward": NUMBER, "rewards": {NAME: NUMBER, …}}`` of which ``rewards`` may be left out.

    Args:
        stdout: What the verifier printed, or the tail of it.

    Raises:
        VerifierError: There is no such line, or a number is not finite, or the reward lies
            outside 0 to 1.
    """
    lines = stdout.decode("utf-8", "replace").strip().splitlines()
    if not lines:
        raise VerifierError("the verifier printed nothing; its last line must be the score")
    line = lines[-1].strip()
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        shown = line if len(line) <= 200 else line[:200] + "…"
        raise VerifierError(
            f"the verifier's last line is {shown!r}; expected a number from 0 to 1, or a JSON "
            'object such as {"reward": 1.0}'
        ) from None
    if not isinstance(value, dict):
        return VerifierResult(_reward(value))
    unknown = sorted(set(value) - {"reward", "rewards"})
    if unknown or "reward" not in value:
        raise VerifierError(
            f"the verifier's score has the fields {sorted(value)}; expected 'reward' and, if "
            "wanted, 'rewards'"
        )
    parts = value.get("rewards", {})
    if not isinstance(parts, dict):
        raise VerifierError(f"the verifier's rewards are {parts!r}; expected an object of numbers")
    rewards = {name: _number(f"rewards[{name!r}]", part) for name, part in parts.items()}
    return VerifierResult(_reward(value["reward"]), rewards)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
        raise VerifierError(f"the verifier's {name} is {value!r}; expected a finite number")
    return float(value)


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _reward(value: Any) -> float:
    reward = _number("reward", value)
    if not 0.0 <= reward <= 1.0:
        raise VerifierError(f"the verifier's reward is {reward!r}; expected 0 to 1")
    return reward
