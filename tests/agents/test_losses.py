from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tiny_models import tiny
from torch import Tensor, nn

from agents.attention import output_head
from agents.losses import LossMetrics, LossSettings, chunked_logprobs, policy_loss
from clawgym_env.errors import ConfigError, PolicyError

DOUBLE = torch.float64


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def loss_of(settings: LossSettings, ratio: float, advantage: float, **more: Any) -> tuple[Any, ...]:
    logprob = tensor(math.log(ratio) - 1.0).requires_grad_()
    given: dict[str, Any] = {"behaviour_logprobs": tensor(-1.0), **more}
    loss, metrics = policy_loss(
        logprob,
        tensor(-1.0),
        advantages=tensor(advantage),
        weights=tensor(1.0),
        settings=settings,
        **given,
    )
    loss.backward()
    assert logprob.grad is not None
    return loss.item(), logprob.grad.item(), metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 2.0, -2.6, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_the_asymmetric_clip_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    ours, slope, metrics = loss_of(LossSettings(clip_low=0.2, clip_high=0.3), ratio, advantage)
    assert ours == pytest.approx(loss)
    assert slope == pytest.approx(gradient)
    assert metrics.ratio == pytest.approx(ratio)
    assert metrics.clip_fraction == (gradient == 0.0)


def test_truncated_importance_sampling_by_hand() -> None:
    half, _, metrics = loss_of(
        LossSettings(), 1.0, 2.0, behaviour_logprobs=tensor(-1.0 + math.log(2))
    )
    assert half == pytest.approx(-1.0) and metrics.importance_capped == 0.0
    capped, _, metrics = loss_of(
        LossSettings(importance_cap=3.0), 1.0, 2.0, behaviour_logprobs=tensor(-1.0 - math.log(8))
    )
    assert capped == pytest.approx(-6.0) and metrics.importance_capped == 1.0
    assert metrics.behaviour_gap == pytest.approx(math.log(8))
    off, _, metrics = loss_of(
        LossSettings(importance_cap=None), 1.0, 2.0, behaviour_logprobs=tensor(math.nan)
    )
    assert off == pytest.approx(-2.0) and metrics.importance == 1.0
    assert math.isnan(metrics.behaviour_gap)


def test_k3_to_the_reference_by_hand() -> None:
    settings_ = LossSettings(kl_coefficient=0.5, importance_cap=None)
    loss, gradient, metrics = loss_of(settings_, 1.0, 0.0, reference_logprobs=tensor(-0.5))
    k3 = math.exp(0.5) - 0.5 - 1
    assert loss == pytest.approx(0.5 * k3) and metrics.reference_kl == pytest.approx(k3)
    assert gradient == pytest.approx(0.5 * (1 - math.exp(0.5)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-3, 0)] * 3, st.floats(-2, 2)), min_size=2, max_size=12))
