from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from tree_cases import captured, long_chain, rollout_of, rollouts

from clawgym_env.calls import Outcome, Rollout
from clawgym_env.errors import CaptureError, ConfigError
from clawgym_env.tree_building import build_trie
from clawgym_env.tree_export import trajectories
from clawgym_env.tree_rules import TreeRules
from clawgym_env.tree_text import tree_text
from clawgym_env.trees import PrefixTree


def excluded(tree: PrefixTree) -> list[str | None]:
    return [call.excluded for call in tree.calls]


def test_a_conversation_is_one_node_and_every_reply_is_an_action() -> None:
    tree = PrefixTree.from_calls([captured(0, [1, 2], [3, 4]), captured(1, [1, 2, 3, 4, 5], [6])])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert tree.trie.nodes == 1
    assert tree.action_mask.tolist() == [False, False, True, True, False, True]
    assert tree.depth.tolist() == [0, 1, 2, 3, 4, 5]
    assert tree.predecessor.tolist() == [-1, 0, 1, 2, 3, 4]
    assert tree.calls[1].parent == 0 and tree.calls[1].extends
    stats = tree.stats()
    assert (stats.unique_tokens, stats.call_tokens) == (6, 10)
    assert stats.ideal_ratio == 10 / 6
    assert stats.extension_rate == 1.0


def test_a_fork_splits_a_node_and_the_larger_branch_comes_first() -> None:
    tree = PrefixTree.from_calls(
        [captured(0, [1, 2, 3], [4]), captured(1, [1, 2, 8], [9, 9, 9]), captured(2, [7], [7])]
    )
    assert tree.tokens.tolist() == [1, 2, 8, 9, 9, 9, 3, 4, 7, 7]
    assert tree.subtree_end.tolist() == [8, 8, 6, 6, 6, 6, 8, 8, 10, 10]
    assert tree.depth.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 0, 1]
    assert tree.predecessor.tolist() == [-1, 0, 1, 2, 3, 4, 1, 6, -1, 8]
    assert tree.trie.node_parent.tolist() == [-1, 0, 0, -1]
    assert [tree.path(call).tolist() for call in range(3)] == [
        [0, 1, 6, 7],
        [0, 1, 2, 3, 4, 5],
        [8, 9],
    ]
    stats = tree.stats()
    assert (stats.branches, stats.leaves, stats.depth, stats.roots) == (1, 3, 6, 3)


def test_what_another_call_has_as_context_one_call_has_sampled() -> None:
    tree = PrefixTree.from_rollouts(
        [
            rollout_of([captured(0, [1], [2, 3], rollout="a")], rollout="a"),
            rollout_of([captured(0, [1], [2, 4], rollout="b")], rollout="b"),
            rollout_of([captured(0, [1, 2, 3], [5], rollout="c")], rollout="c"),
        ]
    )
    assert tree.tokens.tolist() == [1, 2, 3, 5, 4]
    assert tree.action_mask.tolist() == [False, True, True, True, True]
    assert tree.reply_slot.tolist() == [1, 2, 1, 4, 3]
    assert [call.parent for call in tree.calls] == [None, None, None], "parents stay in the rollout"


def test_a_root_after_the_first_is_spawned_by_the_call_delivered_last() -> None:
    calls = [
        captured(0, [1], [2]),
        captured(1, [1, 2, 3], [4]),
        captured(2, [8], [8], kind="auxiliary"),
        captured(3, [9], [9]),
        replace(captured(4, [1, 2, 3, 4, 5], [6]), delivered=False),
        captured(5, [7], [7]),
    ]
    tree = PrefixTree.from_calls(calls)
    assert [call.spawn_parent for call in tree.calls] == [None, None, None, 1, None, 3]
    assert [call.parent for call in tree.calls] == [None, 0, None, None, 1, None]


def test_a_parallel_call_that_ended_later_spawned_nothing() -> None:
    slow = captured(1, [2], [2], time=1.0)
    slow = replace(slow, completion=replace(slow.completion, finished_at=99.0))
    tree = PrefixTree.from_calls([captured(0, [1], [1]), slow, captured(2, [3], [3])])
    assert tree.calls[2].spawn_parent == 0


def test_reasons_for_exclusion() -> None:
    calls = [
        captured(0, [1], [2]),
        captured(1, None, None),
        captured(2, [1, 2], []),
        captured(3, [1, 2, 3], [4], logprobs=None),
        captured(4, [5], [5], kind="auxiliary"),
        captured(5, [1, 2, 6], [7], delivered=False),
        captured(6, [1, 2, 6], [8], delivered=None),
        captured(7, [1, 2, 6], [9], delivered=None),
        captured(8, [1, 2, 6, 9], [1]),
    ]
    tree = PrefixTree.from_calls(calls)
    assert excluded(tree) == [
        None,
        "no ids",
        "empty",
        "unsampled",
        "auxiliary",
        "undelivered",
        "undelivered",
        None,
        None,
    ]
    assert tree.tokens.tolist() == [1, 2, 6, 9, 1]
    generous = PrefixTree.from_calls(calls, TreeRules(auxiliary=True, unsampled=True))
    assert excluded(generous)[3:5] == [None, None]
    assert np.isnan(generous.reply_logprobs[generous.reply(3)]).all()
    assert generous.stats().excluded == {"no ids": 1, "empty": 1, "undelivered": 2}


