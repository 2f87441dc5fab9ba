"""Packed equals per-call on trees of the demo's kind: sampled and demonstrated through ReAct."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import make_norms_exact
from torch import Tensor

from agents.attention import use_tree_attention
from agents.losses import LossSettings, policy_loss
from agents.models.policy import CausalPolicy
from agents.packing import PackedBatch, pack, pack_calls
from agents.runs import RunResult
from agents.scoring import frozen_logprobs, score
from agents.visits import visits_of
from agents.warmstart import with_token_ids
from clawgym_env import CaptureStore
from clawgym_env.calls import Rollout
from clawgym_env.tree_rules import TreeRules
from clawgym_env.trees import PrefixTree

SETTINGS = LossSettings(clip_high=0.28, importance_cap=1.5)


@pytest.fixture(scope="module")
def policy(small_run: RunResult) -> CausalPolicy:
    return CausalPolicy.load(small_run.directory / "policy")


@pytest.fixture(scope="module")
def rollouts(small_run: RunResult) -> list[Rollout]:
    with CaptureStore(small_run.directory / "captures.db", read_only=True) as store:
        return [store.rollout(rollout_id) for rollout_id in store.rollout_ids()]


def sampled(rollouts: Sequence[Rollout], policy: CausalPolicy) -> list[PrefixTree]:
    """The groups that the run trained on."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.group_id is not None:
            groups.setdefault(rollout.group_id, []).append(rollout)
    return [PrefixTree.from_rollouts(group) for group in groups.values() if len(group) == 4]


def demonstrated(rollouts: Sequence[Rollout], policy: CausalPolicy) -> list[PrefixTree]:
    """Demonstrations, whose calls extend one another, four to a tree."""
    shown = [r for r in rollouts if r.calls and r.calls[0].completion.logprobs is None]
    with_ids = [with_token_ids(rollout, policy.renderer) for rollout in shown[:12]]
    rules = TreeRules(unsampled=True)
    return [PrefixTree.from_rollouts(with_ids[n : n + 4], rules) for n in (0, 4, 8)]


def gradients(model: Any, batches: Sequence[PackedBatch]) -> Iterator[tuple[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        assert batch.old_logprobs is not None
        loss, _ = policy_loss(
            score(model, batch).logprobs,
            batch.old_logprobs,
            batch.behaviour_logprobs,
            batch.advantages,
            batch.weights,
            SETTINGS,
        )
        loss.backward()
        total += loss.detach()
    yield "loss", total
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad.clone()


@pytest.mark.parametrize("source", [sampled, demonstrated])
def test_loss_and_gradients_equal_the_per_call_ones(
    source: Any, rollouts: list[Rollout], policy: CausalPolicy
) -> None:
    trees = source(rollouts, policy)
    assert len(trees) >= 3
    stats = [tree.stats() for tree in trees]
    assert all(s.drift == 0 and s.ideal_ratio > 1.5 for s in stats)
    model = deepcopy(policy.model).double()
    make_norms_exact(model)
    use_tree_attention(model)
    advantages = {
        rollout.rollout_id: (1.0, -0.4, 0.3)[number % 3]
        for tree in trees
        for number, rollout in enumerate(tree.rollouts)
    }
    visits = visits_of(trees, advantages, aggregation="rollout")
    # Logprobs at sampling time off the policy, so that clip and correction both act.
    near = frozen_logprobs(model, pack_calls(trees, visits))
    old = near + 0.3 * torch.sin(torch.arange(len(near), dtype=torch.float64))
    behaviour = near + 0.5 * torch.cos(torch.arange(len(near), dtype=torch.float64))
    visits = replace(visits, behaviour_logprobs=behaviour.numpy())

    calls = [batch.with_old_logprobs(old) for batch in pack_calls(trees, visits)]
    longest = max(s.depth for s in stats)
    packings = [
        [batch.with_old_logprobs(old) for batch in pack(trees, visits, budget)]
        for budget in (None, 1 << 20, longest + 50)
    ]
    assert [len(rows) for rows in packings[:2]] == [len(trees), 1]
    assert 1 < len(packings[2]) < len(calls)
    expected = dict(gradients(model, calls))
    everything = float(sum(g.norm() ** 2 for g in expected.values())) ** 0.5
    for packed in packings:
        found = dict(gradients(model, packed))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            error = float((found[name] - value).norm())
            assert error <= 1e-10 * float(value.norm()) + 1e-14 * everything, name
