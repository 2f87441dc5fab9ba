"""PackedBatch: trees laid side by side in rows of a token budget, ready for one forward pass each.

Knows trees and visits, and nothing of models or losses. A tree that exceeds the budget is cut into
parts that repeat the path they share; every visit lies in exactly one part, so the sum of the rows'
losses, and its gradient, do not depend on the cut. Invariant: the logits that predict a visited
token are at its predecessor on the path, which is in the same row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.layout import TreeLayout
from agents.visits import Ints, Visits
from clawgym_env.errors import ConfigError
from clawgym_env.trees import PrefixTree


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One row of T tokens with A distinct action tokens and V visits to them.

    Attributes:
        input_ids: (1, T) int64, depth-first order, trees one after another.
        position_ids: (1, T) int64, depth on the path.
        layout: Which token sees which.
        action_source: (A,) int64 index of the token whose logits predict the action.
        action_target: (A,) int64 index of the action token itself.
        action_ids: (A,) int64 its id.
        visit_action: (V,) int64 index of each visit's action.
        visit_index: (V,) int64 index of each visit in the update's ``Visits``.
        visit_rollout: (V,) int64 index into ``Visits.rollout_ids``.
        advantages: (V,) float.
        behaviour_logprobs: (V,) float, NaN where not sampled.
        weights: (V,) float; they sum to at most 1 over the rows of an update.
        policy_version: (V,) int64.
        old_logprobs: (V,) float of the proximal policy, or None until they are computed.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: TreeLayout
    action_source: Tensor
    action_target: Tensor
    action_ids: Tensor
    visit_action: Tensor
    visit_index: Tensor
    visit_rollout: Tensor
    advantages: Tensor
    behaviour_logprobs: Tensor
    weights: Tensor
    policy_version: Tensor
    old_logprobs: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens in the row."""
        return self.layout.tokens

    @property
    def subtree_end(self) -> Tensor:
        """(T,) int64: token ``k`` is visible to ``q`` iff ``k <= q < subtree_end[k]``."""
        return torch.from_numpy(self.layout.subtree_end)

    @property
    def visit_source(self) -> Tensor:
        """(V,) int64 index of the token whose logits predict each visit."""
        return self.action_source[self.visit_action]

    @property
    def visit_target(self) -> Tensor:
        """(V,) int64 index of each visited token."""
        return self.action_target[self.visit_action]

    def with_old_logprobs(self, old_logprobs: Tensor) -> PackedBatch:
        """The row with the proximal policy's logprobs, given for all of the update's visits."""
        own = old_logprobs[self.visit_index.to(old_logprobs.device)]
        return replace(self, old_logprobs=own.to(self.weights).detach())

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> PackedBatch:
        """The row on ``device``, its floats (float64 as packed) as ``dtype``."""
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                kind = dtype if value.is_floating_point() else None
                moved[name] = value.to(device=device, dtype=kind)
        return replace(self, **moved)


def pack(
    trees: Sequence[PrefixTree], visits: Visits, token_budget: int | None = None
) -> list[PackedBatch]:
    """Rows that hold every visit once.

    Only tokens that a visit needs are packed. Parts of trees go into rows largest first, each into
    the first row with room.

    Args:
        trees: The trees that ``visits`` was made from.
        visits: What to train on.
        token_budget: Most tokens in a row; None gives each tree a row of its own.

    Returns:
        Rows, in CPU memory, floats in float64.

    Raises:
        ConfigError: A single path is longer than the budget.
    """
    parts: list[_Part] = []
    for number, tree in enumerate(trees):
        chosen = np.flatnonzero(visits.tree == number)
        if len(chosen):
            parts.extend(_tree_parts(tree, visits, chosen, token_budget))
    return _rows(parts, visits, token_budget)


def pack_calls(
    trees: Sequence[PrefixTree], visits: Visits, token_budget: int | None = None
) -> list[PackedBatch]:
    """The same without sharing: each call is a sequence of its own, prompt and reply.

    What training call by call computes, for tests and benchmarks; arguments, result and errors as
    ``pack``, with None giving each call a row of its own.
    """
    parts: list[_Part] = []
    key = visits.tree * (1 + int(visits.call.max(initial=0))) + visits.call
    for chosen in np.split(np.arange(len(visits)), np.flatnonzero(np.diff(key)) + 1):
        tree = trees[int(visits.tree[chosen[0]])]
        slots = tree.path(int(visits.call[chosen[0]]))
        parts.append(_Part(tree, slots, np.full(len(slots), len(slots)), chosen))
    return _rows(parts, visits, token_budget)


@dataclass(frozen=True, eq=False)
class _Part:
    """A piece of a tree: its slots in order, subtree ends within it, and the visits it carries."""

    tree: PrefixTree
    slots: Ints
    ends: Ints
    visits: Ints


