"""A radix tree from token ids to the keys and values that a model computed for them.

It knows nothing of models, requests or weights: whoever changes the weights calls ``clear``.
Invariants: every edge's segment holds exactly its ids' positions; no two edges out of a node start
with the same id; ``tokens`` never exceeds ``capacity`` after an insert, least recently used leaves
going first. Segments are owned (cloned), never views of a live buffer. Not thread-safe.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from clawgym_env.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Segment:
    """Keys and values of consecutive positions.

    Attributes:
        keys: ``[layers, heads, n, key_dim]``.
        values: ``[layers, heads, n, value_dim]``.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __len__(self) -> int:
        return self.keys.shape[2]

    def narrow(self, start: int, stop: int) -> Segment:
        """The positions from ``start`` to ``stop``, exclusive, as a view."""
        return Segment(self.keys[:, :, start:stop], self.values[:, :, start:stop])

    def clone(self) -> Segment:
        """A copy that keeps no other memory alive."""
        return Segment(self.keys.clone(), self.values.clone())


@dataclass(eq=False, slots=True)
class _Node:
    ids: tuple[int, ...]
    segment: Segment
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    used: int = 0


class PrefixCache:
    """Keys and values of earlier sequences, found by their longest common prefix.

    Args:
        capacity: The most tokens to hold; 0 turns the cache off.

    Raises:
        ConfigError: The capacity is negative.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ConfigError(f"the prefix cache's capacity is 0 tokens or more; got {capacity}")
        self.capacity = capacity
        self.tokens = 0
        self._children: dict[int, _Node] = {}
        self._clock = 0

    def match(self, ids: Sequence[int]) -> list[Segment]:
        """The segments of the longest cached prefix of ``ids``, in order; they are views."""
        self._clock += 1
        found: list[Segment] = []
        for node, length in self._walk(tuple(ids)):
            node.used = self._clock
            found.append(node.segment.narrow(0, length))
        return found

    def insert(self, ids: Sequence[int], extract: Callable[[int, int], Segment]) -> None:
        """Hold the keys and values of ``ids``.

        Args:
            ids: The sequence, each of whose positions has been computed.
            extract: Gives an owned segment of positions ``start`` to ``stop``; it is asked at most
                once, for the part that is not held yet.
        """
        ids = tuple(ids)
        if not ids or len(ids) > self.capacity:
            return
        self._clock += 1
        parent: _Node | None = None
        held = 0
        for node, length in self._walk(ids):
            held += length
            # What is cut off below the shared part was not used, and keeps its age.
            parent = node if length == len(node.ids) else self._split(node, length)
            parent.used = self._clock
        if held < len(ids):
            leaf = _Node(ids[held:], extract(held, len(ids)), parent, used=self._clock)
            (self._children if parent is None else parent.children)[ids[held]] = leaf
            self.tokens += len(leaf.ids)
            self._evict()

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self._children = {}
        self.tokens = 0

    def _walk(self, ids: tuple[int, ...]) -> list[tuple[_Node, int]]:
        """The nodes along ``ids`` with how many of each one's ids match, at least one each."""
        path: list[tuple[_Node, int]] = []
        children, offset = self._children, 0
        while offset < len(ids) and (node := children.get(ids[offset])) is not None:
            length = common_prefix(node.ids, ids[offset : offset + len(node.ids)])
            path.append((node, length))
            if length < len(node.ids):
                break
            children, offset = node.children, offset + length
        return path

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut an edge in two and return the upper half."""
        upper = _Node(
            node.ids[:length], node.segment.narrow(0, length).clone(), node.parent, used=node.used
        )
        siblings = self._children if node.parent is None else node.parent.children
        siblings[upper.ids[0]] = upper
        node.segment = node.segment.narrow(length, len(node.ids)).clone()
        node.ids = node.ids[length:]
        node.parent = upper
        upper.children[node.ids[0]] = node
        return upper

    def _evict(self) -> None:
        if self.tokens <= self.capacity:
            return
        order = itertools.count()
        heap = [(n.used, next(order), n) for n in self._nodes() if not n.children]
        heapq.heapify(heap)
        while self.tokens > self.capacity:
            _, _, node = heapq.heappop(heap)
            parent = node.parent
            siblings = self._children if parent is None else parent.children
            del siblings[node.ids[0]]
            self.tokens -= len(node.ids)
            if parent is not None and not siblings:
                heapq.heappush(heap, (parent.used, next(order), parent))

    def _nodes(self) -> list[_Node]:
        nodes = list(self._children.values())
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids two sequences of one type share."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    # Slices compare at C speed, so halving beats a loop over the ids.
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
