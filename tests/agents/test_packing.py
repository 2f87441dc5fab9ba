from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_models import tiny
from torch import Tensor
from tree_cases import captured, rollout_of, rollouts

from agents.attention import use_tree_attention
from agents.losses import LossMetrics, LossSettings, policy_loss
from agents.packing import PackedBatch, pack, pack_calls
from agents.scoring import frozen_logprobs, score
from agents.visits import AGGREGATIONS, Visits, visits_of
from clawgym_env.calls import Rollout
from clawgym_env.errors import ConfigError
from clawgym_env.trees import PrefixTree

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.3, importance_cap=1.5, kl_coefficient=0.05)


@cache
def model(kind: str) -> Any:
    made = tiny(kind)
    use_tree_attention(made)
    return made


def spread(number: int) -> float:
    return ((number * 37) % 11 - 5) / 4


def advantages_of(group: list[Rollout]) -> dict[str, float]:
    return {rollout.rollout_id: spread(n + 1) for n, rollout in enumerate(group)}


def constant_of(aggregation: str) -> float | None:
    return 13.0 if aggregation == "constant" else None


def naive_terms(
    group: list[Rollout], tree: PrefixTree, aggregation: str
) -> list[tuple[Any, int, float, float]]:
    """(call, reply position, advantage, weight), straight from the definitions."""
    calls = {call.call.call_id: call for rollout in group for call in rollout.calls}
    advantages = advantages_of(group)
    included = [call for call in tree.calls if call.excluded is None]
    replies = [calls[call.call_id].completion.token_ids or () for call in included]
    total = sum(len(reply) for reply in replies)
    per_rollout: Counter[str] = Counter()
    for entry, reply in zip(included, replies, strict=True):
        per_rollout[group[entry.rollouts[0]].rollout_id] += len(reply)
    terms = []
    for entry, reply in zip(included, replies, strict=True):
        rollout = group[entry.rollouts[0]].rollout_id
        weight = {
            "token": 1 / total,
            "call": 1 / (len(included) * len(reply)),
            "rollout": 1 / (len(per_rollout) * per_rollout[rollout]),
            "constant": 1 / (len(per_rollout) * 13.0),
        }[aggregation]
        for position in range(len(reply)):
            terms.append((calls[entry.call_id], position, advantages[rollout], weight))
    return terms


def naive_loss(policy: Any, terms: list[tuple[Any, int, float, float]]) -> Tensor:
    """Each call in a forward pass of its own, each term by the formula, nothing shared."""
    loss = torch.zeros((), dtype=torch.float64)
    for call_id in dict.fromkeys(call.call.call_id for call, *_ in terms):
        own = [(n, *term) for n, term in enumerate(terms) if term[0].call.call_id == call_id]
        call = own[0][1]
        logits = policy(torch.tensor([call.sequence]), use_cache=False).logits[0]
        start = len(call.prompt_ids)
        replied = torch.tensor(call.completion.token_ids)
        logprobs = logits[start - 1 : -1].log_softmax(-1)[range(len(replied)), replied]
        old, reference = torch.tensor([prescribed(n) for n, *_ in own], dtype=torch.float64).T
        advantage = torch.tensor([a for *_, a, _ in own], dtype=torch.float64)
        weight = torch.tensor([w for *_, w in own], dtype=torch.float64)
        ratio = torch.exp(logprobs - old)
        bounded = torch.where(ratio > 1.3, 1.3, torch.where(ratio < 0.8, 0.8, ratio))
        surrogate = torch.where(
            ratio * advantage < bounded * advantage, ratio * advantage, bounded * advantage
        )
        sampled = torch.tensor(call.completion.logprobs, dtype=torch.float64)
        importance = torch.exp(old - sampled).clamp(max=1.5)
        k3 = torch.exp(reference - logprobs) - (reference - logprobs) - 1
        loss = loss + (weight * (-surrogate * importance + 0.05 * k3)).sum()
    return loss


def prescribed(index: int) -> tuple[float, float]:
    """Old and reference logprobs of a visit: any numbers will do."""
    return -2.0 + spread(index) / 2, -2.5 + spread(index + 3) / 3