def test_the_loss_adds_up_over_rows_and_metrics_merge(rows: list[tuple[float, ...]]) -> None:
    columns = [tensor(*column) for column in zip(*rows, strict=True)]
    logprobs, old, behaviour, advantages = columns
    weights = torch.rand(len(rows), dtype=DOUBLE)
    inputs = (logprobs, old, behaviour, advantages, weights)
    whole, metrics = policy_loss(*inputs, entropy=-logprobs)
    cuts = [slice(0, 1), slice(1, len(rows))]
    parts = [policy_loss(*(x[cut] for x in inputs), entropy=-logprobs[cut]) for cut in cuts]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item())
    merged = LossMetrics.merge([part for _, part in parts])
    assert merged.visits == metrics.visits == len(rows)
    for name in ("loss", "ratio", "clip_fraction", "approx_kl", "entropy", "importance"):
        assert getattr(merged, name) == pytest.approx(getattr(metrics, name)), name


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunked_logprobs_equal_the_whole(chunk: int, temperature: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=DOUBLE, requires_grad=True)
    weight = torch.randn(11, 5, dtype=DOUBLE, requires_grad=True)
    targets = torch.randint(0, 11, (7,))
    whole = (hidden @ weight.T / temperature).log_softmax(-1)
    expected = whole.gather(-1, targets[:, None]).squeeze(-1)
    theirs = torch.autograd.grad(expected.sin().sum(), (hidden, weight))
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, chunk, temperature)
    ours = torch.autograd.grad(logprobs.sin().sum(), (hidden, weight))
    assert torch.allclose(logprobs, expected, rtol=1e-12)
    assert torch.allclose(entropy, -(whole.exp() * whole).sum(-1), rtol=1e-12)
    assert not entropy.requires_grad
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-12)


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    hidden = torch.randn(50, 4, requires_grad=True)
    head = nn.Linear(4, 1000, bias=False)
    kept: list[int] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        logprobs, _ = chunked_logprobs(hidden, head, torch.zeros(50, dtype=torch.long), 5)
    assert max(kept, default=0) <= 5 * 1000, "only the inputs of chunks are kept"
    logprobs.sum().backward()
    assert head.weight.grad is not None and hidden.grad is not None


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("wrapped", [False, True])
def test_heads_tied_and_wrapped(wrapped: bool) -> None:
    model: Any = tiny("llama", DOUBLE, tie_word_embeddings=not wrapped)
    if wrapped:
        adapters = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        model = get_peft_model(model, adapters)
    hidden = torch.randn(6, 32, dtype=DOUBLE)
    targets = torch.arange(6)
    head = output_head(model)
    logprobs, _ = chunked_logprobs(hidden, head, targets, 4)
    expected = head(hidden).log_softmax(-1)[range(6), targets]
    assert torch.allclose(logprobs, expected, rtol=1e-6)
    logprobs.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert any("lora_" in n for n in trained) if wrapped else any("embed" in n for n in trained)


def test_half_precision_logits_become_float32() -> None:
    hidden = torch.randn(3, 4, dtype=torch.bfloat16)
    weight = torch.randn(9, 4, dtype=torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.tensor([0, 1, 2]))
    assert logprobs.dtype == entropy.dtype == torch.float32


def test_bad_input_is_named() -> None:
    good = [tensor(-1.0, -2.0)] * 5
    with pytest.raises(ConfigError, match=r"advantages must be \(2,\).*got \(1,\)"):
        policy_loss(*good[:3], tensor(1.0), good[4])
    with pytest.raises(ConfigError, match="V > 0"):
        policy_loss(*[tensor()] * 5)
    with pytest.raises(ConfigError, match="no behaviour logprob; set importance_cap to None"):
        policy_loss(*good[:2], tensor(-1.0, math.nan), *good[3:])
    with pytest.raises(ConfigError, match="reference_logprobs are not given"):
        policy_loss(*good, LossSettings(kl_coefficient=0.1))
    with pytest.raises(PolicyError, match="logprobs are not finite"):
        policy_loss(tensor(-1.0, math.nan), *good[1:])
    with pytest.raises(PolicyError, match="old_logprobs are not finite"):
        policy_loss(good[0], tensor(-1.0, -math.inf), *good[2:])
    with pytest.raises(ConfigError, match="no metrics to merge"):
        LossMetrics.merge([])
    for wrong in ({"clip_low": 0.0}, {"importance_cap": 0.0}, {"kl_coefficient": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LossSettings(**wrong)
    hidden, weight = torch.randn(2, 4), torch.randn(9, 4)
    with pytest.raises(ConfigError, match="token id 9 is outside of the policy's vocabulary of 9"):
        chunked_logprobs(hidden, weight, torch.tensor([0, 9]))
    with pytest.raises(ConfigError, match="one row for each of the 3 targets"):
        chunked_logprobs(hidden, weight, torch.tensor([0, 1, 2]))
    with pytest.raises(ConfigError, match="chunk and temperature must be positive"):
        chunked_logprobs(hidden, weight, torch.tensor([0, 1]), temperature=0.0)
    with pytest.raises(ConfigError, match="no targets"):
        chunked_logprobs(hidden[:0], weight, torch.tensor([], dtype=torch.long))
