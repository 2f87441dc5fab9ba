"""Made-up rollouts whose trees share as much as one asks for.

Knows calls, not trees or models. Invariant: the same arguments give the same calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clawgym_env.calls import CapturedCall, Completion, Message, ModelCall, Outcome, Rollout

SAMPLED_SHARE = 0.25
"""Share of a turn's new tokens that the model sampled; the rest is what tools answered."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a group of made-up rollouts looks like.

    Attributes:
        name: For tables.
        tokens: Distinct tokens of the group, about.
        turns: Calls of a rollout; each extends the one before.
        rollouts: Rollouts of the group.
        shared: Share of a rollout's tokens that is the prompt common to the group.
    """

    name: str
    tokens: int
    turns: int
    rollouts: int = 1
    shared: float = 0.0


def chain_of_ratio(ratio: int, tokens: int) -> Shape:
    """One rollout whose calls taken one by one have ``ratio`` times its tree's tokens."""
    # Equal turns give (turns + 1) / 2.
    return Shape(f"chain, ratio {ratio}", tokens, turns=2 * ratio - 1)


def synthetic_rollouts(shape: Shape, vocabulary: int, seed: int = 0) -> list[Rollout]:
    """Rollouts of ``shape`` with ids below ``vocabulary``."""
    rng = np.random.default_rng(seed)
    whole = shape.tokens / (shape.shared + shape.rollouts * (1 - shape.shared))
    prompt = rng.integers(0, vocabulary, int(whole * shape.shared)).tolist()
    turn = max(2, int(whole * (1 - shape.shared)) // shape.turns)
    sampled = max(1, int(turn * SAMPLED_SHARE))
    rollouts = []
    for number in range(shape.rollouts):
        name = f"{shape.name}/{number}"
        sequence = list(prompt)
        calls = []
        for index in range(shape.turns):
            sequence += rng.integers(0, vocabulary, turn - sampled).tolist()
            reply = rng.integers(0, vocabulary, sampled).tolist()
            calls.append(_call(name, index, sequence, reply, vocabulary))
            sequence += reply
        rollouts.append(
            Rollout(
                rollout_id=name,
                task_id=shape.name,
                harness="synthetic",
                outcome=Outcome.COMPLETED,
                reward=float(number % 2),
                calls=tuple(calls),
            )
        )
    return rollouts


def _call(
    rollout: str, index: int, prompt: list[int], reply: list[int], vocabulary: int
) -> CapturedCall:
    return CapturedCall(
        call=ModelCall(
            call_id=f"{rollout}/{index}",
            rollout_id=rollout,
            index=index,
            protocol="synthetic",
            model="synthetic",
            messages=(),
        ),
        completion=Completion(
            message=Message("assistant"),
            finish_reason="stop",
            token_ids=tuple(reply),
            logprobs=(-float(np.log(vocabulary)),) * len(reply),
        ),
        prompt_ids=tuple(prompt),
        delivered=True,
    )