def packed_loss(policy: Any, batches: list[PackedBatch]) -> Tensor:
    count = sum(len(batch.visit_index) for batch in batches)
    old = torch.tensor([prescribed(n)[0] for n in range(count)], dtype=torch.float64)
    reference = torch.tensor([prescribed(n)[1] for n in range(count)], dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        batch = batch.with_old_logprobs(old)
        assert batch.old_logprobs is not None
        scores = score(policy, batch, chunk=5)
        loss, _ = policy_loss(
            scores.logprobs,
            batch.old_logprobs,
            batch.behaviour_logprobs,
            batch.advantages,
            batch.weights,
            SETTINGS,
            reference_logprobs=reference[batch.visit_index],
        )
        loss.backward()
        total += loss.detach()
    return total


def gradients(policy: Any) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return found


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    everything = math.sqrt(sum(float(g.norm()) ** 2 for g in theirs.values()))
    for name, expected in theirs.items():
        error = float((ours[name] - expected).norm())
        # The second term is for gradients that are zero but for rounding, such as key biases.
        assert error <= 1e-10 * float(expected.norm()) + 1e-14 * everything, name


def budgets(trees: list[PrefixTree], draw: Any) -> int | None:
    longest = max(tree.stats().depth for tree in trees)
    total = sum(tree.stats().unique_tokens for tree in trees)
    return draw(st.one_of(st.none(), st.integers(longest, max(longest, total))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_packed_equals_per_call(kind: str, data: st.DataObject) -> None:
    group = data.draw(rollouts())
    tree = PrefixTree.from_rollouts(group)
    assume(tree.included)
    aggregation = data.draw(st.sampled_from(AGGREGATIONS))
    visits = visits_of(
        [tree], advantages_of(group), aggregation=aggregation, constant=constant_of(aggregation)
    )
    batches = pack([tree], visits, budgets([tree], data.draw))
    policy = model(kind)

    expected = naive_loss(policy, naive_terms(group, tree, aggregation))
    expected.backward()
    theirs = gradients(policy)
    ours = packed_loss(policy, batches)
    assert abs(float(ours - expected.detach())) <= 1e-10 * abs(float(expected.detach())) + 1e-14
    assert_close(gradients(policy), theirs)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_several_trees_share_rows_and_budgets_change_nothing(data: st.DataObject) -> None:
    first = data.draw(rollouts(max_rollouts=2))
    second = [
        replace(
            rollout,
            rollout_id="x" + rollout.rollout_id,
            calls=tuple(
                replace(c, call=replace(c.call, call_id="x" + c.call.call_id))
                for c in rollout.calls
            ),
        )
        for rollout in data.draw(rollouts(max_rollouts=2))
    ]
    trees = [PrefixTree.from_rollouts(first), PrefixTree.from_rollouts(second)]
    assume(all(tree.included for tree in trees))
    visits = visits_of(trees, advantages_of(first + second), aggregation="rollout")
    policy = model("qwen3")
    packed_loss(policy, pack_calls(trees, visits))
    theirs = gradients(policy)
    rows = pack(trees, visits, budgets(trees, data.draw))
    packed_loss(policy, rows)
    assert_close(gradients(policy), theirs)
    unshared = pack_calls(trees, visits, max(row.tokens for row in pack_calls(trees, visits)) * 3)
    packed_loss(policy, unshared)
    assert_close(gradients(policy), theirs)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rows_against_the_definitions(data: st.DataObject) -> None:
    group = data.draw(rollouts())
    tree = PrefixTree.from_rollouts(group)
    assume(tree.included)
    aggregation = data.draw(st.sampled_from(AGGREGATIONS))
    visits = visits_of(
        [tree], advantages_of(group), aggregation=aggregation, constant=constant_of(aggregation)
    )
    terms = naive_terms(group, tree, aggregation)
    assert len(visits) == len(terms)
    assert visits.advantages.tolist() == [advantage for _, _, advantage, _ in terms]
    assert visits.weights.tolist() == pytest.approx([weight for *_, weight in terms])
    assert visits.behaviour_logprobs.tolist() == [
        call.completion.logprobs[position] for call, position, _, _ in terms
    ]
    assert visits.policy_version.tolist() == [c.completion.policy_version for c, *_ in terms]
    if aggregation != "constant":
        assert visits.weights.sum() == pytest.approx(1.0)

    budget = budgets([tree], data.draw)
    rows = pack([tree], visits, budget)
    seen: list[int] = []
    for row in rows:
        assert budget is None or row.tokens <= budget
        ids = row.input_ids[0].tolist()
        ends = row.subtree_end.tolist()
        for n, index in enumerate(row.visit_index.tolist()):
            call, position, _, _ = terms[index]
            target, source = int(row.visit_target[n]), int(row.visit_source[n])
            path = [k for k in range(row.tokens) if k <= target < ends[k]]
            prefix = call.sequence[: len(call.prompt_ids) + position + 1]
            assert [ids[k] for k in path] == list(prefix), "sees its own history, nothing else"
            assert row.position_ids[0, path].tolist() == list(range(len(prefix)))
            assert path[-2] == source
            assert int(row.action_ids[row.visit_action[n]]) == prefix[-1]
            assert float(row.weights[n]) == visits.weights[index]
        assert len(set(row.action_target.tolist())) == len(row.action_target)
        seen += row.visit_index.tolist()
    assert sorted(seen) == list(range(len(terms))), "each visit in one row"
    assert len(rows) > 1 or rows[0].tokens == len(tree.tokens)


def forked() -> tuple[PrefixTree, dict[str, float]]:
    first = captured(0, [1], [2, 3], rollout="a")
    group = [
        rollout_of([first, captured(1, [1, 2, 3, 4], [5], rollout="a")], rollout="a"),
        rollout_of([first, captured(1, [1, 2, 3, 4], [6, 7, 8], rollout="b")], rollout="b"),
    ]
    return PrefixTree.from_rollouts(group), {"a": 1.0, "b": 0.5}


def test_a_shared_call_has_one_visit_with_the_mean_advantage() -> None:
    tree, advantages = forked()
    visits = visits_of([tree], advantages, aggregation="rollout")
    assert visits.advantages.tolist() == [0.75, 0.75, 1.0, 0.5, 0.5, 0.5]
    # Rollout a has 2 half tokens and 1 whole one, b has 2 half ones and 3.
    a, b = 1 / (2 * 2), 1 / (2 * 4)
    assert visits.weights.tolist() == pytest.approx([(a + b) / 2] * 2 + [a] + [b] * 3)
    assert visits.weights.sum() == pytest.approx(1.0)
    assert visits_of([tree], {"b": 1.0}).skipped_calls == 1


def test_branches_do_not_multiply_a_shared_tokens_weight() -> None:
    first = captured(0, [1], [2, 3], rollout="r0")
    for branches in (1, 2, 7):
        names = [f"r{n}" for n in range(branches)]
        tree = PrefixTree.from_rollouts(
            [
                rollout_of([first, captured(1, [1, 2, 3, n], [5], rollout=name)], rollout=name)
                for n, name in enumerate(names)
            ]
        )
        visits = visits_of([tree], dict.fromkeys(names, 1.0), aggregation="token")
        assert len(visits) == 2 + branches
        assert visits.weights[0] == pytest.approx(1 / (2 + branches))


def test_a_row_holds_only_what_its_visits_need() -> None:
    tree = PrefixTree.from_rollouts(
        [
            rollout_of([captured(0, [1, 2], [3], rollout="a")], rollout="a"),
            rollout_of([captured(0, [1, 2], [4, 4, 4], rollout="b")], rollout="b"),
        ]
    )
    (row,) = pack([tree], visits_of([tree], {"a": 1.0}))
    assert row.input_ids.tolist() == [[1, 2, 3]]


def test_bad_input_is_named() -> None:
    tree, advantages = forked()
    visits = visits_of([tree], advantages)
    with pytest.raises(ConfigError, match="a path of 7 tokens exceeds token_budget 6"):
        pack([tree], visits, 6)
    with pytest.raises(ConfigError, match="a sequence of 7 tokens exceeds token_budget 6"):
        pack_calls([tree], visits, 6)
    with pytest.raises(ConfigError, match="no call to train on"):
        visits_of([tree], {})
    with pytest.raises(ConfigError, match="in two trees"):
        visits_of([tree, tree], advantages)
    with pytest.raises(ConfigError, match="advantages must be finite"):
        visits_of([tree], {"a": math.nan})
    with pytest.raises(ConfigError, match="expected 6 advantages"):
        visits.with_advantages(np.zeros(3))
    for wrong in ({"aggregation": "mean"}, {"aggregation": "constant"}, {"constant": 3.0}):
        with pytest.raises(ConfigError, match="aggregation"):
            visits_of([tree], advantages, **wrong)  # type: ignore[arg-type]


def test_token_level_advantages_replace_the_rollouts() -> None:
    tree, advantages = forked()
    visits = visits_of([tree], advantages).with_advantages(np.arange(6.0))
    (row,) = pack([tree], visits)
    assert row.advantages.tolist() == visits.advantages[row.visit_index.numpy()].tolist()


def test_frozen_logprobs_come_back_in_the_order_of_the_visits() -> None:
    tree, advantages = forked()
    visits: Visits = visits_of([tree], advantages)
    policy = model("llama")
    whole = frozen_logprobs(policy, pack([tree], visits))
    cut = frozen_logprobs(policy, pack([tree], visits, 7))
    calls = frozen_logprobs(policy, pack_calls([tree], visits))
    assert torch.allclose(whole, cut, rtol=1e-12) and torch.allclose(whole, calls, rtol=1e-12)
    (row,) = pack([tree], visits)
    assert not whole.requires_grad
    moved = row.with_old_logprobs(whole).to("cpu", torch.float32)
    assert moved.old_logprobs is not None and moved.old_logprobs.dtype == torch.float32
    assert moved.input_ids.dtype == torch.int64


def test_metrics_of_rows_merge_into_those_of_the_update() -> None:
    tree, advantages = forked()
    visits = visits_of([tree], advantages)
    policy = model("llama")

    def metrics(rows: list[PackedBatch]) -> LossMetrics:
        old = frozen_logprobs(policy, rows) - 0.3
        parts = []
        for row in rows:
            row = row.with_old_logprobs(old)
            assert row.old_logprobs is not None
            scores = score(policy, row)
            _, part = policy_loss(
                scores.logprobs,
                row.old_logprobs,
                row.behaviour_logprobs,
                row.advantages,
                row.weights,
                entropy=scores.entropy,
            )
            parts.append(part)
        return LossMetrics.merge(parts)

    whole, cut = metrics(pack([tree], visits)), metrics(pack([tree], visits, 7))
    assert whole.visits == cut.visits == 6
    for name in ("loss", "ratio", "clip_fraction", "approx_kl", "entropy", "importance"):
        assert getattr(whole, name) == pytest.approx(getattr(cut, name)), name
