"""Random tiny models of real architectures, exact in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Large enough that attention, norms and biases matter to the logits.
    "initializer_range": 0.3,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_attention_heads": 6}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {"num_key_value_heads": 1}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
}


def tiny(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """A model whose every parameter is random, biases and norms too."""
    config, build, own = KINDS[kind]
    torch.manual_seed(7)
    model = build(config(**{**SHAPE, **own, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the fused one has no float64
    model = model.to(dtype)
    if dtype == torch.float64:
        make_norms_exact(model)
    return model


def make_norms_exact(model: nn.Module) -> None:
    """Norms that stay in float64: the originals round to float32 on the way.

    A difference in the last bit of a float64 can flip such a rounding, which is 1e-7 of noise where
    tests look for 1e-10.
    """
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            weight = module.weight
            assert isinstance(weight, nn.Parameter)
            norm = nn.RMSNorm(weight.shape[0], eps=1e-6, dtype=torch.float64)
            norm.weight = weight
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, norm)
