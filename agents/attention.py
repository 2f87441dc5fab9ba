"""Tree attention, registered with Hugging Face transformers under the name ``clawgym_tree``.

A model prepared by ``use_tree_attention`` attends along the paths of a packed tree when a layout
comes with the forward pass, and is ordinary causal SDPA when none does, so one model serves both
training and sampling. On the CPU the layout's causal squares and unmasked rectangles run in the
fused kernel and are joined by their log-sum-exps; on CUDA it is ``flex_attention`` with a block
mask. It knows nothing of losses and visits. Invariant: no mask of T x T elements is ever made, and
a model whose state is not position-wise attention over all earlier positions is refused, first by
its configuration and then by a probe of a small forked tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agents.layout import TreeLayout
from agents.piecewise import piecewise_attention
from clawgym_env.errors import ConfigError

NAME = "clawgym_tree"
LAYOUT = "clawgym_layout"
"""The forward argument that carries the layout through a model's layers to its attention."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"}

# Masks are made before the layers run and see no forward arguments, hence a context variable. The
# layers get the layout as an argument all the same: checkpointed ones run again in the backward
# pass, outside of this context and maybe in another thread.
_active: ContextVar[TreeLayout | None] = ContextVar("clawgym_layout", default=None)


def use_tree_attention(model: nn.Module) -> None:
    """Makes ``model`` ready for ``tree_hidden``; does nothing to one that is ready.

    Args:
        model: A decoder-only Hugging Face causal LM, possibly wrapped by peft (LoRA and the like).

    Raises:
        ConfigError: The model is of a kind that cannot attend along a tree; says which and why.
    """
    base = base_model(model)
    if base.config._attn_implementation == NAME:
        return
    _refuse(base)
    before = base.config._attn_implementation
    base.set_attn_implementation(NAME)
    try:
        _probe(base)
    except BaseException:
        base.set_attn_implementation(before)
        raise