def retried() -> list[object]:
    return [
        captured(0, [1], [2]),
        captured(1, [1, 2, 3], [4]),
        captured(2, [1, 2, 3, 4, 5], [6, 6, 6, 6]),
        captured(3, [1, 2, 3], [7]),
        captured(4, [1, 2, 3, 7, 5], [8]),
        captured(5, [1, 2, 3, 7, 5, 8, 5], [9]),
        captured(6, [1, 2, 5], [5]),
    ]


@pytest.mark.parametrize(
    ("rule", "dead"),
    [("superseded", [1, 2]), ("segment", [1, 2, 6]), ("keep", [])],
)
def test_dead_leaves(rule: str, dead: list[int]) -> None:
    tree = PrefixTree.from_calls(retried(), TreeRules(dead_leaves=rule))  # type: ignore[arg-type]
    assert [n for n, call in enumerate(tree.calls) if call.excluded == "superseded"] == dead
    assert tree.stats().included == 7 - len(dead)


def test_of_two_equal_retries_the_later_lives_and_rollouts_do_not_compete() -> None:
    tree = PrefixTree.from_calls([captured(0, [1], [2]), captured(1, [1], [3])])
    assert excluded(tree) == ["superseded", None]
    group = PrefixTree.from_rollouts(
        [rollout_of([captured(0, [1], [2], rollout=name)], rollout=name) for name in ("a", "b")]
    )
    assert excluded(group) == [None, None]
    assert group.stats().visits == 2 and group.stats().action_tokens == 1


def test_a_call_that_forked_rollouts_share_is_one_call() -> None:
    first = captured(0, [1], [2], rollout="a")
    group = PrefixTree.from_rollouts(
        [
            rollout_of([first, captured(1, [1, 2, 3], [4], rollout="a")], rollout="a"),
            rollout_of([first, captured(1, [1, 2, 3], [5], rollout="b")], rollout="b"),
        ]
    )
    assert [call.rollouts for call in group.calls] == [(0, 1), (0,), (1,)]
    assert [call.parent for call in group.calls] == [None, 0, 0]
    assert excluded(group) == [None, None, None]
    assert group.stats().visits == 3


def test_bad_input_is_named() -> None:
    with pytest.raises(CaptureError, match=r"'r0/c0' has 2 sampled ids and 1 logprobs"):
        PrefixTree.from_calls([captured(0, [1], [2, 3], logprobs=[-1.0])])
    with pytest.raises(CaptureError, match="NaN or infinite at reply position 1"):
        PrefixTree.from_calls([captured(0, [1], [2, 3], logprobs=[-1.0, math.nan])])
    with pytest.raises(ConfigError, match="'r0' occurs more than once"):
        PrefixTree.from_rollouts([rollout_of([]), rollout_of([])])
    with pytest.raises(ConfigError, match="is not in the tree: auxiliary"):
        PrefixTree.from_calls([captured(0, [1], [2], kind="auxiliary")]).path(0)


def test_an_empty_tree_is_a_tree() -> None:
    tree = PrefixTree.from_rollouts([Rollout("r", "t", "react", Outcome.COMPLETED)])
    assert tree.stats().unique_tokens == 0 and tree.stats().ideal_ratio == 1.0
    assert len(tree.depth) == len(tree.action_mask) == 0
    assert list(trajectories(tree)) == []
    assert "0 of 0 calls" in tree_text(tree)


def test_round_trip_through_json_and_arrays() -> None:
    tree = PrefixTree.from_calls(retried())
    data = tree.to_dict()
    again = PrefixTree.from_dict(data)
    text = json.dumps(data, default=lambda array: array.tolist())
    from_json = PrefixTree.from_dict(json.loads(text))
    for other in (again, from_json):
        assert other.calls == tree.calls and other.rollouts == tree.rollouts
        for name in ("tokens", "depth", "subtree_end", "reply_slot", "action_mask"):
            ours, theirs = getattr(tree, name), getattr(other, name)
            assert ours.dtype == theirs.dtype and (ours == theirs).all()
        assert np.array_equal(other.reply_logprobs, tree.reply_logprobs, equal_nan=True)
        assert tree_text(other) == tree_text(tree)
    with pytest.raises(CaptureError, match="tree format 99 is not 1"):
        PrefixTree.from_dict({**data, "format": 99})
    with pytest.raises(CaptureError, match="lacks tokens"):
        PrefixTree.from_dict({k: v for k, v in data.items() if k != "tokens"})


