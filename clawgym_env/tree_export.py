"""Linear samples out of a tree, for trainers that know no trees.

Knows the tree and no trainer's format. Invariant: every sampled token of every included call is an
action in exactly one trajectory, so that training on all of them weighs it as the tree does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clawgym_env.tree_building import TokenIds
from clawgym_env.trees import Bools, Floats, PrefixTree


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One leaf call's sequence, for trainers that take linear samples.

    Attributes:
        rollout_id: The rollout.
        token_ids: (n,) int32.
        action_mask: (n,) bool, true where a call of this rollout sampled the token; a token that
            several trajectories share is an action in the first of them only.
        logprobs: (n,) float64 behaviour logprobs at actions, NaN elsewhere.
        call_ids: The calls whose replies are actions here, first to last.
    """

    rollout_id: str
    token_ids: TokenIds
    action_mask: Bools
    logprobs: Floats
    call_ids: tuple[str, ...]


def trajectories(tree: PrefixTree) -> Iterator[Trajectory]:
    """The tree as linear samples: one for each included call that no included call extends.

    Every sampled token is an action in exactly one trajectory, so training on all of them
    weighs it as the tree does. A call with several owners goes to the first.
    """
    extended: set[int] = set()
    for number in tree.included:
        parent = tree.calls[number].parent
        while parent is not None and parent not in extended:
            extended.add(parent)
            parent = tree.calls[parent].parent
    exported: set[int] = set()
    for leaf in tree.included:
        if leaf in extended:
            continue
        slots = tree.path(leaf)
        mask = np.zeros(len(slots), dtype=np.bool_)
        logprobs = np.full(len(slots), np.nan)
        sources: list[str] = []
        ancestor: int | None = leaf
        while ancestor is not None and ancestor not in exported:
            exported.add(ancestor)
            call = tree.calls[ancestor]
            if not call.excluded:
                span = slice(call.prompt_tokens, call.tokens)
                mask[span] = True
                logprobs[span] = tree.reply_logprobs[tree.reply(ancestor)]
                sources.append(call.call_id)
            ancestor = call.parent
        yield Trajectory(
            rollout_id=tree.rollouts[tree.calls[leaf].rollouts[0]].rollout_id,
            token_ids=tree.tokens[slots],
            action_mask=mask,
            logprobs=logprobs,
            call_ids=tuple(reversed(sources)),
        )
