"""The demo's stages at a size that takes seconds."""

from __future__ import annotations

from dataclasses import replace

from agents.demo import demo_settings
from agents.runs import RunSettings


def small_run_settings(seed: int = 0) -> RunSettings:
    settings = demo_settings(seed=seed)
    return replace(
        settings,
        size="200k",
        tasks="key_lookup:level=1,split=train",
        held_out="key_lookup:level=1,split=test,n=12",
        demonstrations=80,
        clone=replace(settings.clone, epochs=4),
        grpo=replace(settings.grpo, tasks_per_step=2, group_size=4),
        steps=2,
        eval_every=1,
        eval_tasks=4,
    )