def tree_hidden(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor, layout: TreeLayout
) -> Tensor:
    """Final hidden states of a packed row.

    Args:
        model: A model prepared by ``use_tree_attention``.
        input_ids: (1, T) int64.
        position_ids: (1, T) int64, each token's depth on its path.
        layout: The row's layout.

    Returns:
        (T, hidden) in the model's dtype.

    Raises:
        ConfigError: The model is not prepared, the shapes do not fit the layout, or an id is
            outside of the model's vocabulary.
    """
    base = base_model(model)
    if base.config._attn_implementation != NAME:
        raise ConfigError(
            f"the model's attention is {base.config._attn_implementation!r}; "
            "call use_tree_attention(model) first"
        )
    if input_ids.shape != (1, layout.tokens) or position_ids.shape != input_ids.shape:
        raise ConfigError(
            f"a row of {layout.tokens} tokens needs input_ids and position_ids of shape "
            f"(1, {layout.tokens}), got {tuple(input_ids.shape)} and {tuple(position_ids.shape)}"
        )
    highest, known = int(input_ids.max()), base.get_input_embeddings().num_embeddings
    if highest >= known:
        raise ConfigError(
            f"token id {highest} is outside of the policy's vocabulary of {known}; the calls were "
            "captured with another tokenizer"
        )
    with _laid_out(layout):
        output = base.get_decoder()(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **{LAYOUT: layout}
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def base_model(model: nn.Module) -> Any:
    """The Hugging Face ``PreTrainedModel`` inside a peft wrapper, or the model itself.

    Its type is left open, as transformers leaves most of these methods without annotations.

    Raises:
        ConfigError: There is none, or peft puts prompt tokens of its own before the row.
    """
    base: Any = model
    if hasattr(base, "get_base_model") and hasattr(base, "peft_config"):
        for settings in base.peft_config.values():
            if settings.is_prompt_learning:
                raise ConfigError(
                    f"peft's {settings.peft_type} puts tokens before the prompt, which a packed "
                    "tree has no place for; use LoRA"
                )
        base = base.get_base_model()
    if not isinstance(base, PreTrainedModel):
        raise ConfigError(f"expected a transformers PreTrainedModel, got {type(base).__name__}")
    return base


def output_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """What turns hidden states into logits; peft's wrapper of it where there is one.

    Raises:
        ConfigError: The model has no output head.
    """
    base = base_model(model)
    head = base.get_output_embeddings()
    if head is None:
        raise ConfigError(f"{type(base).__name__} has no output head; load it as a causal LM")
    result: Callable[[Tensor], Tensor] = head
    return result


@contextmanager
def _laid_out(layout: TreeLayout) -> Iterator[None]:
    token = _active.set(layout)
    try:
        yield
    finally:
        _active.reset(token)


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        module: The layer's attention module.
        query: (1, H, T, D).
        key: (1, K, T, D), K a divisor of H.
        value: (1, K, T, D).
        attention_mask: None with a layout; what ``sdpa`` takes without one.
        scaling: Factor of the scores, D ** -0.5 when None.
        dropout: Must be 0 with a layout.
        **kwargs: The layout, and what other attention implementations take.

    Returns:
        (1, T, H, D), and None in place of the weights.
    """
    layout: TreeLayout | None = kwargs.pop(LAYOUT, None)
    if layout is None:
        if _active.get() is not None:
            raise ConfigError(
                f"{type(module).__name__} was not handed the layout: its model does not pass "
                "forward arguments on to attention; train on linear trajectories"
            )
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    odd = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if odd or dropout:
        what = f"{odd[0]} in attention" if odd else f"attention dropout {dropout}"
        raise ConfigError(f"{type(module).__name__}: tree attention has no {what}; set it to none")
    if query.shape[0] != 1 or query.shape[2] != layout.tokens or key.shape[2] != layout.tokens:
        raise ConfigError(
            f"a layout of {layout.tokens} tokens does not fit queries {tuple(query.shape)} and "
            f"keys {tuple(key.shape)}; pass one row and no cache"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.device.type == "cpu":
        return piecewise_attention(query, key, value, layout, scale), None
    if query.device.type == "cuda":
        return _flex(query, key, value, layout, scale), None
    raise ConfigError(f"tree attention runs on cpu and cuda, not on {query.device.type}")


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float
) -> Tensor:
    """The reference: the same with a dense mask, in float64.

    Returns:
        (1, T, H, D) float64.
    """
    query, key, value = query.double(), key.double(), value.double()
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = (query @ key.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~layout.dense_mask().to(query.device), float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def _flex(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float) -> Tensor:
    heads = query.shape[1]
    grouped = heads & (heads - 1) == 0
    if not grouped:
        # The kernel tiles query heads of a group together and wants a power of two.
        groups = heads // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    output: Tensor = _compiled_flex()(
        query,
        key,
        value,
        block_mask=layout.block_mask(query.device),
        scale=scale,
        enable_gqa=grouped and heads != key.shape[1],
    )
    return output.transpose(1, 2).contiguous()


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Dynamic, or each row's length would compile the kernel anew.
    return torch.compile(flex_attention, dynamic=True)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    if _active.get() is not None:
        return None
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


AttentionInterface.register(NAME, tree_attention_forward)
AttentionMaskInterface.register(NAME, _mask)


def _refuse(base: Any) -> None:
    """Raises for what the configuration already tells."""
    config = base.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    why = None
    recurrent = sorted(layers & _RECURRENT)
    if recurrent or getattr(base, "_is_stateful", False):
        named = f" ({', '.join(recurrent)} layers)" if recurrent else ""
        why = f"it carries a recurrent state{named}, which cannot be shared by the branches"
    elif layers - {"full_attention"}:
        named = ", ".join(sorted(layers - {"full_attention"}))
        why = f"its {named} layers do not attend to all earlier positions"
    elif (
        not layers
        and getattr(config, "sliding_window", None) is not None
        and getattr(config, "use_sliding_window", True)
    ):
        why = (
            f"it attends in a sliding window of {config.sliding_window} tokens (set sliding_window "
            "to None if no sequence is longer)"
        )
    elif getattr(base.config, "is_encoder_decoder", False):
        why = "it is an encoder-decoder"
    elif not base.is_backend_compatible():
        why = "its code does not take attention implementations from outside"
    if why is not None:
        raise ConfigError(
            f"model type {config.model_type!r} cannot be trained on packed trees: {why}; "
            "train it on linear trajectories"
        )


@torch.no_grad()
def _probe(base: Any) -> None:
    """Raises unless a small forked tree gives what its two paths give one by one."""
    training = {module: module.training for module in base.modules()}
    base.eval()
    try:
        device = base.get_input_embeddings().weight.device
        ids = torch.arange(6, device=device)[None] % base.config.get_text_config().vocab_size
        layout = TreeLayout.of([6, 6, 4, 4, 6, 6])
        positions = torch.tensor([[0, 1, 2, 3, 2, 3]], device=device)
        packed = tree_hidden(base, ids, positions, layout)
        for path in ([0, 1, 2, 3], [0, 1, 4, 5]):
            alone = base.get_decoder()(input_ids=ids[:, path], use_cache=False)
            _compare(
                base,
                packed[path],
                alone.last_hidden_state[0],
                "its tokens see more than their positions and the earlier tokens of their path",
            )
        logits = base(input_ids=ids[:, path], use_cache=False).logits[0]
        _compare(
            base, output_head(base)(packed[path]), logits, "it changes logits after its output head"
        )
    finally:
        for module, mode in training.items():
            module.training = mode


def _compare(base: Any, ours: Tensor, theirs: Tensor, why: str) -> None:
    tolerance = 2e-3 if torch.finfo(ours.dtype).eps < 1e-5 else 5e-2
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    if not error <= tolerance:
        raise ConfigError(
            f"model type {base.config.model_type!r} cannot be trained on packed trees: {why} "
            f"(relative error {error:.2g} on a probe); train it on linear trajectories"
        )
