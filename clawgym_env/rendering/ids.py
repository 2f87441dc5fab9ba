"""Token ids as bytes: prefix tests at the speed of memcmp, four bytes an id.

Prompts grow to tens of thousands of ids and are compared with every earlier call's; tuples of
Python ints are for the borders of the package alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from clawgym_env.errors import RenderError

_TYPE = "i"


def pack(ids: Iterable[int]) -> bytes:
    """Ids as native int32 bytes.

    Raises:
        RenderError: If something in ``ids`` is not a non-negative int of 31 bits.
    """
    try:
        packed = array(_TYPE, ids)
    except (TypeError, OverflowError) as exc:
        raise RenderError(f"token ids must be ints in [0, 2**31): {exc}") from exc
    if packed and min(packed) < 0:
        raise RenderError(f"token ids must be ints in [0, 2**31), got {min(packed)}")
    return packed.tobytes()


def unpack(packed: bytes | bytearray) -> tuple[int, ...]:
    """The ids in ``packed``."""
    ids = array(_TYPE)
    ids.frombytes(packed)
    return tuple(ids)
