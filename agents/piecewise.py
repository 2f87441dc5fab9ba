"""Tree attention on the CPU: the layout's pieces through PyTorch's fused kernel.

Knows query, key, value and a layout; nothing of models. Invariant: the result is exact attention
over the visible pairs (no approximation beyond rounding), and memory is linear in the tokens.

Each piece yields an output and the log-sum-exp of its scores; pieces of one query are joined by
weighing outputs with ``exp(lse_piece - lse_total)``. The kernel's backward pass, given the joined
output and log-sum-exp, recovers each piece's true probabilities, so pieces need no joining there.
That takes the kernel's own operators, because ``scaled_dot_product_attention`` returns no
log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agents.layout import TreeLayout
from clawgym_env.errors import ConfigError

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def piecewise_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float
) -> Tensor:
    """Attention along the paths of one packed row.

    Args:
        query: (1, H, T, D).
        key: (1, K, T, D), K a divisor of H; query head ``h`` reads key head ``h // (H / K)``.
        value: (1, K, T, D).
        layout: The row's layout.
        scale: Factor of the scores.

    Returns:
        (1, T, H, D), differentiable once.

    Raises:
        ConfigError: Keys and values differ in head size.
    """
    if value.shape[-1] != query.shape[-1]:
        raise ConfigError(
            f"tree attention needs keys and values of one head size, got {query.shape[-1]} and "
            f"{value.shape[-1]}; train this model on linear trajectories"
        )
    result: Tensor = _Piecewise.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]
    return result


def _pieces(layout: TreeLayout) -> list[tuple[slice, slice, bool]]:
    """(queries, keys, causal) of each kernel call; chains first, each query in exactly one."""
    chains = [(slice(a, b), slice(a, b), True) for a, b in layout.chains]
    return chains + [
        (slice(r.query_start, r.query_stop), slice(r.key_start, r.key_stop), False)
        for r in layout.rectangles
    ]


def _grouped(query: Tensor, key_heads: int) -> Tensor:
    """(1, H, T, D) as (H / K, K, T, D): heads that share keys become a batch, without a copy."""
    _, heads, tokens, size = query.shape
    return query.view(key_heads, heads // key_heads, tokens, size).transpose(0, 1)


class _Piecewise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float
    ) -> Tensor:
        _, heads, tokens, size = query.shape
        key_heads = key.shape[1]
        groups = heads // key_heads
        q = _grouped(query, key_heads)
        k = key.expand(groups, -1, -1, -1)
        v = value.expand(groups, -1, -1, -1)
        wide = torch.promote_types(query.dtype, torch.float32)
        # Laid out as the caller wants it, (T, H, D), and filled through a view.
        joined = query.new_empty(tokens, key_heads, groups, size, dtype=wide)
        output = joined.permute(2, 1, 0, 3)
        lse = query.new_empty(groups, key_heads, tokens, dtype=wide)
        for rows, columns, causal in _pieces(layout):
            part, part_lse = _forward(
                q[:, :, rows], k[:, :, columns], v[:, :, columns], 0.0, causal, scale=scale
            )
            if causal:
                output[:, :, rows] = part
                lse[:, :, rows] = part_lse
            else:
                total = torch.logaddexp(lse[:, :, rows], part_lse)
                output[:, :, rows] *= (lse[:, :, rows] - total).exp_().unsqueeze(-1)
                output[:, :, rows] += part * (part_lse - total).exp_().unsqueeze(-1)
                lse[:, :, rows] = total
        result = joined.to(query.dtype).view(1, tokens, heads, size)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.layout, ctx.scale = layout, scale
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, lse = ctx.saved_tensors
        key_heads = key.shape[1]
        groups = query.shape[1] // key_heads
        q = _grouped(query, key_heads)
        k = key.expand(groups, -1, -1, -1)
        v = value.expand(groups, -1, -1, -1)
        out = _grouped(result.transpose(1, 2), key_heads)
        g = _grouped(grad.transpose(1, 2), key_heads)
        wide = lse.dtype
        grad_query = torch.zeros_like(query, dtype=wide)
        grad_key = torch.zeros_like(key, dtype=wide)
        grad_value = torch.zeros_like(value, dtype=wide)
        grad_q = _grouped(grad_query, key_heads)
        for rows, columns, causal in _pieces(ctx.layout):
            dq, dk, dv = _backward(
                g[:, :, rows],
                q[:, :, rows],
                k[:, :, columns],
                v[:, :, columns],
                out[:, :, rows],
                lse[:, :, rows],
                0.0,
                causal,
                scale=ctx.scale,
            )
            grad_q[:, :, rows] += dq
            grad_key[0, :, columns] += dk.sum(0)
            grad_value[0, :, columns] += dv.sum(0)
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            None,
            None,
        )
