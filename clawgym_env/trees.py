"""PrefixTree: the calls of one rollout or of a group, as one compressed tree of token ids.

A call has prompt ids ``p`` and sampled ids ``y``. The tree is the trie of all ``p + y`` that can be
trained on; a token is an action if some call sampled it at that place, and context otherwise. Calls
that cannot or should not be trained on stay in the call table with the reason. The tree knows
nothing of advantages, losses or tensors. Invariant: every sampled token of every included call has
exactly one slot (its index in depth-first order), and every slot lies below an included call's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clawgym_env.calls import CapturedCall, Rollout
from clawgym_env.errors import CaptureError, ConfigError
from clawgym_env.tree_building import Ints, TokenIds, Trie, build_trie, find_parents
from clawgym_env.tree_rules import TreeCall, TreeRollout, TreeRules, call_table

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
FORMAT = 1


@dataclass(frozen=True, slots=True)
class TreeStats:
    """What a tree amounts to.

    Attributes:
        rollouts: Rollouts in the tree.
        calls: Calls captured, excluded ones too.
        included: Calls that the tree holds.
        excluded: Number of excluded calls by reason.
        unique_tokens: Tokens in the tree.
        call_tokens: Tokens of the same calls taken one by one, prompts repeated.
        action_tokens: Tokens that some included call sampled.
        visits: Sampled tokens, one a call that sampled them.
        nodes: Nodes of the compressed trie.
        branches: Places where the tree forks.
        leaves: Nodes with nothing below.
        depth: Tokens on the longest path.
        roots: Calls that extend no earlier call.
        extension_rate: Share of the calls with ids, the first of each rollout apart, that extend
            an earlier call exactly; 1.0 where there are none.
        drift: Calls that continued an earlier call without extending it exactly.
    """

    rollouts: int
    calls: int
    included: int
    excluded: Mapping[str, int]
    unique_tokens: int
    call_tokens: int
    action_tokens: int
    visits: int
    nodes: int
    branches: int
    leaves: int
    depth: int
    roots: int
    extension_rate: float
    drift: int

    @property
    def ideal_ratio(self) -> float:
        """Tokens per-call training would process for each token of the tree; 1.0 when empty."""
        return self.call_tokens / self.unique_tokens if self.unique_tokens else 1.0


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """A compressed token trie with the visits of every call.

    Attributes:
        rollouts: The rollouts, in the order given.
        calls: Every captured call, in arrival order within each rollout.
        trie: The tokens of the included calls; its sequences are the calls, excluded ones empty.
        reply_start: (C + 1,) int64 bounds of each call's reply in the ``reply_*`` arrays.
        reply_tokens: (R,) int32 sampled ids, of excluded calls too.
        reply_logprobs: (R,) float64 behaviour logprobs in nats, NaN where not sampled.
        reply_slot: (R,) int64 slot of each sampled token, -1 where the call is excluded.
    """

    rollouts: tuple[TreeRollout, ...]
    calls: tuple[TreeCall, ...]
    trie: Trie
    reply_start: Ints
    reply_tokens: TokenIds
    reply_logprobs: Floats
    reply_slot: Ints

    @classmethod
    def from_calls(
        cls, calls: Sequence[CapturedCall], rules: TreeRules | None = None
    ) -> PrefixTree:
        """The tree of captured calls, grouped into rollouts by their ``rollout_id``.

        Raises:
            CaptureError: A call's ids and logprobs do not fit together.
        """
        by_rollout: dict[str, list[CapturedCall]] = {}
        for call in calls:
            by_rollout.setdefault(call.call.rollout_id, []).append(call)
        return cls._build(
            [TreeRollout(rollout_id) for rollout_id in by_rollout],
            list(by_rollout.values()),
            rules or TreeRules(),
        )

    @classmethod
    def from_rollouts(
        cls, rollouts: Sequence[Rollout], rules: TreeRules | None = None
    ) -> PrefixTree:
        """The tree of one rollout or of a group; what the rollouts share is held once.

        A call that several rollouts contain (forks of one another) is one call with several owners.

        Raises:
            CaptureError: A call's ids and logprobs do not fit together.
            ConfigError: Two rollouts have the same id.
        """
        repeated = [i for i, n in Counter(r.rollout_id for r in rollouts).items() if n > 1]
        if repeated:
            raise ConfigError(
                f"rollout_id {repeated[0]!r} occurs more than once; give each rollout its own id"
            )
        return cls._build(
            [TreeRollout.of(rollout) for rollout in rollouts],
            [rollout.calls for rollout in rollouts],
            rules or TreeRules(),
        )

    @classmethod
    def _build(
        cls,
        rollouts: Sequence[TreeRollout],
        calls: Sequence[Sequence[CapturedCall]],
        rules: TreeRules,
    ) -> PrefixTree:
        owners: dict[str, list[int]] = {}
        captured: list[CapturedCall] = []
        for number, of_rollout in enumerate(calls):
            for call in sorted(of_rollout, key=lambda c: c.call.index):
                if call.call.call_id not in owners:
                    captured.append(call)
                owners.setdefault(call.call.call_id, []).append(number)
        owner_lists = [tuple(owners[call.call.call_id]) for call in captured]

        prompts = [_ids(call.prompt_ids) for call in captured]
        replies = [_ids(call.completion.token_ids) for call in captured]
        has_ids = [len(p) > 0 and len(y) > 0 for p, y in zip(prompts, replies, strict=True)]
        sequences = [
            np.concatenate((p, y)) if ids else _ids(None)
            for p, y, ids in zip(prompts, replies, has_ids, strict=True)
        ]
        trie = build_trie(sequences)
        parents = find_parents(
            trie,
            [len(p) for p in prompts],
            owner_lists,
            [call.delivered is not False for call in captured],
        )
        table = call_table(captured, owner_lists, parents, rules)
        if any(call.excluded for call in table):
            nothing = _ids(None)
            trie = build_trie(
                [
                    nothing if call.excluded else sequence
                    for call, sequence in zip(table, sequences, strict=True)
                ]
            )
        return cls(
            rollouts=tuple(rollouts),
            calls=table,
            trie=trie,
            **_reply_arrays(trie, table, captured, replies),
        )

    @property
    def tokens(self) -> TokenIds:
        """(T,) int32 ids in depth-first order."""
        return self.trie.tokens

    @cached_property
    def slot_node(self) -> Ints:
        """(T,) int64 node of each slot."""
        return np.repeat(np.arange(self.trie.nodes), np.diff(self.trie.node_start))

    @cached_property
    def depth(self) -> Ints:
        """(T,) int64 depth of each slot on its path, which is its position, from 0."""
        first = self.trie.node_depth - self.trie.node_start[:-1]
        return np.arange(len(self.tokens)) + first[self.slot_node]

    @cached_property
    def subtree_end(self) -> Ints:
        """(T,) int64: slot ``k`` is visible to slot ``q`` iff ``k <= q < subtree_end[k]``."""
        return self.trie.node_subtree_end[self.slot_node]

    @cached_property
    def predecessor(self) -> Ints:
        """(T,) int64 slot of the token before each on its path, -1 at the top."""
        before = np.arange(-1, len(self.tokens) - 1, dtype=np.int64)
        parent, start = self.trie.node_parent, self.trie.node_start
        before[start[:-1]] = np.where(parent >= 0, start[parent + 1] - 1, -1)
        return before

    @cached_property
    def action_mask(self) -> Bools:
        """(T,) bool, true where some included call sampled the token there."""
        mask = np.zeros(len(self.tokens), dtype=np.bool_)
        mask[self.reply_slot[self.reply_slot >= 0]] = True
        return mask

    @cached_property
    def reply_call(self) -> Ints:
        """(R,) int64 index of the call that sampled each reply token."""
        return np.repeat(np.arange(len(self.calls)), np.diff(self.reply_start))

    @cached_property
    def included(self) -> tuple[int, ...]:
        """Indices of the calls that the tree holds."""
        return tuple(number for number, call in enumerate(self.calls) if not call.excluded)

    def reply(self, call: int) -> slice:
        """Where call ``call`` lies in the ``reply_*`` arrays."""
        return slice(int(self.reply_start[call]), int(self.reply_start[call + 1]))

    def path(self, call: int) -> Ints:
        """(n,) int64 slots of an included call's prompt and reply.

        Raises:
            ConfigError: The call is excluded.
        """
        entry = self.calls[call]
        if entry.excluded:
            raise ConfigError(f"call {entry.call_id!r} is not in the tree: {entry.excluded}")
        return self.trie.slots(int(self.trie.sequence_node[call]), 0, entry.tokens)

    def stats(self) -> TreeStats:
        """Counts over the whole tree."""
        seen: set[int] = set()
        later: list[TreeCall] = []
        for call in self.calls:
            if call.has_ids:
                if not seen.isdisjoint(call.rollouts):
                    later.append(call)
                seen.update(call.rollouts)
        parents = self.trie.node_parent
        fanout = Counter(parents[parents >= 0].tolist())
        return TreeStats(
            rollouts=len(self.rollouts),
            calls=len(self.calls),
            included=len(self.included),
            excluded=dict(Counter(call.excluded for call in self.calls if call.excluded)),
            unique_tokens=len(self.tokens),
            call_tokens=sum(self.calls[n].tokens for n in self.included),
            action_tokens=int(self.action_mask.sum()),
            visits=int((self.reply_slot >= 0).sum()),
            nodes=self.trie.nodes,
            branches=sum(count > 1 for count in fanout.values()),
            leaves=self.trie.nodes - len(fanout),
            depth=int(self.depth.max()) + 1 if len(self.tokens) else 0,
            roots=sum(call.has_ids and not call.extends for call in self.calls),
            extension_rate=sum(c.extends for c in later) / len(later) if later else 1.0,
            drift=sum(call.drift is not None for call in self.calls),
        )

    def to_dict(self) -> dict[str, Any]:
        """The tree as plain records and arrays, for ``from_dict``, ``numpy.savez`` or JSON."""
        return {
            "format": FORMAT,
            "rollouts": [asdict(rollout) for rollout in self.rollouts],
            "calls": [asdict(call) for call in self.calls],
            **{name: getattr(self.trie, name) for name in _TRIE_ARRAYS},
            **{name: getattr(self, name) for name in _REPLY_ARRAYS},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrefixTree:
        """The tree that ``to_dict`` gave; arrays may have become lists.

        Raises:
            CaptureError: The data is of another format or lacks a field.
        """
        if data.get("format") != FORMAT:
            raise CaptureError(
                f"tree format {data.get('format')!r} is not {FORMAT}, the one this version reads; "
                "build the tree again from its captured calls"
            )
        missing = [name for name in _FIELDS if name not in data]
        if missing:
            raise CaptureError(f"the tree lacks {', '.join(missing)}; it was not fully written")
        return cls(
            rollouts=tuple(TreeRollout(**record) for record in data["rollouts"]),
            calls=tuple(
                TreeCall(
                    **{
                        **record,
                        "rollouts": tuple(record["rollouts"]),
                        "tool_names": tuple(record["tool_names"]),
                    }
                )
                for record in data["calls"]
            ),
            trie=Trie(**_arrays(data, _TRIE_ARRAYS)),
            **_arrays(data, _REPLY_ARRAYS),
        )


_TRIE_ARRAYS: dict[str, Any] = {
    "tokens": np.int32,
    "node_start": np.int64,
    "node_parent": np.int64,
    "node_depth": np.int64,
    "node_subtree_end": np.int64,
    "sequence_end": np.int64,
    "sequence_node": np.int64,
}
_REPLY_ARRAYS: dict[str, Any] = {
    "reply_start": np.int64,
    "reply_tokens": np.int32,
    "reply_logprobs": np.float64,
    "reply_slot": np.int64,
}
_FIELDS = ("rollouts", "calls", *_TRIE_ARRAYS, *_REPLY_ARRAYS)


def _arrays(data: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(data[name], dtype=dtype) for name, dtype in names.items()}


def _ids(ids: tuple[int, ...] | None) -> TokenIds:
    return np.fromiter(ids or (), dtype=np.int32, count=len(ids or ()))


def _reply_arrays(
    trie: Trie,
    table: Sequence[TreeCall],
    captured: Sequence[CapturedCall],
    replies: Sequence[TokenIds],
) -> dict[str, Any]:
    start = np.zeros(len(table) + 1, dtype=np.int64)
    np.cumsum([len(reply) for reply in replies], out=start[1:])
    logprobs = np.full(start[-1], np.nan)
    slot = np.full(start[-1], -1, dtype=np.int64)
    for number, (call, item) in enumerate(zip(table, captured, strict=True)):
        own = slice(int(start[number]), int(start[number + 1]))
        if item.completion.logprobs is not None:
            logprobs[own] = _checked_logprobs(item)
        if not call.excluded:
            node = int(trie.sequence_node[number])
            slot[own] = trie.slots(node, call.prompt_tokens, call.tokens)
    return {
        "reply_start": start,
        "reply_tokens": np.concatenate([_ids(None), *replies]),
        "reply_logprobs": logprobs,
        "reply_slot": slot,
    }


def _checked_logprobs(item: CapturedCall) -> Floats:
    values = np.asarray(item.completion.logprobs, dtype=np.float64)
    ids = item.completion.token_ids or ()
    if len(values) != len(ids):
        raise CaptureError(
            f"call {item.call.call_id!r} has {len(ids)} sampled ids and {len(values)} logprobs; "
            "the policy backend must return one logprob for each id"
        )
    if not np.isfinite(values).all():
        raise CaptureError(
            f"call {item.call.call_id!r} has a logprob that is NaN or infinite at reply position "
            f"{int(np.flatnonzero(~np.isfinite(values))[0])}; the policy backend is at fault"
        )
    return values
