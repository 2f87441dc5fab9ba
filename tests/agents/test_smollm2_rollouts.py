"""A real language model in real harnesses: SmolLM2 answers, and one LoRA step trains on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agents.callbacks import Callback, StepResult
from agents.grpo import TreeGRPO
from agents.grpo_settings import GRPOSettings
from agents.models import smollm2
from agents.models.policy import CausalPolicy, LoraSettings
from clawgym_env import CaptureStore, HarnessEnv
from clawgym_env.calls import Outcome, Rollout
from clawgym_env.harnesses import get_harness

GROUP = 3


def written(rollout: Rollout) -> float:
    """Characters that the model wrote: so small a model rarely earns anything else to tell by."""
    return sum(len(call.completion.message.text) for call in rollout.calls) / 100


class Keep(Callback):
    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def on_step(self, trainer: TreeGRPO, result: StepResult) -> bool:
        self.results.append(result)
        return True


@pytest.mark.slow
@pytest.mark.harness
@pytest.mark.parametrize("name", ["react", "mini-swe-agent"])
def test_smollm2_answers_and_a_lora_step_changes_it(name: str, tmp_path: Path) -> None:
    harness = get_harness(name)
    harness.install(print)
    policy = CausalPolicy.from_pretrained(
        smollm2.get_model("smollm2"), lora=LoraSettings(rank=4, alpha=8)
    )
    store = tmp_path / "captures.db"
    env = HarnessEnv(name, tasks="key_lookup:level=1", store=store, max_calls=2, wall_s=200.0)
    settings = GRPOSettings(
        tasks_per_step=1,
        group_size=GROUP,
        max_reply_tokens=32,
        learning_rate=1e-3,
        live=GROUP,
    )
    keep = Keep()
    with TreeGRPO(policy, env, settings, reward=written) as trainer:
        before = [p.detach().clone() for p in policy.parameters()]
        trainer.learn(1, keep, progress=False)
        after = [p.detach() for p in policy.parameters()]
    (result,) = keep.results
    rollouts = result.rollouts
    assert len(rollouts) == GROUP
    assert {r.outcome for r in rollouts} <= {
        Outcome.COMPLETED,
        Outcome.HARNESS_ERROR,
        Outcome.CALL_LIMIT,
    }
    for rollout in rollouts:
        assert rollout.reward is not None and rollout.calls
        for call in rollout.calls:
            ids, logprobs = call.completion.token_ids, call.completion.logprobs
            assert call.prompt_ids and ids and logprobs and len(ids) == len(logprobs) <= 32
    with CaptureStore(store, read_only=True) as captured:
        for rollout in rollouts:
            assert captured.rollout(rollout.rollout_id).calls == rollout.calls
    # What was sampled is what is trained: the packed trees give the logprobs of sampling time.
    assert abs(result.metrics["train/behaviour_gap"]) < 1e-3
    assert result.metrics["train/grad_norm"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert policy.version == 1
