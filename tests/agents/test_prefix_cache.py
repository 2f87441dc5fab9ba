"""The radix tree of cached keys and values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.prefix_cache import PrefixCache, Segment, common_prefix
from clawgym_env.errors import ConfigError

SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def segment(ids: list[int], start: int, stop: int) -> Segment:
    """Keys that spell the prefix they belong to, so that a wrong reuse shows."""
    spelled = [float(hash(tuple(ids[: i + 1])) % 10_007) for i in range(start, stop)]
    keys = torch.tensor(spelled).reshape(1, 1, -1, 1)
    return Segment(keys, -keys)


def insert(cache: PrefixCache, ids: list[int]) -> list[tuple[int, int]]:
    asked: list[tuple[int, int]] = []

    def extract(start: int, stop: int) -> Segment:
        asked.append((start, stop))
        return segment(ids, start, stop)

    cache.insert(ids, extract)
    return asked


def matched(cache: PrefixCache, ids: list[int]) -> int:
    segments = cache.match(ids)
    length = sum(map(len, segments))
    if segments:
        expected = segment(ids, 0, length)
        assert torch.equal(torch.cat([s.keys for s in segments], 2), expected.keys)
        assert torch.equal(torch.cat([s.values for s in segments], 2), expected.values)
    return length


@given(st.lists(SEQUENCES, max_size=12), SEQUENCES)
def test_the_longest_prefix_of_all_that_was_inserted_is_found(
    inserted: list[list[int]], query: list[int]
) -> None:
    cache = PrefixCache(10_000)
    for index, ids in enumerate(inserted):
        longest = max((common_prefix(ids, other) for other in inserted[:index]), default=0)
        assert insert(cache, ids) == ([(longest, len(ids))] if longest < len(ids) else [])
    assert matched(cache, query) == max((common_prefix(query, ids) for ids in inserted), default=0)
    prefixes = {tuple(ids[: i + 1]) for ids in inserted for i in range(len(ids))}
    assert cache.tokens == len(prefixes)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), SEQUENCES), max_size=30), st.integers(0, 20))
def test_the_capacity_holds_and_what_is_found_is_right(
    moves: list[tuple[bool, list[int]]], capacity: int
) -> None:
    cache = PrefixCache(capacity)
    for is_insert, ids in moves:
        if is_insert:
            insert(cache, ids)
            # What just came is never what goes.
            assert matched(cache, ids) == len(ids) or len(ids) > capacity
        else:
            matched(cache, ids)
        assert cache.tokens <= capacity


def test_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache(6)
    insert(cache, [1, 1])
    insert(cache, [2, 2])
    insert(cache, [3, 3])
    matched(cache, [1, 1])
    insert(cache, [4, 4])
    assert [matched(cache, [i, i]) for i in (1, 2, 3, 4)] == [2, 0, 2, 2]


def test_a_shared_prefix_outlives_its_branches() -> None:
    cache = PrefixCache(6)
    insert(cache, [1, 1, 1, 2])
    insert(cache, [1, 1, 1, 3])
    insert(cache, [1, 1, 1, 4, 4])
    assert [matched(cache, [1, 1, 1, i, i]) for i in (2, 3, 4)] == [3, 4, 5]


def test_clear_forgets_everything() -> None:
    cache = PrefixCache(6)
    insert(cache, [1, 2, 3])
    cache.clear()
    assert (cache.tokens, matched(cache, [1, 2, 3])) == (0, 0)


def test_what_is_held_owns_its_memory() -> None:
    cache = PrefixCache(100)
    insert(cache, [1] * 10)
    insert(cache, [1] * 3 + [2])
    for found in cache.match([1] * 10):
        assert found.keys.untyped_storage().nbytes() <= 4 * 7


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 tokens or more; got -1"):
        PrefixCache(-1)


@given(SEQUENCES, SEQUENCES)
def test_common_prefix(first: list[int], second: list[int]) -> None:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    assert common_prefix(first, second) == length
