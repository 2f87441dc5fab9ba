"""The engine's packed forward pass against the models' own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_models import KINDS, SHAPE, tiny
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from agents.row_forward import Chunk, RowForward
from clawgym_env.errors import PolicyError


def make(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if kind == "sliding window":
        return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=9)).eval()
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=4, n_positions=128)
        ).eval()
    return tiny(kind, torch.float32).eval()


def feed(
    forward: RowForward, sequences: list[list[int]], rng: random.Random
) -> dict[tuple[int, int], torch.Tensor]:
    """Compute all sequences, each in a row, in random chunks; logits by row and length so far."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    stored = [0] * len(sequences)
    while any(n < len(s) for n, s in zip(stored, sequences, strict=True)):
        chunks = []
        for row, ids in enumerate(sequences):
            left = len(ids) - stored[row]
            if left and rng.random() < 0.8:
                size = 1 if rng.random() < 0.5 else rng.randint(1, left)
                chunks.append(Chunk(row, stored[row], ids[stored[row] : stored[row] + size]))
        if chunks:
            for chunk, logits in zip(chunks, forward(chunks), strict=True):
                stored[chunk.row] += len(chunk.ids)
                found[chunk.row, stored[chunk.row]] = logits
    return found


@pytest.mark.parametrize("kind", [*KINDS, "sliding window", "gpt2"])
def test_logits_equal_the_models_own_however_the_tokens_are_fed(kind: str) -> None:
    model = make(kind)
    rng = random.Random(1)
    sequences = [[rng.randrange(16) for _ in range(rng.randint(1, 60))] for _ in range(6)]
    found = feed(RowForward(model), sequences, rng)
    with torch.no_grad():
        own = [model(torch.tensor([ids])).logits[0] for ids in sequences]
    for (row, length), logits in found.items():
        torch.testing.assert_close(logits, own[row][length - 1], rtol=1e-4, atol=1e-4)


def test_rows_can_grow_move_and_come_from_the_cache() -> None:
    model = make("llama")
    forward = RowForward(model)
    rng = random.Random(2)
    ids = [rng.randrange(16) for _ in range(100)]
    with torch.inference_mode():
        forward([Chunk(0, 0, ids[:50])])
        cached = forward.rows.extract(0, 0, 50)
        forward.rows.reserve(40, 1000)  # growing keeps what is there
        forward.rows.move(0, 30, 50)
        assert forward.rows.restore(7, [cached.narrow(0, 20), cached.narrow(20, 50)]) == 50
        logits = forward([Chunk(row, 50, ids[50:]) for row in (0, 7, 30)])
        own = model(torch.tensor([ids])).logits[0, -1]
    for row in logits:
        torch.testing.assert_close(row, own, rtol=1e-4, atol=1e-4)


def test_parameters_are_shared_and_nothing_else() -> None:
    model = make("llama")
    forward = RowForward(model)
    chunk = [Chunk(0, 0, [1, 2, 3])]
    before = forward(chunk)
    model.train()
    model.set_attn_implementation("eager")
    torch.testing.assert_close(forward(chunk), before)
    assert forward.shares(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        own = model.eval()(torch.tensor([[1, 2, 3]])).logits[0, -1]
    torch.testing.assert_close(forward(chunk)[0], own, rtol=1e-4, atol=1e-4)
    assert not forward.shares(make("llama"))


def test_half_precision() -> None:
    model = make("qwen3").to(torch.bfloat16)
    logits = RowForward(model)([Chunk(0, 0, [1, 2, 3, 4]), Chunk(1, 0, [5])])
    assert logits.dtype == torch.float32
    own = model(torch.tensor([[1, 2, 3, 4]])).logits[0, -1].float()
    torch.testing.assert_close(logits[0], own, rtol=0.1, atol=0.1)


def refused(model: PreTrainedModel) -> str:
    with pytest.raises(PolicyError) as caught:
        RowForward(model)
    return str(caught.value)


def test_models_with_other_attention_are_refused() -> None:
    shape: dict[str, Any] = {**SHAPE, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
    assert "'softcap'" in refused(Gemma2ForCausalLM(Gemma2Config(**shape)).eval())
    mamba = MambaConfig(vocab_size=16, hidden_size=32, state_size=4, num_hidden_layers=2)
    message = refused(MambaForCausalLM(mamba).eval())
    assert "MambaForCausalLM is not served" in message and "vLLM" in message
