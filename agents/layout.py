"""TreeLayout: what attention needs to know of a packed row, and a plan that skips what is hidden.

Token ``k`` is visible to token ``q`` iff ``k <= q < subtree_end[k]``; one array is the mask. This
module turns it into contiguous pieces, for the CPU, and into a block mask, for the GPU, and knows
nothing of models, heads or losses. Invariant: the pieces cover each visible pair exactly once and
no hidden pair.

**The plan.** In depth-first order a token is followed by its first child, so a path of first
children, a *chain*, is contiguous. Within a chain attention is plainly causal. What hangs below a
chain's token ``p`` other than the first child is contiguous too, and sees of the chain exactly the
part from its start to ``p``: one rectangle without any mask. A tree with L leaves needs L causal
squares and at most L - 1 rectangles. With the largest child first, a token takes part in at most
1 + log2(L) of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clawgym_env.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Tokens on a side of a block of the GPU's mask."""

_NOT_NESTED = (
    "subtree_end is not that of a depth-first order: subtrees overlap; pack the tree again"
)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Queries ``query_start:query_stop`` see all of keys ``key_start:key_stop``."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """The shape of a packed row, shared by all layers.

    Attributes:
        subtree_end: (T,) int64 numpy array.
        chains: (start, stop) of each chain; they partition the row.
        rectangles: What chains see of their ancestors.
    """

    subtree_end: NDArray[np.int64]
    chains: tuple[tuple[int, int], ...]
    rectangles: tuple[Rectangle, ...]
    _block_masks: dict[torch.device, BlockMask] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, subtree_end: NDArray[np.int64] | Sequence[int]) -> TreeLayout:
        """The layout of a row in depth-first order, which may hold several trees.

        Raises:
            ConfigError: The array is not that of a depth-first order.
        """
        ends = np.ascontiguousarray(subtree_end, dtype=np.int64)
        if ends.ndim != 1 or len(ends) == 0:
            raise ConfigError(f"subtree_end must be a non-empty row, got shape {ends.shape}")
        slots = np.arange(len(ends))
        if (ends <= slots).any() or int(ends.max()) > len(ends):
            raise ConfigError("subtree_end[k] must lie in (k, T]; pack the tree again")
        if ((slots[1:] < ends[:-1]) & (ends[1:] > ends[:-1])).any():
            raise ConfigError(_NOT_NESTED)
        # A token that is outside its predecessor's subtree begins a chain.
        begins = np.concatenate(([True], slots[1:] >= ends[:-1]))
        starts = np.flatnonzero(begins)
        stops = np.append(starts[1:], len(ends))
        return cls(
            ends,
            tuple(zip(starts.tolist(), stops.tolist(), strict=True)),
            tuple(_rectangles(ends, starts, stops)),
        )

    @property
    def tokens(self) -> int:
        """Tokens in the row."""
        return len(self.subtree_end)

    @property
    def visible_pairs(self) -> int:
        """Pairs of query and key that attention must compute."""
        return int((self.subtree_end - np.arange(self.tokens)).sum())

    def dense_mask(self) -> Tensor:
        """(T, T) bool, true where the row's query sees the column's key: the reference."""
        ends = torch.from_numpy(self.subtree_end)
        slots = torch.arange(self.tokens)
        return (slots[None, :] <= slots[:, None]) & (slots[:, None] < ends[None, :])

    def block_mask(self, device: torch.device) -> BlockMask:
        """The mask for ``flex_attention``, made once a device, without a dense mask."""
        mask = self._block_masks.get(device)
        if mask is None:
            mask = self._block_masks[device] = _block_mask(self.subtree_end, device)
        return mask


def _rectangles(
    ends: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> list[Rectangle]:
    rectangles: list[Rectangle] = []
    # Open chains, outermost first; a chain is open while its first token's subtree goes on. Of the
    # open chains the innermost holds the parent of the next one.
    open_chains: list[tuple[int, int]] = []
    served: set[int] = set()
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        while open_chains and ends[open_chains[-1][0]] <= start:
            open_chains.pop()
        if open_chains:
            chain_start, chain_stop = open_chains[-1]
            # Ends do not grow along a chain, so the tokens that `start` sees are its first ones.
            within = ends[chain_start:chain_stop]
            parent = chain_start + int(np.searchsorted(-within, -start, side="left")) - 1
            if ends[start] > ends[parent]:
                raise ConfigError(_NOT_NESTED)
            if parent not in served:
                # The first of the siblings opens one rectangle for them all.
                rectangles.append(Rectangle(start, int(ends[parent]), chain_start, parent + 1))
                served.add(parent)
        open_chains.append((start, stop))
    return rectangles


def _block_mask(subtree_end: NDArray[np.int64], device: torch.device) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    tokens = len(subtree_end)
    blocks = -(-tokens // BLOCK)
    # Padding sees and is seen by nothing, so a last block that is not full is partial.
    padded = np.zeros(blocks * BLOCK, dtype=np.int64)
    padded[:tokens] = subtree_end
    longest = padded.reshape(blocks, BLOCK).max(axis=1)
    shortest = padded.reshape(blocks, BLOCK).min(axis=1)
    first = np.arange(blocks) * BLOCK
    below = first[:, None] > first[None, :]
    full = below & (shortest[None, :] >= first[:, None] + BLOCK)
    some = (below & (longest[None, :] > first[:, None])) | np.eye(blocks, dtype=np.bool_)
    ends = torch.from_numpy(padded).to(device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query < ends[key])

    return BlockMask.from_kv_blocks(
        *_ragged(some & ~full, device),
        *_ragged(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(tokens, tokens),
    )


def _ragged(chosen: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts (1, 1, B) and indices (1, 1, B, B), chosen ones first, int32."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    counts = chosen.sum(axis=1).astype(np.int32)
    return (
        torch.from_numpy(counts)[None, None].to(device),
        torch.from_numpy(order)[None, None].to(device),
    )
