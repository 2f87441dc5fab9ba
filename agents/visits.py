"""Visits: one entry for each time a call sampled a token, over all trees of an update.

This is where advantages and loss weights live. It knows trees and nothing of rows, tensors or
models, so weights do not depend on how an update is cut into rows: the loss is the sum over visits
of weight times the visit's loss, whatever row a visit lands in. Invariant: in every aggregation
mode the weights of an update follow from the visits alone, and a call that several rollouts share
(a fork) weighs no more than one that belongs to a single rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from clawgym_env.errors import ConfigError
from clawgym_env.trees import PrefixTree

Aggregation = Literal["token", "rollout", "call", "constant"]
AGGREGATIONS: tuple[Aggregation, ...] = ("token", "rollout", "call", "constant")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Visits:
    """Parallel arrays, one entry a visit, ordered by tree, call and position in the reply.

    Attributes:
        tree: (V,) int64 index of the tree.
        slot: (V,) int64 slot within the tree.
        call: (V,) int64 index of the call within the tree.
        rollout: (V,) int64 index into ``rollout_ids``; of a shared call, its first rollout.
        policy_version: (V,) int64.
        behaviour_logprobs: (V,) float64, NaN where the reply was not sampled.
        advantages: (V,) float64.
        weights: (V,) float64, see ``visits_of``.
        rollout_ids: The rollouts that have visits.
        skipped_calls: Included calls without visits, as none of their rollouts has an advantage.
    """

    tree: Ints
    slot: Ints
    call: Ints
    rollout: Ints
    policy_version: Ints
    behaviour_logprobs: Floats
    advantages: Floats
    weights: Floats
    rollout_ids: tuple[str, ...]
    skipped_calls: int

    def __len__(self) -> int:
        return len(self.slot)

    def with_advantages(self, advantages: Floats) -> Visits:
        """The same visits with other advantages, (V,), such as token-level ones.

        Raises:
            ConfigError: Wrong length, or an advantage is not finite.
        """
        values = np.asarray(advantages, dtype=np.float64)
        if values.shape != (len(self),):
            raise ConfigError(f"expected {len(self)} advantages, got shape {values.shape}")
        _check_finite(values)
        return replace(self, advantages=values)


def visits_of(
    trees: Sequence[PrefixTree],
    advantages: Mapping[str, float],
    *,
    aggregation: Aggregation = "token",
    constant: float | None = None,
) -> Visits:
    """All visits of the included calls whose rollouts have an advantage.

    The weights say what the sum of losses averages over. With V visits, C calls and R rollouts:
    ``token``: every visit 1 / V. ``call``: each call's visits share 1 / C. ``rollout``: each
    rollout's visits share 1 / R, and a visit that k rollouts share counts in each of them as
    1 / k. ``constant``: every visit 1 / (R * constant), as in Dr. GRPO (arXiv 2503.20783).

    Args:
        trees: The trees of the update.
        advantages: Advantage by rollout id; rollouts that are absent are not trained on. A call
            that several rollouts share gets the mean of theirs.
        aggregation: One of the above.
        constant: The fixed length of ``constant``.

    Raises:
        ConfigError: There is no visit, an advantage is not finite, a rollout is in two trees, or
            ``aggregation`` and ``constant`` do not fit.
    """
    if aggregation not in AGGREGATIONS:
        raise ConfigError(
            f"aggregation must be one of {', '.join(AGGREGATIONS)}; got {aggregation!r}"
        )
    if (aggregation == "constant") != (constant is not None) or (constant or 1) <= 0:
        raise ConfigError(
            f"aggregation {aggregation!r} does not fit constant={constant!r}; give the positive "
            "length to divide by with 'constant', and only then"
        )
    numbers = _rollout_numbers(trees, advantages)
    values = np.array([float(advantages[name]) for name in numbers], dtype=np.float64)
    _check_finite(values)

    # One row a call: (tree, call, reply length, owners).
    chosen: list[tuple[int, int, int, list[int]]] = []
    skipped = 0
    for number, tree in enumerate(trees):
        for index in tree.included:
            call = tree.calls[index]
            names = [tree.rollouts[rollout].rollout_id for rollout in call.rollouts]
            owners = [numbers[name] for name in names if name in numbers]
            if owners:
                chosen.append((number, index, call.sampled_tokens, owners))
            else:
                skipped += 1
    if not chosen:
        raise ConfigError(
            "no call to train on: none is included in the trees and belongs to a rollout with an "
            f"advantage ({skipped} included calls have none)"
        )
    lengths = np.array([length for _, _, length, _ in chosen])
    spans = [(trees[t], trees[t].reply(c)) for t, c, _, _ in chosen]
    used = sorted({owner for _, _, _, owners in chosen for owner in owners})
    position = {owner: at for at, owner in enumerate(used)}
    names = list(numbers)
    call_weights = _call_weights(
        lengths, [[position[o] for o in owners] for *_, owners in chosen], aggregation, constant
    )
    return Visits(
        tree=np.repeat(np.array([t for t, *_ in chosen], dtype=np.int64), lengths),
        slot=np.concatenate([tree.reply_slot[span] for tree, span in spans]),
        call=np.repeat(np.array([c for _, c, _, _ in chosen], dtype=np.int64), lengths),
        rollout=np.repeat(np.array([position[o[0]] for *_, o in chosen], dtype=np.int64), lengths),
        policy_version=np.repeat(
            np.array([trees[t].calls[c].policy_version for t, c, _, _ in chosen], dtype=np.int64),
            lengths,
        ),
        behaviour_logprobs=np.concatenate([tree.reply_logprobs[span] for tree, span in spans]),
        advantages=np.repeat([values[owners].mean() for *_, owners in chosen], lengths),
        weights=np.repeat(call_weights, lengths),
        rollout_ids=tuple(names[owner] for owner in used),
        skipped_calls=skipped,
    )


def _rollout_numbers(
    trees: Sequence[PrefixTree], advantages: Mapping[str, float]
) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for tree in trees:
        for rollout in tree.rollouts:
            if rollout.rollout_id in numbers:
                raise ConfigError(
                    f"rollout {rollout.rollout_id!r} is in two trees; put each in one group"
                )
            if rollout.rollout_id in advantages:
                numbers[rollout.rollout_id] = len(numbers)
    return numbers


def _call_weights(
    lengths: NDArray[np.int64],
    owners: Sequence[Sequence[int]],
    aggregation: Aggregation,
    constant: float | None,
) -> Floats:
    """(C,) weight of each visit of each call."""
    if aggregation == "token":
        return np.full(len(lengths), 1.0 / lengths.sum())
    if aggregation == "call":
        return 1.0 / (len(lengths) * lengths)
    rollouts = 1 + max(owner for of_call in owners for owner in of_call)
    if aggregation == "constant":
        assert constant is not None
        return np.full(len(lengths), 1.0 / (rollouts * constant))
    tokens = np.zeros(rollouts)
    for length, of_call in zip(lengths.tolist(), owners, strict=True):
        tokens[list(of_call)] += length / len(of_call)
    return np.array([(1.0 / (rollouts * tokens[list(of_call)])).mean() for of_call in owners])


def _check_finite(values: Floats) -> None:
    if not np.isfinite(values).all():
        raise ConfigError(
            "advantages must be finite; leave rollouts without a reward out of the mapping"
        )