def _tree_parts(
    tree: PrefixTree, visits: Visits, chosen: Ints, token_budget: int | None
) -> list[_Part]:
    trie = tree.trie
    node_of_visit = tree.slot_node[visits.slot[chosen]]
    kept = _kept_tokens(tree, visits.slot[chosen])
    has_child = np.zeros(trie.nodes, dtype=np.bool_)
    used = np.flatnonzero(kept)
    parents = trie.node_parent[used]
    has_child[parents[parents >= 0]] = True

    groups: list[list[int]] = [[]]
    members: set[int] = set()
    size = 0
    for leaf in used[~has_child[used]].tolist():
        path: list[int] = []
        node = leaf
        while node >= 0:
            path.append(node)
            node = int(trie.node_parent[node])
        cost = int(sum(kept[node] for node in path if node not in members))
        if token_budget is not None and members and size + cost > token_budget:
            groups.append([])
            members, size = set(), 0
            cost = int(kept[path].sum())
        if token_budget is not None and cost > token_budget:
            raise ConfigError(
                f"a path of {cost} tokens exceeds token_budget {token_budget}; raise the budget to "
                f"at least {cost}, or limit the tokens of a rollout"
            )
        groups[-1].extend(node for node in reversed(path) if node not in members)
        members.update(path)
        size += cost

    parts: list[_Part] = []
    taken = np.zeros(trie.nodes, dtype=np.bool_)
    for nodes in groups:
        # Leaves come in depth-first order, and so do the nodes that each one adds.
        starts = trie.node_start[nodes]
        slots = np.concatenate(
            [np.arange(start, start + kept[n]) for start, n in zip(starts, nodes, strict=True)]
        )
        below = {node: int(kept[node]) for node in nodes}
        for node in reversed(nodes):
            parent = int(trie.node_parent[node])
            if parent >= 0:
                below[parent] += below[node]
        first = np.concatenate(([0], np.cumsum(kept[nodes])[:-1]))
        ends = np.repeat(first + np.array([below[node] for node in nodes]), kept[nodes])
        new = np.zeros(trie.nodes, dtype=np.bool_)
        new[nodes] = True
        new &= ~taken
        taken[nodes] = True
        parts.append(_Part(tree, slots, ends, chosen[new[node_of_visit]]))
    return parts


def _kept_tokens(tree: PrefixTree, slots: Ints) -> Ints:
    """(N,) how many of each node's tokens lead to one of ``slots``."""
    trie = tree.trie
    kept = np.zeros(trie.nodes, dtype=np.int64)
    nodes = tree.slot_node[slots]
    np.maximum.at(kept, nodes, slots - trie.node_start[nodes] + 1)
    sizes = np.diff(trie.node_start)
    for node in range(trie.nodes - 1, -1, -1):
        parent = int(trie.node_parent[node])
        if kept[node] and parent >= 0:
            kept[parent] = sizes[parent]
    return kept


def _rows(parts: Sequence[_Part], visits: Visits, token_budget: int | None) -> list[PackedBatch]:
    if token_budget is None:
        return [_row([part], visits) for part in parts]
    rows: list[list[_Part]] = []
    room: list[int] = []
    for part in sorted(parts, key=lambda part: -len(part.slots)):
        size = len(part.slots)
        if size > token_budget:
            raise ConfigError(
                f"a sequence of {size} tokens exceeds token_budget {token_budget}; raise the "
                f"budget to at least {size}, or limit the tokens of a rollout"
            )
        fits = next((n for n, left in enumerate(room) if left >= size), None)
        if fits is None:
            rows.append([part])
            room.append(token_budget - size)
        else:
            rows[fits].append(part)
            room[fits] -= size
    return [_row(row, visits) for row in rows]


def _row(parts: Sequence[_Part], visits: Visits) -> PackedBatch:
    ids, positions, ends = [], [], []
    sources, targets, actions, indices = [], [], [], []
    offset = 0
    action_count = 0
    for part in parts:
        tree = part.tree
        place = np.full(len(tree.tokens), -1, dtype=np.int64)
        place[part.slots] = offset + np.arange(len(part.slots))
        ids.append(tree.tokens[part.slots])
        positions.append(tree.depth[part.slots])
        ends.append(offset + part.ends)
        unique, action = np.unique(visits.slot[part.visits], return_inverse=True)
        targets.append(place[unique])
        sources.append(place[tree.predecessor[unique]])
        actions.append(action_count + action)
        indices.append(part.visits)
        offset += len(part.slots)
        action_count += len(unique)
    input_ids = np.concatenate(ids).astype(np.int64)
    target = np.concatenate(targets)
    index = np.concatenate(indices)
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids)[None],
        position_ids=torch.from_numpy(np.concatenate(positions))[None],
        layout=TreeLayout.of(np.concatenate(ends)),
        action_source=torch.from_numpy(np.concatenate(sources)),
        action_target=torch.from_numpy(target),
        action_ids=torch.from_numpy(input_ids[target]),
        visit_action=torch.from_numpy(np.concatenate(actions)),
        visit_index=torch.from_numpy(index),
        visit_rollout=torch.from_numpy(visits.rollout[index]),
        advantages=torch.from_numpy(visits.advantages[index]),
        behaviour_logprobs=torch.from_numpy(visits.behaviour_logprobs[index]),
        weights=torch.from_numpy(visits.weights[index]),
        policy_version=torch.from_numpy(visits.policy_version[index]),
    )