def test_text_shows_every_call_and_indents_only_at_forks() -> None:
    calls = retried()
    calls[0] = captured(0, [1], [2], tools=("bash", "finish"))
    calls[6] = captured(6, [1, 2, 5], [5], drift="turn 1: content differs")
    calls.append(captured(7, [9], [9], delivered=False))
    tree = PrefixTree.from_rollouts([rollout_of(calls, 0.5)])  # type: ignore[arg-type]
    text = tree_text(tree, decode=lambda ids: "ids " + " ".join(map(str, ids)))
    lines = text.splitlines()
    assert lines[0] == "rollout r0 · t · react · completed · reward 0.5"
    assert lines[1] == "├─ #0 main · 1 (+1) → 1 · stop · calls bash, finish"
    assert lines[2].strip(" │") == "ids 2"
    assert lines[3].startswith("│  ├─ #1 main · 3 (+1) → 1 · extends · stop · ✗ superseded")
    assert lines[5].startswith("│  │  #2 main"), "what alone continues a call is not indented"
    assert any("#6" in line and "drift: turn 1: content differs" in line for line in lines)
    assert any("#7" in line and "✗ undelivered" in line and "spawned" in line for line in lines)
    assert "5 of 8 calls (2 superseded, 1 undelivered left out)" in lines[-1]
    assert all(text.count(f"#{n} main") == 1 for n in range(8))


@settings(max_examples=150, deadline=None)
@given(rollouts())
def test_tree_against_the_naive_construction(group: list[Rollout]) -> None:
    tree = PrefixTree.from_rollouts(group)
    sequences = {call.call.call_id: call.sequence for rollout in group for call in rollout.calls}
    prefixes = {
        sequences[tree.calls[n].call_id][: length + 1]
        for n in tree.included
        for length in range(tree.calls[n].tokens)
    }
    assert len(tree.tokens) == len(prefixes), "one slot for each distinct prefix"

    sampled: dict[tuple[int, ...], int] = {}
    for number in tree.included:
        call = tree.calls[number]
        slots = tree.path(number)
        sequence = sequences[call.call_id]
        assert tree.tokens[slots].tolist() == list(sequence)
        assert tree.depth[slots].tolist() == list(range(len(sequence)))
        assert tree.predecessor[slots].tolist() == [-1, *slots[:-1].tolist()]
        assert tree.reply_slot[tree.reply(number)].tolist() == slots[call.prompt_tokens :].tolist()
        for end in range(call.prompt_tokens, call.tokens):
            prefix = sequence[: end + 1]
            sampled[prefix] = int(slots[end])
        visible = [k for k in range(len(tree.tokens)) if k <= slots[-1] < tree.subtree_end[k]]
        assert visible == slots.tolist(), "the last token sees its path and nothing else"
    assert set(np.flatnonzero(tree.action_mask).tolist()) == set(sampled.values())

    for number, call in enumerate(tree.calls):
        options = [
            (len(sequences[other.call_id]), other.delivered is not False, n)
            for n, other in enumerate(tree.calls[:number])
            if other.rollouts == call.rollouts
            and sequences[call.call_id][: call.prompt_tokens][: other.tokens]
            == sequences[other.call_id]
        ]
        assert call.parent == (max(options)[2] if options else None)


@settings(max_examples=60, deadline=None)
@given(rollouts())
def test_linear_export_has_each_visit_once(group: list[Rollout]) -> None:
    tree = PrefixTree.from_rollouts(group)
    exported: list[tuple[str, int, float]] = []
    for sample in trajectories(tree):
        assert len(sample.token_ids) == len(sample.action_mask) == len(sample.logprobs)
        assert (np.isnan(sample.logprobs) == ~sample.action_mask).all()
        exported += [
            (sample.rollout_id, int(t), float(lp))
            for t, lp in zip(
                sample.token_ids[sample.action_mask],
                sample.logprobs[sample.action_mask],
                strict=True,
            )
        ]
    expected = [
        (tree.rollouts[tree.calls[n].rollouts[0]].rollout_id, int(t), float(lp))
        for n in tree.included
        for t, lp in zip(
            tree.reply_tokens[tree.reply(n)], tree.reply_logprobs[tree.reply(n)], strict=True
        )
    ]
    assert sorted(exported) == sorted(expected)


def test_a_long_rollout_is_one_node_and_its_arrays_are_linear() -> None:
    tree = PrefixTree.from_calls(long_chain(200, 200, 100))
    assert tree.trie.nodes == 1 and len(tree.tokens) == 60_000
    assert tree.stats().ideal_ratio == pytest.approx(100.5)


def test_the_trie_of_prefixes_and_duplicates() -> None:
    arrays = [np.array(s, dtype=np.int32) for s in ([1, 2, 3], [1, 2], [1, 2, 3], [], [1, 4])]
    trie = build_trie(arrays)
    assert trie.tokens.tolist() == [1, 2, 3, 4]
    assert trie.sequence_end.tolist() == [2, 1, 2, -1, 3]
    assert trie.slots(int(trie.sequence_node[1]), 1, 2).tolist() == [1]
