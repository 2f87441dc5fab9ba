from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_models import SHAPE, tiny
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

from agents.attention import (
    LAYOUT,
    NAME,
    dense_attention,
    output_head,
    tree_hidden,
    use_tree_attention,
)
from agents.layout import BLOCK, TreeLayout
from agents.piecewise import piecewise_attention
from clawgym_env.errors import ConfigError

FORK = [6, 6, 4, 4, 6, 6]
POSITIONS = [0, 1, 2, 3, 2, 3]
PATHS = ([0, 1, 2, 3], [0, 1, 4, 5])


@st.composite
def subtree_ends(draw: st.DrawFn, most: int = 60) -> list[int]:
    """A random forest in depth-first order: each token hangs on the current path or starts anew."""
    path: list[int] = []
    ends: list[int] = []
    for token in range(draw(st.integers(1, most))):
        keep = draw(st.integers(0, len(path))) if draw(st.integers(0, 2)) == 0 else len(path)
        path = [*path[:keep], token]
        ends.append(token + 1)
        for ancestor in path:
            ends[ancestor] = token + 1
    return ends


def forest(tokens: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    path: list[int] = []
    ends = [0] * tokens
    for token in range(tokens):
        keep = rng.integers(0, len(path) + 1) if rng.random() < 0.03 else len(path)
        path = [*path[:keep], token]
        for ancestor in path:
            ends[ancestor] = token + 1
    return ends


@settings(max_examples=150, deadline=None)
@given(subtree_ends())
def test_pieces_cover_each_visible_pair_once(ends: list[int]) -> None:
    layout = TreeLayout.of(ends)
    covered = torch.zeros(len(ends), len(ends), dtype=torch.int64)
    for start, stop in layout.chains:
        covered[start:stop, start:stop] += torch.ones(stop - start, stop - start).tril().long()
    for piece in layout.rectangles:
        rows = slice(piece.query_start, piece.query_stop)
        covered[rows, piece.key_start : piece.key_stop] += 1
    assert (covered == layout.dense_mask().long()).all()
    assert layout.visible_pairs == int(covered.sum())
    assert len(layout.rectangles) <= max(0, len(layout.chains) - 1)


@settings(max_examples=40, deadline=None)
@given(subtree_ends(), st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]))
def test_pieces_equal_the_dense_reference(ends: list[int], heads: tuple[int, int]) -> None:
    layout = TreeLayout.of(ends)
    ours, theirs = both(layout, heads, torch.float64)
    for mine, expected in zip(ours, theirs, strict=True):
        assert (mine - expected).norm() <= 1e-12 * (1 + expected.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_narrow_floats(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = both(TreeLayout.of(forest(300, 1)), (6, 2), dtype)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - expected.double()).norm() <= tolerance * expected.norm()


def both(
    layout: TreeLayout, heads: tuple[int, int], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of query, key and value: pieces, and the dense reference."""
    torch.manual_seed(0)
    query, keys = heads
    tokens = layout.tokens
    # As models hand them over: transposed views of (1, T, heads, size).
    leaves = [torch.randn(1, tokens, h, 8, dtype=dtype) for h in (query, keys, keys)]
    towards = torch.randn(1, tokens, query, 8, dtype=dtype)
    results = []
    for attend in (piecewise_attention, dense_attention):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        q, k, v = (x.transpose(1, 2) for x in inputs)
        output = attend(q, k, v, layout, 0.4)
        output.backward(towards.to(output.dtype))
        results.append([output.detach(), *(x.grad for x in inputs if x.grad is not None)])
    return results[0], results[1]


@pytest.mark.parametrize("tokens", [1, 100, BLOCK, 3 * BLOCK, 700])
def test_the_block_mask_is_that_of_the_dense_one(tokens: int) -> None:
    layout = TreeLayout.of(forest(tokens, tokens))
    mask = layout.block_mask(torch.device("cpu"))
    assert mask is layout.block_mask(torch.device("cpu")), "made once"
    blocks = -(-tokens // BLOCK)
    dense = torch.zeros(blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    dense[:tokens, :tokens] = layout.dense_mask()
    tiles = dense.view(blocks, BLOCK, blocks, BLOCK).transpose(1, 2).flatten(2)
    chosen = {name: torch.zeros(blocks, blocks, dtype=torch.bool) for name in ("some", "full")}
    for row in range(blocks):
        some, full = int(mask.kv_num_blocks[0, 0, row]), mask.full_kv_num_blocks
        chosen["some"][row, mask.kv_indices[0, 0, row, :some].long()] = True
        assert full is not None and mask.full_kv_indices is not None
        chosen["full"][row, mask.full_kv_indices[0, 0, row, : int(full[0, 0, row])].long()] = True
    assert (chosen["full"] == tiles.all(-1)).all()
    assert (chosen["some"] == (tiles.any(-1) & ~tiles.all(-1))).all()


def test_flex_attention_under_the_block_mask_equals_the_dense_reference() -> None:
    layout = TreeLayout.of(forest(400, 3))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 400, 16, dtype=torch.float64) for h in (4, 2, 2))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # it runs uncompiled here, and says so
        output = flex_attention(
            q, k, v, block_mask=layout.block_mask(q.device), scale=0.3, enable_gqa=True
        )
    expected = dense_attention(q, k, v, layout, 0.3)
    assert isinstance(output, Tensor)
    assert torch.allclose(output.transpose(1, 2), expected, rtol=1e-10, atol=1e-12)


def test_other_lengths_and_trees_do_not_compile_anew() -> None:
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, dynamic=True, backend=counter)
    for tokens in (300, 700, 129, 1000):
        layout = TreeLayout.of(forest(tokens, tokens))
        q, k, v = (torch.randn(1, h, tokens, 8) for h in (4, 2, 2))
        with torch.no_grad():
            mask = layout.block_mask(q.device)
            output = compiled(q, k, v, block_mask=mask, scale=0.3, enable_gqa=True)
        expected = dense_attention(q, k, v, layout, 0.3).float()
        assert torch.allclose(output.transpose(1, 2), expected, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(8, 2), (6, 2)])
def test_cuda_equals_the_cpu_forward_and_backward(heads: tuple[int, int]) -> None:
    shape = {"hidden_size": 32 * heads[0], "head_dim": 32, "num_attention_heads": heads[0]}
    here = tiny("qwen3", torch.float32, num_key_value_heads=heads[1], **shape)
    there = copy.deepcopy(here).to("cuda")
    for tokens in (100, 700, 1300):
        layout = TreeLayout.of(forest(tokens, tokens))
        ids = torch.arange(tokens)[None] % 16
        # Any positions will do, so long as both sides have the same.
        positions = torch.arange(tokens)[None] % 100
        outputs = []
        for model in (here, there):
            use_tree_attention(model)
            model.zero_grad()
            device = model.get_input_embeddings().weight.device  # type: ignore[no-untyped-call]
            hidden = tree_hidden(model, ids.to(device), positions.to(device), layout)
            hidden.square().mean().backward()
            grads = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
            outputs.append([hidden.detach().cpu(), *grads])
        for mine, expected in zip(outputs[1], outputs[0], strict=True):
            assert (mine - expected).norm() <= 1e-2 * expected.norm() + 1e-6


def hidden_of_fork(model: Any) -> Tensor:
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    return tree_hidden(model, ids, torch.tensor([POSITIONS]), TreeLayout.of(FORK))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "mixtral"])
def test_a_fork_gives_what_its_paths_give(kind: str) -> None:
    model = tiny(kind)
    plain = copy.deepcopy(model)
    use_tree_attention(model)
    packed = hidden_of_fork(model)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    for path in PATHS:
        alone = plain.get_decoder()(input_ids=ids[:, path]).last_hidden_state[0]  # type: ignore[no-untyped-call]
        assert torch.allclose(packed[path], alone, rtol=1e-10, atol=1e-12)


def test_without_a_layout_a_prepared_model_is_as_before() -> None:
    model = tiny("qwen2", torch.float32)
    plain = copy.deepcopy(model)
    use_tree_attention(model)
    assert model.config._attn_implementation == NAME
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    ours = model(ids, attention_mask=mask)
    theirs = plain(ids, attention_mask=mask)
    assert torch.equal(ours.logits, theirs.logits), "left padding and all"
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(ids[1:], **options)
    assert torch.equal(generated, plain.generate(ids[1:], **options))


def test_gradient_checkpointing_changes_nothing() -> None:
    model = tiny("llama")
    use_tree_attention(model)
    hidden_of_fork(model).square().sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    # Transformers 5 renames it and warns of the old name.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")
    enable({"use_reentrant": False})
    model.train()
    hidden_of_fork(model).square().sum().backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            assert parameter.grad is not None and torch.equal(parameter.grad, expected[name])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_peft_take_part() -> None:
    base = tiny("qwen2", torch.float32, tie_word_embeddings=False)
    model = get_peft_model(
        base,
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False),
    )
    use_tree_attention(model)
    logits = output_head(model)(hidden_of_fork(model))
    for path in PATHS:
        ids = torch.tensor([[1, 2, 3, 4, 5, 6]])[:, path]
        assert torch.allclose(logits[path], model(input_ids=ids).logits[0], atol=1e-5)
    logits.sum().backward()
    adapters = [p.grad for n, p in model.named_parameters() if "lora_" in n]
    assert adapters and all(grad is not None and grad.norm() > 0 for grad in adapters)


def build(config: str, **changes: Any) -> Any:
    shape = {k: v for k, v in SHAPE.items() if config != "FalconConfig" or k != "head_dim"}
    made = getattr(transformers, config)(**{**shape, **changes})
    return transformers.AutoModelForCausalLM.from_config(made)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: build("MistralConfig"), "'mistral'.*sliding window of 4096 tokens"),
        (lambda: build("Gemma3TextConfig"), "'gemma3_text'.*sliding_attention layers do not"),
        (lambda: build("MambaConfig", state_size=4), "'mamba'.*recurrent state"),
        (lambda: build("JambaConfig", use_mamba_kernels=False), "'jamba'.*recurrent state"),
        (lambda: build("FalconConfig"), "'falcon'.*attention implementations from outside"),
        (lambda: build("GraniteConfig", logits_scaling=8.0), "'granite'.*changes logits"),
        (lambda: nn.Linear(2, 2), "expected a transformers PreTrainedModel, got Linear"),
    ],
    ids=["mistral", "gemma3", "mamba", "jamba", "falcon", "granite", "linear"],
)
def test_other_models_are_refused_by_name(model: Any, why: str) -> None:
    made = model()
    before = getattr(getattr(made, "config", None), "_attn_implementation", None)
    with pytest.raises(ConfigError, match=why):
        use_tree_attention(made)
    after = getattr(getattr(made, "config", None), "_attn_implementation", None)
    assert after == before, "a refused model is left as it was"


def test_a_model_that_mixes_neighbours_is_caught_by_the_probe() -> None:
    model = tiny("llama")
    layer = model.get_decoder().layers[0].mlp  # type: ignore[no-untyped-call]
    plain = layer.forward

    def mixing(x: Tensor) -> Tensor:
        return plain(x) + x.roll(1, dims=1)  # type: ignore[no-any-return]

    layer.forward = mixing
    with pytest.raises(ConfigError, match="its tokens see more than"):
        use_tree_attention(model)
    model_with_dropout = tiny("llama", attention_dropout=0.5)
    model_with_dropout.train()
    use_tree_attention(model_with_dropout)
    assert model_with_dropout.training, "the probe restores training mode"
    with pytest.raises(ConfigError, match="no attention dropout 0.5"):
        hidden_of_fork(model_with_dropout)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_bad_input_is_named() -> None:
    model = tiny("llama")
    ids, positions, layout = torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), TreeLayout.of([2, 2])
    with pytest.raises(ConfigError, match="'sdpa'; call use_tree_attention"):
        tree_hidden(model, ids, positions, layout)
    use_tree_attention(model)
    with pytest.raises(ConfigError, match=r"shape \(1, 2\), got \(1, 3\)"):
        tree_hidden(model, torch.tensor([[1, 2, 3]]), positions, layout)
    with pytest.raises(ConfigError, match="token id 99 is outside of the policy's vocabulary"):
        tree_hidden(model, torch.tensor([[1, 99]]), positions, layout)
    with pytest.raises(ConfigError, match="does not fit queries"):
        model(torch.tensor([[1, 2, 3]]), use_cache=False, **{LAYOUT: layout})
    for ends in ([], [[1]], [1, 1], [0], [3, 2], [2, 3, 3]):
        with pytest.raises(ConfigError, match="subtree_end"):
            TreeLayout.of(ends)  # type: ignore[arg-type]
    prompted = get_peft_model(
        tiny("llama", torch.float32),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    )
    with pytest.raises(ConfigError, match="puts tokens before the prompt"):
        use_tree_attention(prompted)
    q, k, v = (torch.randn(1, 1, 2, d) for d in (8, 8, 4))
    with pytest.raises(ConfigError, match="head size, got 8 and 4"):
        piecewise_attention(q, k, v, layout, 1.0)
