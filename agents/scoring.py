"""Logprobs of a row's visits under a model: one packed forward pass.

Joins rows, tree attention and the chunked head, and knows no loss. Invariant: the logits of a token
that several visits share are computed once, and the same number is handed to each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agents.attention import output_head, tree_hidden
from agents.losses import chunked_logprobs
from agents.packing import PackedBatch


@dataclass(frozen=True, eq=False)
class Scores:
    """What the model says of a row's visits.

    Attributes:
        logprobs: (V,) in nats, float32 or wider, with gradient.
        entropy: (V,) entropy of the distribution that each visit was drawn from, no gradient.
    """

    logprobs: Tensor
    entropy: Tensor


def score(
    model: nn.Module, batch: PackedBatch, *, chunk: int = 1024, temperature: float = 1.0
) -> Scores:
    """Logprobs and entropies of the visits of one row.

    Args:
        model: A model prepared by ``use_tree_attention``.
        batch: The row, on the model's device.
        chunk: Rows of logits held at once.
        temperature: The sampling temperature, by which logits are divided.

    Raises:
        ConfigError: The model is not prepared, or its vocabulary does not hold the row's ids.
    """
    hidden = tree_hidden(model, batch.input_ids, batch.position_ids, batch.layout)
    logprobs, entropy = chunked_logprobs(
        hidden[batch.action_source], output_head(model), batch.action_ids, chunk, temperature
    )
    return Scores(logprobs[batch.visit_action], entropy[batch.visit_action])


@torch.no_grad()
def frozen_logprobs(
    model: nn.Module,
    batches: Sequence[PackedBatch],
    *,
    chunk: int = 1024,
    temperature: float = 1.0,
) -> Tensor:
    """Logprobs of all visits of an update, without gradient, in the order of its ``Visits``.

    For the proximal policy before an update, and for a reference policy.

    Args:
        model: A model prepared by ``use_tree_attention``.
        batches: All rows of the update.
        chunk: Rows of logits held at once.
        temperature: The sampling temperature.

    Returns:
        (V,) in CPU memory.
    """
    pieces = [score(model, batch, chunk=chunk, temperature=temperature) for batch in batches]
    index = torch.cat([batch.visit_index.cpu() for batch in batches])
    values = torch.cat([piece.logprobs.cpu() for piece in pieces])
    result = torch.empty_like(values)
    result[index] = values
    return result
