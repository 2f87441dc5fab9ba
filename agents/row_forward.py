"""The engine's forward pass: new tokens of many sequences, packed, over one key-value store.

A step feeds the new tokens of all sequences to the model as one packed row (shape ``[1, N]``) with
explicit positions, so no layer computes on padding. The model's own code does everything but
attention, which comes here through Transformers' attention interface: write the new keys and
values into each sequence's row, attend over that row. It knows nothing of requests or sampling.

Invariant: what a token sees is its own row up to its own position, so a row's result does not
depend on what else is in the step (beyond floating-point rounding).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from agents.prefix_cache import Segment
from clawgym_env.errors import PolicyError

ATTENTION = "clawgym_rows"
_FIRST_ROWS, _FIRST_LENGTH = 8, 256
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


class Rows:
    """Keys and values of the sequences in progress, one row each; it grows as needed.

    Attributes:
        keys: ``[layers, rows, heads, length, key_dim]``; empty until the first write.
        values: ``[layers, rows, heads, length, value_dim]``.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._rows = _FIRST_ROWS
        self._length = _FIRST_LENGTH
        self.keys = torch.empty(0)
        self.values = torch.empty(0)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` rows of ``length`` positions; what is stored stays."""
        if rows <= self._rows and length <= self._length:
            return
        while self._rows < rows:
            self._rows *= 2
        while self._length < length:
            self._length *= 2
        if self.keys.numel():
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        layers, rows, heads, length, dim = old.shape
        new = old.new_zeros(layers, self._rows, heads, self._length, dim)
        new[:, :rows, :, :length] = old
        return new

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One layer's store, made on first use in the shape of ``key`` and ``value``."""
        if not self.keys.numel():
            # Zeros, not empty: a masked position has weight 0, and 0 times a stray NaN is NaN.
            shape = (self._layers, self._rows, key.shape[1], self._length)
            self.keys = key.new_zeros(*shape, key.shape[3])
            self.values = value.new_zeros(*shape, value.shape[3])
        keys, values = self.keys[index], self.values[index]
        if keys.shape[1::2] != key.shape[1::2] or values.shape[1::2] != value.shape[1::2]:
            raise PolicyError(
                f"the embedded engine needs keys and values of one shape in every layer; layer "
                f"{index} has {tuple(key.shape[1::2])} (heads, dim), the first has "
                f"{tuple(keys.shape[1::2])}; serve this model with vLLM instead"
            )
        return keys, values

    def extract(self, row: int, start: int, stop: int) -> Segment:
        """An owned copy of a row's positions."""
        keys, values = self.keys[:, row, :, start:stop], self.values[:, row, :, start:stop]
        return Segment(keys, values).clone()

    def restore(self, row: int, segments: Sequence[Segment]) -> int:
        """Write cached segments at the start of a row; returns how many positions they fill."""
        position = 0
        for segment in segments:
            stop = position + len(segment)
            self.keys[:, row, :, position:stop] = segment.keys
            self.values[:, row, :, position:stop] = segment.values
            position = stop
        return position

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first ``length`` positions to another row."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence.

    Attributes:
        row: The sequence's row.
        past: How many of its positions are stored already.
        ids: The tokens at the positions that follow, at least one.
    """

    row: int
    past: int
    ids: Sequence[int]


class _Step:
    """One forward pass' attention: where new keys and values go, and who sees what.

    The leading chunks that hold one token each and fill rows 0, 1, 2 … are decoding sequences:
    they attend together, padded to the longest. Every other chunk attends by itself.
    """

    def __init__(self, rows: Rows, chunks: Sequence[Chunk], device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self.calls = 0
        row_of: list[int] = []
        positions: list[int] = []
        self.last: list[int] = []
        self._singles = 0
        self._alone: list[tuple[Chunk, int]] = []
        for index, chunk in enumerate(chunks):
            if self._singles == index == chunk.row and len(chunk.ids) == 1:
                self._singles += 1
            else:
                self._alone.append((chunk, len(row_of)))
            row_of.extend([chunk.row] * len(chunk.ids))
            positions.extend(range(chunk.past, chunk.past + len(chunk.ids)))
            self.last.append(len(row_of) - 1)
        self._row_of = torch.tensor(row_of, device=device)
        self.positions = torch.tensor(positions, device=device)
        self._length = max(positions[: self._singles], default=-1) + 1
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Store the new keys and values of a layer and attend; ``[1, N, heads, value_dim]``."""
        self.calls += 1
        keys, values = self._rows.layer(layer, key, value)
        keys[self._row_of, :, self.positions] = key[0].transpose(0, 1)
        values[self._row_of, :, self.positions] = value[0].transpose(0, 1)
        heads, shared = query.shape[1], keys.shape[1]
        parts: list[torch.Tensor] = []
        if count := self._singles:
            # Query heads that share a key head stand where query positions would.
            first = query[0, :, :count].transpose(0, 1)
            seen = F.scaled_dot_product_attention(
                first.reshape(count, shared, heads // shared, -1),
                keys[:count, :, : self._length],
                values[:count, :, : self._length],
                attn_mask=self._single_mask(query.dtype, window),
                scale=scaling,
            )
            parts.append(seen.reshape(count, heads, -1))
        for chunk, start in self._alone:
            count, total = len(chunk.ids), chunk.past + len(chunk.ids)
            plain = chunk.past == 0 and (window is None or window >= total)
            seen = F.scaled_dot_product_attention(
                query[:, :, start : start + count],
                keys[chunk.row : chunk.row + 1, :, :total],
                values[chunk.row : chunk.row + 1, :, :total],
                attn_mask=None if plain else self._chunk_mask(chunk, start, window),
                is_causal=plain,
                scale=scaling,
                enable_gqa=heads != shared,
            )
            parts.append(seen[0].transpose(0, 1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)

    def _single_mask(self, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        """Additive, ``[singles, 1, 1, length]``; the same for all layers, so made once."""
        if (mask := self._masks.get((-1, window))) is None:
            column = torch.arange(self._length, device=self._device)
            position = self.positions[: self._singles, None]
            hidden = column > position
            if window is not None:
                hidden |= column <= position - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device)
            mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
            self._masks[-1, window] = mask
        return mask

    def _chunk_mask(self, chunk: Chunk, start: int, window: int | None) -> torch.Tensor:
        """Boolean, ``[count, total]``: True where a key is visible."""
        if (mask := self._masks.get((start, window))) is None:
            column = torch.arange(chunk.past + len(chunk.ids), device=self._device)
            position = self.positions[start : start + len(chunk.ids), None]
            mask = column <= position
            if window is not None:
                mask &= column > position - window
            self._masks[start, window] = mask
        return mask


_RUNNING = threading.local()  # .step: the step of this thread's forward pass


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface; the mask argument is not used, the step knows."""
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise PolicyError(
                f"{type(module).__name__} uses {name!r}, which the embedded engine does not know; "
                f"serve this model with vLLM instead"
            )
    step: _Step = _RUNNING.step
    layer = module.layer_idx
    assert isinstance(layer, int)
    return step.attend(layer, query, key, value, scaling, sliding_window), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


class RowForward:
    """A model's forward pass over rows.

    It runs a private twin of the model that shares the parameters (so optimiser steps are seen at
    once) but has its own configuration, eval mode and buffers: the trainer may put the model in
    train mode or choose another attention without either disturbing the other.

    Args:
        model: A decoder-only softmax-attention model in Transformers form.

    Raises:
        PolicyError: The model's attention does not go through Transformers' attention interface,
            or its logits here differ from its own (the architecture does something unusual).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        shared = {id(parameter): parameter for parameter in model.parameters()}
        self._twin: PreTrainedModel = copy.deepcopy(model, dict(shared)).train(False)
        usual = self._twin.config._attn_implementation
        self._layers: int = model.config.get_text_config().num_hidden_layers
        self.device = next(model.parameters()).device
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.rows = Rows(self._layers)
        with torch.inference_mode():
            probe = [(7 * index + 3) % self.vocab_size for index in range(12)]
            inputs = torch.tensor([probe], device=self.device)
            expected = self._twin(input_ids=inputs, use_cache=False).logits[0, -1].float()
        try:
            self._twin.set_attn_implementation(ATTENTION)
            self([Chunk(0, 0, probe[:7])])
            got = self([Chunk(0, 7, probe[7:])])[0]
        except (ValueError, AttributeError, TypeError) as error:
            raise self._refusal(f"its forward pass failed: {error}") from error
        worst = (got - expected).abs().max().item()
        single = next(model.parameters()).dtype == torch.float32
        allowed = (1e-3 if single else 0.1) * (1 + expected.abs().max().item())
        if not worst <= allowed:
            raise self._refusal(
                f"its logits under {ATTENTION!r} differ from those under {usual!r} by {worst:.3g}, "
                f"more than {allowed:.3g}"
            )

    def shares(self, model: PreTrainedModel) -> bool:
        """Whether the parameters are still the very ones of ``model``."""
        return all(
            mine is theirs
            for mine, theirs in zip(self._twin.parameters(), model.parameters(), strict=True)
        )

    @property
    def bytes_per_token(self) -> int:
        """Size of one position's keys and values over all layers."""
        return sum(
            store[:, 0, :, 0].numel() * store.element_size()
            for store in (self.rows.keys, self.rows.values)
        )

    @torch.inference_mode()
    def __call__(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute the chunks' new tokens and store their keys and values.

        Args:
            chunks: In the order of their rows, one a row.

        Returns:
            The logits after each chunk's last token, float32 ``[len(chunks), vocab_size]``.
        """
        self.rows.reserve(
            1 + max(chunk.row for chunk in chunks),
            max(chunk.past + len(chunk.ids) for chunk in chunks),
        )
        step = _Step(self.rows, chunks, self.device)
        packed = [token for chunk in chunks for token in chunk.ids]
        _RUNNING.step = step
        try:
            output = self._twin(
                input_ids=torch.tensor([packed], device=self.device),
                position_ids=step.positions[None],
                use_cache=False,
                logits_to_keep=torch.tensor(step.last, device=self.device),
            )
        finally:
            _RUNNING.step = None
        if step.calls != self._layers:
            raise self._refusal(
                f"{step.calls} of {self._layers} layers called Transformers' attention interface"
            )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def _refusal(self, why: str) -> PolicyError:
        return PolicyError(
            f"the embedded engine serves decoder-only softmax-attention models; "
            f"{type(self._twin).__name__} is not served: {why}; serve it with vLLM instead"
        )
