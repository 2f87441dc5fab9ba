"""Drawing tokens: distributions, truncation, penalties, seeds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from agents.sampler import Drawing, Rule, draw
from clawgym_env.calls import Sampling
from clawgym_env.errors import PolicyError

PLAIN = Rule(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    max_tokens=100,
    stop=(),
    seed=0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
)
LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0])


def drawings(count: int, **changes: Any) -> list[Drawing]:
    return [Drawing(replace(PLAIN, seed=seed, **changes)) for seed in range(count)]


def expected(**changes: Any) -> list[float]:
    """The distribution by the book, one row, plain Python."""
    rule = replace(PLAIN, **changes)
    logits = [x / rule.temperature for x in LOGITS.tolist()]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order[: rule.top_k or None]
    mass = sum(math.exp(logits[i]) for i in kept)
    nucleus, reached = [], 0.0
    for index in kept:
        if nucleus and reached >= rule.top_p:
            break
        nucleus.append(index)
        reached += math.exp(logits[index]) / mass
    total = sum(math.exp(logits[i]) for i in nucleus)
    return [math.exp(logits[i]) / total if i in nucleus else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 2},
        {"top_k": 99},
        {"top_p": 0.7},
        {"top_p": 0.0},
        {"top_k": 3, "top_p": 0.8, "temperature": 1.5},
    ],
    ids=str,
)
def test_tokens_come_from_the_distribution_that_the_logprobs_name(changes: dict[str, Any]) -> None:
    count = 4000
    ids, logprobs = draw(LOGITS.expand(count, -1).clone(), drawings(count, **changes))
    wanted = expected(**changes)
    for token, logprob in zip(ids, logprobs, strict=True):
        assert math.exp(logprob) == pytest.approx(wanted[token], rel=1e-5)
    for token, probability in enumerate(wanted):
        deviation = 5 * math.sqrt(probability * (1 - probability) / count)
        assert abs(ids.count(token) / count - probability) <= deviation


def test_greedy_takes_the_most_likely_and_is_certain() -> None:
    rows = torch.stack([LOGITS, LOGITS.flip(0)])
    assert draw(rows, drawings(2, temperature=0.0)) == ([1, 3], [0.0, 0.0])


def test_greedy_and_sampling_rows_mix() -> None:
    alone = draw(LOGITS[None].clone(), drawings(1))
    mixed = draw(LOGITS.expand(2, -1).clone(), [*drawings(1), *drawings(1, temperature=0.0)])
    assert mixed == ([*alone[0], 1], [*alone[1], 0.0])


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    torch.manual_seed(0)
    steps = [torch.randn(7, 50) for _ in range(20)]
    together = drawings(7, top_p=0.9)
    crowd = [draw(step.clone(), together) for step in steps]
    for row in range(7):
        one = drawings(7, top_p=0.9)[row : row + 1]
        alone = [draw(step[row : row + 1].clone(), one) for step in steps]
        assert [ids[0] for ids, _ in alone] == [ids[row] for ids, _ in crowd]


def test_penalties_lower_what_the_reply_holds() -> None:
    drawing = Drawing(replace(PLAIN, presence_penalty=0.5, frequency_penalty=0.25))
    for token in (1, 1, 3):
        drawing.note(token)
    ids, logprobs = draw(LOGITS[None].clone(), [drawing])
    penalised = LOGITS - torch.tensor([0, 1.0, 0, 0.75, 0])
    assert logprobs[0] == pytest.approx(penalised.log_softmax(-1)[ids[0]].item(), abs=1e-6)


def test_penalties_do_not_leak_into_other_rows() -> None:
    drawing = Drawing(replace(PLAIN, presence_penalty=1.0))
    drawing.note(1)
    plain = Drawing(replace(PLAIN, seed=1))
    _, logprobs = draw(LOGITS.expand(2, -1).clone(), [drawing, plain])
    assert logprobs[1] in LOGITS.log_softmax(-1).tolist()


def test_logits_that_are_not_finite_show_in_the_logprob() -> None:
    for temperature in (0.0, 1.0):
        _, logprobs = draw(torch.full((1, 5), math.nan), drawings(1, temperature=temperature))
        assert math.isnan(logprobs[0])


def test_an_impossible_token_is_never_drawn() -> None:
    row = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    ids, _ = draw(row.expand(2000, -1).clone(), drawings(2000))
    assert set(ids) == {1, 3}


def test_what_is_asked_counts_before_the_default() -> None:
    default = Sampling(temperature=0.5, top_k=7, max_tokens=9, stop=("x",), seed=3)
    asked = Sampling(temperature=0.0, max_tokens=100)
    rule = Rule.resolve(asked, default, room=50, seed=1)
    assert rule == replace(PLAIN, temperature=0.0, top_k=7, max_tokens=50, stop=("x",), seed=3)
    assert Rule.resolve(Sampling(), Sampling(), room=5, seed=1) == replace(
        PLAIN, max_tokens=5, seed=1
    )
    assert Rule.resolve(Sampling(top_k=-1), Sampling(top_k=4), room=5, seed=1).top_k == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Sampling(temperature=-0.1), "temperature must be 0 or more; got -0.1"),
        (Sampling(temperature=math.nan), "temperature must be"),
        (Sampling(top_p=1.1), "top_p must be 0 to 1; got 1.1"),
        (Sampling(max_tokens=0), "max_tokens must be 1 or more; got 0"),
        (Sampling(stop=("",)), "stop must be made of strings that are not empty"),
        (Sampling(frequency_penalty=math.inf), "frequency_penalty must be finite"),
    ],
)
def test_values_out_of_range_are_refused(asked: Sampling, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Rule.resolve(asked, Sampling(), room=5, seed=1)
