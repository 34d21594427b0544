"""Paged attention on a CPU by torch: equal to the plain reference, and to itself bit for bit however a step is put
together."""

from __future__ import annotations

import pytest
import torch
from baton.kernels.cpu_attention import plan_gathered
from baton.tests.harness.attention_case import Case

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
HEADS = [(1, 1, 64), (4, 4, 16), (9, 3, 64), (8, 1, 32), (4, 2, 96), (12, 2, 128), (4, 2, 80)]  # query, KV, dimension


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_equals_the_reference(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    case = Case(heads, kv_heads, dim, dtype, [700, 90, 5, 1, 130])
    pieces = [(0, 500, 700), (1, 89, 90), (2, 0, 5), (3, 0, 1), (4, 127, 130), (0, 699, 700)]
    ours, expected = case.attend(pieces, 16, plan_gathered), case.attend(pieces, 16, None)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("block_size", [4, 16, 24, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_bits_do_not_depend_on_the_step(heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    case = Case(heads, kv_heads, dim, torch.bfloat16, [700, 530, 70])
    whole = [case.attend([(i, 0, n)], 16, plan_gathered)[0] for i, n in enumerate((700, 530, 70))]
    pieces = [
        [(0, 0, 1), (1, 300, 301), (2, 69, 70), (0, 511, 512), (0, 512, 513), (1, 529, 530), (0, 699, 700), (2, 0, 1)],
        [(0, 0, 2), (1, 1, 8), (2, 8, 70), (0, 250, 700), (1, 299, 301), (1, 63, 65)],
        [(0, 100, 355), (1, 0, 256), (2, 64, 65), (0, 640, 643)],
    ]
    for step in pieces:
        for (index, start, stop), part in zip(step, case.attend(step, block_size, plan_gathered), strict=True):
            assert torch.equal(part, whole[index][start:stop]), (index, start, stop)


def test_decode_bits_at_every_length() -> None:
    """One row at a time, at each position of 1,100: across the steps of 64 and 512."""
    case = Case(9, 3, 64, torch.bfloat16, [1100])
    whole = case.attend([(0, 0, 1100)], 16, plan_gathered)[0]
    for start in range(0, 1100, 110):
        rows = case.attend([(0, at, at + 1) for at in range(start, start + 110)], 16, plan_gathered)
        for at, row in enumerate(rows, start):
            assert torch.equal(row[0], whole[at]), at


def test_sequences_share_a_call_without_much_padding() -> None:
    pool = torch.zeros(8, 2, 16, 64)
    lengths = [500, 40, 490, 450, 60, 64, 1, 513]
    plan = plan_gathered([*range(9)], lengths, [[0] * 64] * 8, pool)
    assert [(group.tokens.tolist(), group.pages.keys) for group in plan.decode] == [
        ([6, 1, 4, 5, 3, 2, 0], 512),
        ([7], 1024),
    ]


def test_a_call_is_bounded() -> None:
    """However many sequences: what one call gathers fits the cache."""
    pool = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)
    plan = plan_gathered([*range(65)], [4000] * 64, [[0] * 250] * 64, pool)
    assert max(group.pages.heads * group.pages.span * 64 * 2 for group in plan.decode) <= 4 << 20
    assert sorted(token for group in plan.decode for token in group.tokens.tolist()) == [*range(64)]


def test_kv_of_another_dtype_is_converted() -> None:
    case = Case(4, 2, 64, torch.float32, [80])
    expected = case.attend([(0, 0, 80)], 16, plan_gathered)[0]
    ours = case.stored_as(torch.bfloat16).attend([(0, 0, 80)], 16, plan_gathered)[0]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, atol=0.05, rtol=0.05)


MIXED = [
    (query, pool)
    for query in (torch.float32, torch.bfloat16)
    for pool in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
    if query != pool
]


def _mixed(query: torch.dtype, pool: torch.dtype) -> Case:
    return Case(9, 3, 64, query, [200, 70, 5]).stored_as(pool)


@pytest.mark.parametrize(("query", "pool"), MIXED)
def test_kv_04_another_dtype_in_the_pool_equals_the_reference(query: torch.dtype, pool: torch.dtype) -> None:
    """Only what the pool itself rounded is lost: the sums are float32's, and the result is rounded to the query's."""
    case = _mixed(query, pool)
    pieces = [(0, 50, 200), (1, 69, 70), (2, 0, 5)]
    ours, expected = case.attend(pieces, 16, plan_gathered), case.attend(pieces, 16, None)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE[query], rtol=TOLERANCE[query])


@pytest.mark.parametrize("pool", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_kv_04_bits_do_not_depend_on_the_step_with_another_dtype_either(pool: torch.dtype) -> None:
    case = _mixed(torch.bfloat16, pool)
    whole = [case.attend([(i, 0, n)], 16, plan_gathered)[0] for i, n in enumerate((200, 70))]
    for step in ([(0, 0, 3), (1, 69, 70), (0, 199, 200), (0, 3, 90)], [(1, 0, 1), (1, 1, 40), (0, 100, 101)]):
        for (index, start, stop), part in zip(step, case.attend(step, 24, plan_gathered), strict=True):
            assert torch.equal(part, whole[index][start:stop]), (index, start, stop)
