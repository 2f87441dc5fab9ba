from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.calls import Message, ModelCall
from clawgym_env.store import records
from clawgym_env.store.lineage import Earlier, Lineage, shared_prefix, shared_suffix

FEW = st.lists(st.sampled_from(b"ab"), max_size=20).map(bytes)


@given(FEW, FEW, FEW)
def test_shared_prefix_and_suffix(same: bytes, one: bytes, other: bytes) -> None:
    a, b = same + one, same + other
    n = shared_prefix(a, b)
    assert n >= len(same)
    assert a[:n] == b[:n]
    assert a[n : n + 1] != b[n : n + 1] or n == len(a) == len(b)

    a, b = one + same, other + same
    for most in range(min(len(a), len(b)) + 1):
        n = shared_suffix(a, b, most)
        assert min(len(same), most) <= n <= most
        assert a[len(a) - n :] == b[len(b) - n :]
        assert n == most or a[len(a) - n - 1] != b[len(b) - n - 1]


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_packing(data: bytes, dictionary: bytes) -> None:
    blob = records.pack(data, dictionary)
    assert records.unpack(blob, dictionary) == data
    with pytest.raises(zlib.error):
        records.unpack(blob[:-1], dictionary)


def earlier(seq: int, *texts: str, sequence: tuple[int, ...] = ()) -> Earlier:
    messages = tuple(Message("user", text) for text in texts)
    call = ModelCall(f"c{seq}", "r", seq, "p", "m", messages)
    return Earlier(seq, call, b"[]", records.encode_ids(sequence))


def test_the_most_alike_and_of_equals_the_latest() -> None:
    lineage = Lineage()
    assert lineage.body_base(earlier(0).call) == (None, 0)
    for held in (earlier(1, "a", "b"), earlier(2, "a", "c"), earlier(3, "a", "d")):
        lineage.add(held)
    found, shared = lineage.body_base(earlier(9, "a", "c", "x").call)
    assert found is not None
    assert (found.seq, shared) == (2, 2)
    found, shared = lineage.body_base(earlier(9, "a", "z").call)
    assert found is not None
    assert (found.seq, shared) == (3, 1)


def test_only_whole_ids_are_shared() -> None:
    lineage = Lineage()
    lineage.add(earlier(1, sequence=(1, 2)))
    assert lineage.prompt_base(records.encode_ids((513, 2))) == (None, 0)  # one byte in common
    found, shared = lineage.prompt_base(records.encode_ids((1, 258)))
    assert found is not None
    assert (found.seq, shared) == (1, 4)


def test_a_repeated_conversation_is_forgotten_and_branches_are_held_in_bounds() -> None:
    lineage = Lineage()
    for n in range(100):
        held = earlier(n, *map(str, range(n)), sequence=tuple(range(n)))
        lineage.body_base(held.call)
        lineage.prompt_base(held.sequence)
        lineage.add(held)
    assert len(lineage._bodies) == len(lineage._sequences) == 1
    for n in range(100):
        held = earlier(n, "x", str(n), sequence=(-1, n))
        lineage.body_base(held.call)
        lineage.prompt_base(held.sequence)
        lineage.add(held)
    assert len(lineage._bodies) == len(lineage._sequences) == 16
