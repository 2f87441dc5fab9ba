"""The settings of the demo: a tiny model, ten minutes, two cores.

A fallible demonstrator acts through the real harness; the model cloned from it is weak, and tree
GRPO makes it good at tasks that it has never seen. The settings were chosen on the first 200 test
tasks, so the held-out ones start behind those.
"""

from __future__ import annotations

from agents.advantages import AdvantageSettings
from agents.grpo_settings import GRPOSettings
from agents.losses import LossSettings
from agents.runs import RunSettings
from agents.warmstart import CloneSettings


def demo_settings(*, seed: int = 0, sandbox: str | None = None) -> RunSettings:
    """The demo's settings.

    Args:
        seed: Of everything that is drawn.
        sandbox: Backend's name, or None for the best that works here.
    """
    return RunSettings(
        tasks="key_lookup:level=2,split=train",
        held_out="key_lookup:level=2,split=test,start=1000,n=200",
        sandbox=sandbox,
        demonstrations=800,
        clone=CloneSettings(seed=seed),
        grpo=GRPOSettings(
            learning_rate=1e-3,
            warmup_steps=3,
            advantages=AdvantageSettings(scale="std"),
            loss=LossSettings(clip_high=0.28),
            max_reply_tokens=64,
            seed=seed,
        ),
        steps=30,
        max_calls=6,
        wall_s=60.0,
        seed=seed,
    )
