"""Who owns which heads, columns and rows."""

from __future__ import annotations

import pytest
from baton.engine.partition import head_ranges, query_ranges, split
from baton.proto.errors import ConfigError


def test_whole_kv_groups_uneven_where_they_do_not_divide() -> None:
    assert head_ranges(3, 2) == ((0, 2), (2, 3))
    assert query_ranges(9, 3, 2) == ((0, 6), (6, 9))
    assert head_ranges(3, 3) == ((0, 1), (1, 2), (2, 3))
    assert head_ranges(8, 3) == ((0, 3), (3, 6), (6, 8))


def test_kv_heads_are_replicated_where_ranks_outnumber_them() -> None:
    assert head_ranges(2, 4) == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert query_ranges(6, 2, 4) == ((0, 2), (2, 3), (3, 5), (5, 6))
    assert head_ranges(2, 3) == ((0, 1), (0, 1), (1, 2))
    assert query_ranges(6, 2, 3) == ((0, 2), (2, 3), (3, 6))


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 8), (32, 4), (12, 2)])
def test_every_query_head_is_owned_once_and_beside_its_kv_head(heads: int, kv_heads: int) -> None:
    for ranks in range(1, heads + 1):
        queries, keys = query_ranges(heads, kv_heads, ranks), head_ranges(kv_heads, ranks)
        assert [head for start, stop in queries for head in range(start, stop)] == [*range(heads)]
        for (start, stop), (low, high) in zip(queries, keys, strict=True):
            assert {head // (heads // kv_heads) for head in range(start, stop)} == {*range(low, high)}
            assert (stop - start) % (high - low) == 0


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel 10 exceeds what 9 query heads"):
        query_ranges(9, 3, 10)
    with pytest.raises(ConfigError, match="tensor_parallel 4 cannot split a dimension of 3"):
        split(3, 4)


@pytest.mark.parametrize("total", [320, 1536, 49152, 151936, 97, 11008])
def test_split_covers_everything_about_evenly(total: int) -> None:
    for ranks in (1, 2, 3, 5, 8):
        ranges = split(total, ranks)
        assert [ranges[0][0], *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), total]
        sizes = [stop - start for start, stop in ranges]
        assert min(sizes) > 0
        assert max(sizes) <= 1.3 * total / ranges[-1][1] * total / ranks + 64
    assert split(1536, 3) == ((0, 512), (512, 1024), (1024, 1536))
