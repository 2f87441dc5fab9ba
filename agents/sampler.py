"""Choosing the next token: temperature, top-k, top-p, penalties and seeds, for many rows at once.

It knows nothing of models, threads or text. Invariants: the logprob returned is that of the chosen
token under the very distribution it was drawn from (after penalties, temperature, top-k and top-p;
a greedy choice is certain, so its logprob is 0); and a draw depends on the row's own logits and own
generator alone, so a seed gives the same tokens whatever else is in the batch, up to rounding.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clawgym_env.calls import Sampling
from clawgym_env.errors import PolicyError

GREEDY_BELOW = 1e-4
"""Temperatures below this mean the most likely token: the logits' scaling would overflow."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Sampling parameters with nothing left open.

    Attributes:
        temperature: Divides the logits; below ``GREEDY_BELOW`` the most likely token is taken.
        top_p: Keep the fewest most likely tokens whose probability reaches this, at least one.
        top_k: Keep this many most likely tokens; 0 keeps all.
        max_tokens: The most tokens to sample.
        stop: Strings that end the reply once its text holds one of them.
        seed: Seed of the row's generator.
        presence_penalty: Subtracted from the logit of each token that the reply holds already.
        frequency_penalty: The same, times how often the reply holds it.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop: tuple[str, ...]
    seed: int
    presence_penalty: float
    frequency_penalty: float

    @classmethod
    def resolve(cls, asked: Sampling, default: Sampling, *, room: int, seed: int) -> Rule:
        """What was asked for, else the default, else the model's own distribution.

        Args:
            asked: The request's parameters.
            default: The engine's, for those the request leaves open.
            room: Tokens left in the model's context; ``max_tokens`` is cut to it.
            seed: The seed where neither gives one.

        Raises:
            PolicyError: A value is out of its range.
        """

        def pick(name: str, fallback: float) -> float:
            for source in (asked, default):
                if (value := getattr(source, name)) is not None:
                    return float(value)
            return fallback

        rule = cls(
            temperature=pick("temperature", 1.0),
            top_p=pick("top_p", 1.0),
            top_k=max(0, int(pick("top_k", 0))),
            max_tokens=min(room, int(pick("max_tokens", room))),
            stop=asked.stop or default.stop,
            seed=next((s for s in (asked.seed, default.seed) if s is not None), seed),
            presence_penalty=pick("presence_penalty", 0.0),
            frequency_penalty=pick("frequency_penalty", 0.0),
        )
        for name, fine, wanted in (
            ("temperature", 0 <= rule.temperature < math.inf, "0 or more"),
            ("top_p", 0 <= rule.top_p <= 1, "0 to 1"),
            ("max_tokens", rule.max_tokens >= 1, "1 or more"),
            ("stop", all(rule.stop), "made of strings that are not empty"),
            ("presence_penalty", math.isfinite(rule.presence_penalty), "finite"),
            ("frequency_penalty", math.isfinite(rule.frequency_penalty), "finite"),
        ):
            if not fine:
                raise PolicyError(f"{name} must be {wanted}; got {getattr(rule, name)!r}")
        return rule


class Drawing:
    """One reply's rule, generator and token counts."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.greedy = rule.temperature < GREEDY_BELOW
        self._random = random.Random(rule.seed)
        self._penalised = bool(rule.presence_penalty or rule.frequency_penalty)
        self._counts: Counter[int] = Counter()

    def uniform(self) -> float:
        """The next number of the reply's generator, in [0, 1); one a token."""
        return self._random.random()

    def penalise(self, logits: torch.Tensor, row: int) -> None:
        """Apply the penalties to a row of logits, in place."""
        if self._penalised and self._counts:
            ids = torch.tensor(list(self._counts), device=logits.device)
            counts = torch.tensor(list(self._counts.values()), device=logits.device)
            rule = self.rule
            logits[row, ids] -= rule.presence_penalty + rule.frequency_penalty * counts

    def note(self, token: int) -> None:
        """Count a token of the reply."""
        if self._penalised:
            self._counts[token] += 1


def draw(logits: torch.Tensor, drawings: Sequence[Drawing]) -> tuple[list[int], list[float]]:
    """Draw one token a row.

    Args:
        logits: Float32, ``[rows, vocabulary]``; overwritten.
        drawings: One a row.

    Returns:
        The ids and their logprobs in nats; a logprob is NaN where the row's logits were not finite.
    """
    for row, drawing in enumerate(drawings):
        drawing.penalise(logits, row)
    greedy = [drawing.greedy for drawing in drawings]
    if all(greedy):
        return _greedy(logits)
    if any(d.rule.temperature != 1.0 for d in drawings):
        scale = [1.0 if d.greedy else d.rule.temperature for d in drawings]
        logits /= logits.new_tensor(scale)[:, None]
    if any(d.rule.top_k or d.rule.top_p < 1.0 for d in drawings):
        logits = _truncate(logits, drawings)
    logprobs = logits.log_softmax(-1)
    # Double, so that rounding in the sum neither favours nor starves the last tokens.
    mass = logprobs.exp().double().cumsum(-1)
    uniform = mass.new_tensor([drawing.uniform() for drawing in drawings])[:, None]
    chosen = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)
    chosen.clamp_(max=logits.shape[-1] - 1)
    ids = chosen[:, 0].tolist()
    values = logprobs.gather(-1, chosen)[:, 0].tolist()
    if any(greedy):
        best, certain = _greedy(logits)
        ids = [b if g else i for g, b, i in zip(greedy, best, ids, strict=True)]
        values = [c if g else v for g, c, v in zip(greedy, certain, values, strict=True)]
    return ids, values


def _greedy(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    best, chosen = logits.max(-1)
    return chosen.tolist(), (best - best).tolist()


def _truncate(logits: torch.Tensor, drawings: Sequence[Drawing]) -> torch.Tensor:
    """Set to -inf what top-k and top-p leave out; ties keep the lower id."""
    vocabulary = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = [d.rule.top_k or vocabulary for d in drawings]
    rank = torch.arange(vocabulary, device=logits.device)
    ordered.masked_fill_(rank >= rank.new_tensor(top_k)[:, None], float("-inf"))
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability
    before[:, 0] = -1.0  # the most likely token stays, even with a top-p of 0
    # Rows without top-p must lose nothing, whatever the sum rounds to.
    top_p = [d.rule.top_p if d.rule.top_p < 1.0 else 2.0 for d in drawings]
    ordered.masked_fill_(before >= before.new_tensor(top_p)[:, None], float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ordered)
