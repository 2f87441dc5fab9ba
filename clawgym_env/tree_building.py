"""Builds the compressed trie of token sequences, and tells how calls continue one another.

Works on plain numpy arrays. It knows nothing of rewards, advantages, models or how a tree is shown.
No Python object is made per token: sequences are compared a whole edge at a time, so building takes
time linear in the tokens read. Invariant: nodes and tokens come out in depth-first order, the
largest child first, so that a node's subtree, and the heaviest path below it, are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
TokenIds = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Trie:
    """A laid-out trie; *slot* means the index of a token in depth-first order.

    Attributes:
        tokens: (T,) int32 token ids.
        node_start: (N + 1,) int64, node ``n`` holds slots ``node_start[n]:node_start[n + 1]``.
        node_parent: (N,) int64, -1 at the top.
        node_depth: (N,) int64, depth of the node's first token, 0 at the top.
        node_subtree_end: (N,) int64, one past the last slot of the node's subtree.
        sequence_end: (S,) int64, the slot of each sequence's last token, -1 for an empty sequence.
        sequence_node: (S,) int64, the node of that slot, -1 for an empty sequence.
    """

    tokens: TokenIds
    node_start: Ints
    node_parent: Ints
    node_depth: Ints
    node_subtree_end: Ints
    sequence_end: Ints
    sequence_node: Ints

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.node_parent)

    def slots(self, node: int, start: int, stop: int) -> Ints:
        """Slots of depths ``start`` to ``stop`` (excluded) on the path from the top to ``node``.

        Returns:
            (stop - start,) int64.
        """
        pieces: list[Ints] = []
        while node >= 0 and stop > start:
            depth = int(self.node_depth[node])
            if stop > depth:
                first = int(self.node_start[node]) - depth
                low = max(start, depth)
                pieces.append(np.arange(first + low, first + stop, dtype=np.int64))
                stop = low
            node = int(self.node_parent[node])
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, dtype=np.int64)


class _Node:
    """An edge of the growing trie: ``sequence[depth:stop]`` and what follows it."""

    __slots__ = ("children", "depth", "order", "parent", "sequence", "stop")

    def __init__(self, sequence: TokenIds, depth: int, stop: int, parent: _Node | None) -> None:
        self.sequence = sequence
        self.depth = depth
        self.stop = stop
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.order = -1


def build_trie(sequences: Sequence[TokenIds]) -> Trie:
    """The compressed trie of ``sequences``.

    Args:
        sequences: One int32 array a sequence; duplicates and prefixes of one another are fine.

    Returns:
        The trie in depth-first order.
    """
    root = _Node(np.empty(0, dtype=np.int32), 0, 0, None)
    ends = [_insert(root, sequence) for sequence in sequences]
    return _lay_out(root, ends, [len(sequence) for sequence in sequences])


def _insert(root: _Node, sequence: TokenIds) -> _Node:
    """Adds one sequence and returns the node in which it ends."""
    node = root
    position = 0
    while position < len(sequence):
        child = node.children.get(int(sequence[position]))
        if child is None:
            if node is not root and not node.children:
                # A leaf that is extended stays one node; the longer array holds the same prefix.
                node.sequence, node.stop = sequence, len(sequence)
                return node
            child = _Node(sequence, position, len(sequence), node)
            node.children[int(sequence[position])] = child
            return child
        stop = min(child.stop, len(sequence))
        differs = child.sequence[position:stop] != sequence[position:stop]
        first = int(differs.argmax())
        shared = position + (first if differs[first] else len(differs))
        if shared == len(sequence):
            return child
        if shared < child.stop:
            node = _split(child, shared)
        else:
            node = child
        position = shared
    return node


def _split(node: _Node, depth: int) -> _Node:
    """Cuts ``node`` at ``depth``; the upper part is new, the lower one keeps its identity."""
    parent = node.parent
    assert parent is not None
    upper = _Node(node.sequence, node.depth, depth, parent)
    parent.children[int(node.sequence[node.depth])] = upper
    upper.children[int(node.sequence[depth])] = node
    node.depth = depth
    node.parent = upper
    return upper


def _lay_out(root: _Node, ends: Sequence[_Node], lengths: Sequence[int]) -> Trie:
    discovered: list[_Node] = []
    pending = [root]
    while pending:
        node = pending.pop()
        discovered.append(node)
        pending.extend(node.children.values())
    size: dict[int, int] = {}
    for node in reversed(discovered):
        below = sum(size[id(child)] for child in node.children.values())
        size[id(node)] = node.stop - node.depth + below

    ordered: list[_Node] = []
    pending = [root]
    while pending:
        node = pending.pop()
        node.order = len(ordered) - 1
        ordered.append(node)
        # Sorting is stable, so equal subtrees keep the order in which they were first seen.
        pending.extend(reversed(sorted(node.children.values(), key=lambda child: -size[id(child)])))
    nodes = ordered[1:]

    node_start = np.zeros(len(nodes) + 1, dtype=np.int64)
    np.cumsum([node.stop - node.depth for node in nodes], out=node_start[1:])
    node_parent = np.array([n.parent.order if n.parent else -1 for n in nodes], dtype=np.int64)
    node_depth = np.array([node.depth for node in nodes], dtype=np.int64)
    sizes = np.array([size[id(node)] for node in nodes], dtype=np.int64)
    edges = [node.sequence[node.depth : node.stop] for node in nodes]

    sequence_node = np.full(len(ends), -1, dtype=np.int64)
    sequence_end = np.full(len(ends), -1, dtype=np.int64)
    for index, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        if length == 0:
            continue
        node = end
        # Later splits may have moved the sequence's end into a part above the node it ended in.
        while node.depth >= length and node.parent is not None:
            node = node.parent
        sequence_node[index] = node.order
        sequence_end[index] = node_start[node.order] + length - 1 - node.depth
    return Trie(
        tokens=np.concatenate(edges) if edges else np.empty(0, dtype=np.int32),
        node_start=node_start,
        node_parent=node_parent,
        node_depth=node_depth,
        node_subtree_end=node_start[:-1] + sizes,
        sequence_end=sequence_end,
        sequence_node=sequence_node,
    )


def find_parents(
    trie: Trie,
    prompt_lengths: Sequence[int],
    owners: Sequence[Sequence[int]],
    preferred: Sequence[bool],
) -> list[int | None]:
    """For each sequence the earlier one, of a common owner, that is its prompt's longest prefix.

    Args:
        trie: A trie over the sequences (prompt and reply of each call), in arrival order.
        prompt_lengths: Length of each sequence's prompt.
        owners: The rollouts that each sequence belongs to.
        preferred: Which of two equal candidates to take: a delivered one before another.

    Returns:
        The parent's index, or None for a root.
    """
    count = len(prompt_lengths)
    lengths = np.zeros(count, dtype=np.int64)
    lasts = trie.sequence_end
    subtree_ends = np.zeros(count, dtype=np.int64)
    present = trie.sequence_node >= 0
    nodes = trie.sequence_node[present]
    lengths[present] = trie.node_depth[nodes] + lasts[present] - trie.node_start[nodes] + 1
    subtree_ends[present] = trie.node_subtree_end[nodes]
    rank = lengths * 2 + np.asarray(preferred, dtype=np.int64)

    of_owner: dict[int, list[int]] = {}
    parents: list[int | None] = []
    for index in range(count):
        earlier = sorted({other for owner in owners[index] for other in of_owner.get(owner, ())})
        for owner in owners[index]:
            of_owner.setdefault(owner, []).append(index)
        candidates = np.asarray(earlier, dtype=np.int64)
        if not len(candidates) or prompt_lengths[index] == 0:
            parents.append(None)
            continue
        end = lasts[index]
        # `end` closes the whole sequence; a prefix of it no longer than the prompt is one of the
        # prompt's own, so the prompt's end need not be located.
        above = (
            (lengths[candidates] > 0)
            & (lasts[candidates] <= end)
            & (end < subtree_ends[candidates])
            & (lengths[candidates] <= prompt_lengths[index])
        )
        candidates = candidates[above]
        if len(candidates):
            # Among equals the latest: `argmax` of the reversed ranks finds it.
            best = len(candidates) - 1 - int(rank[candidates][::-1].argmax())
            parents.append(int(candidates[best]))
        else:
            parents.append(None)
    return parents
