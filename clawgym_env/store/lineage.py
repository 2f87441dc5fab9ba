"""Finding the earlier call of a rollout that a new call repeats most of.

It works on calls in memory and knows nothing of SQLite or of how calls are encoded. Which call is
found decides only how compactly the new one is kept. Invariant: whatever is found was added before.

A call whose whole conversation a later one repeats is forgotten: whatever could be shared with it
can be shared with the later one. A plain conversation so holds one call in memory, however long it
grows; at most ``_MOST`` are held of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawgym_env.calls import Message, ModelCall
from clawgym_env.store.records import ID_BYTES

_MOST = 16


@dataclass(frozen=True, slots=True)
class Earlier:
    """A call that later ones may be kept relative to.

    Attributes:
        seq: Its row.
        call: The request.
        tools: Its tools as encoded.
        sequence: Prompt and reply ids as encoded; empty where there are none.
    """

    seq: int
    call: ModelCall
    tools: bytes
    sequence: bytes


class Lineage:
    """The calls of one open rollout that a next one may share something with."""

    def __init__(self) -> None:
        self._bodies: list[Earlier] = []
        self._sequences: list[Earlier] = []

    def body_base(self, call: ModelCall) -> tuple[Earlier | None, int]:
        """The call with the most leading messages in common (the latest of equals), and how many.

        Calls that ``call`` repeats as a whole are forgotten: add ``call`` next.
        """
        shares = [_shared_messages(held.call.messages, call.messages) for held in self._bodies]
        best = _best(self._bodies, shares)
        self._bodies = [
            held
            for held, share in zip(self._bodies, shares, strict=True)
            if share < len(held.call.messages)
        ]
        return best

    def prompt_base(self, prompt: bytes) -> tuple[Earlier | None, int]:
        """The call whose sequence shares the longest prefix of whole ids, and its length in bytes.

        Calls that ``prompt`` repeats as a whole are forgotten: add the prompt's call next.
        """
        shares = [
            shared_prefix(held.sequence, prompt) // ID_BYTES * ID_BYTES for held in self._sequences
        ]
        best, share = _best(self._sequences, shares)
        self._sequences = [
            held
            for held, length in zip(self._sequences, shares, strict=True)
            if length < len(held.sequence)
        ]
        return (best, share) if share else (None, 0)

    def add(self, earlier: Earlier) -> None:
        """Let later calls be kept relative to this one."""
        self._bodies = [*self._bodies, earlier][-_MOST:]
        if earlier.sequence:
            self._sequences = [*self._sequences, earlier][-_MOST:]


def _best(held: list[Earlier], shares: list[int]) -> tuple[Earlier | None, int]:
    if not held:
        return None, 0
    at = max(range(len(held)), key=lambda i: (shares[i], i))
    return held[at], shares[at]


def _shared_messages(a: tuple[Message, ...], b: tuple[Message, ...]) -> int:
    shared = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def shared_prefix(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix."""
    # Comparing slices by halves runs at the speed of memory; byte by byte would not.
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def shared_suffix(a: bytes, b: bytes, most: int) -> int:
    """Length of the longest common suffix, up to ``most``."""
    low, high = 0, most
    if a[len(a) - high :] == b[len(b) - high :]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[len(a) - middle : len(a) - low] == b[len(b) - middle : len(b) - low]:
            low = middle
        else:
            high = middle
    return low
