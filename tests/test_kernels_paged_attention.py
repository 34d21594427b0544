"""Paged attention by C, at each level of the processor: equal to the plain reference, and to itself bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from baton.kernels import reference
from baton.kernels.cpu_attention import plan_gathered
from baton.kernels.kv_rows import KINDS
from baton.kernels.native import LEVELS, library
from baton.kernels.paged_attention import PagedAttention
from baton.tests.harness.attention_case import Case

pytestmark = pytest.mark.skipif(library() is None, reason="no C kernels here")

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
HEADS = [(1, 1, 64), (4, 4, 24), (9, 3, 64), (8, 1, 32), (4, 2, 96), (12, 2, 128), (4, 2, 80), (2, 1, 256)]
CODED = [torch.int8, torch.float8_e4m3fn]
POOLS = [torch.float32, torch.bfloat16, torch.float16, *CODED]
EDGES = [1, 2, 63, 64, 65, 127, 128, 129, 200]


def _assert_near(case: Case, pieces: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    """At each level."""
    expected = torch.cat(case.attend(pieces, 16, None))
    for level in LEVELS.values():
        ours = torch.cat(case.attend(pieces, 16, partial(PagedAttention, level=level)))
        torch.testing.assert_close(ours, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("query", TOLERANCE)
@pytest.mark.parametrize("pool", POOLS)
def test_equals_the_reference_around_the_edges_of_tiles(query: torch.dtype, pool: torch.dtype) -> None:
    case = Case(9, 3, 64, query, EDGES).stored_as(pool)
    pieces = [(i, n - 1, n) for i, n in enumerate(EDGES)] + [(8, 0, 200), (6, 60, 70), (3, 1, 64), (2, 0, 63)]
    _assert_near(case, pieces, query)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_equals_the_reference_for_every_shape(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    case = Case(heads, kv_heads, dim, dtype, [150, 5, 70])
    _assert_near(case, [(0, 40, 150), (1, 0, 5), (2, 69, 70)], dtype)


@pytest.mark.parametrize("pool", CODED)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_codes_of_every_shape(heads: int, kv_heads: int, dim: int, pool: torch.dtype) -> None:
    for dtype in TOLERANCE:
        case = Case(heads, kv_heads, dim, dtype, [150, 5, 70]).stored_as(pool)
        _assert_near(case, [(0, 40, 150), (1, 0, 5), (2, 69, 70)], dtype)


def _exact(case: Case, index: int, pool: torch.dtype) -> torch.Tensor:
    """float64 attention of a whole sequence over what the plain reference makes of its keys and values."""
    query, share = case.query[index].double().transpose(0, 1), case.query[index].shape[1] // case.keys[index].shape[1]
    stored = []
    for part in (case.keys[index], case.values[index]):
        codes, scales = reference.quantize_kv(part.reshape(-1, part.shape[2]), KINDS[pool])
        numbers = codes.double() if pool == torch.int8 else reference.e4m3_numbers()[codes.long()]
        rows = (numbers * scales.double()[:, None]).view(part.shape)
        stored.append(rows.transpose(0, 1).repeat_interleave(share, 0))
    scores = query @ stored[0].transpose(1, 2) * case.scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return (torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ stored[1]).transpose(0, 1)


@pytest.mark.parametrize("way", ["torch", *LEVELS])
@pytest.mark.parametrize("pool", CODED)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_codes_and_scales_against_exact_arithmetic(dtype: torch.dtype, pool: torch.dtype, way: str) -> None:
    """Rows of very different sizes: each one's scale is its own. Errors are those of float32, or of rounded weights."""
    case = Case(9, 3, 64, dtype, [150]).stored_as(pool)
    sizes = 2.0 ** torch.randint(-3, 2, (150, 3, 1), generator=torch.Generator().manual_seed(3))
    case.keys[0], case.values[0] = case.keys[0] * sizes.to(dtype), case.values[0] * sizes.flip(0).to(dtype)
    plan = plan_gathered if way == "torch" else partial(PagedAttention, level=LEVELS[way])
    ours = case.attend([(0, 0, 150)], 16, plan)[0].double()
    exact = _exact(case, 0, pool)
    torch.testing.assert_close(ours, exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 2, 80), (20, 1, 32)])
@pytest.mark.parametrize("pool", POOLS)
def test_bits_do_not_depend_on_the_step(level: str, shape: tuple[int, int, int], pool: torch.dtype) -> None:
    """Nor on the block size."""
    plan = partial(PagedAttention, level=LEVELS[level])
    case = Case(*shape, torch.bfloat16, [300, 130, 70]).stored_as(pool)
    whole = [case.attend([(i, 0, n)], 16, plan)[0] for i, n in enumerate((300, 130, 70))]
    pieces = [
        [(0, 0, 1), (1, 63, 64), (2, 69, 70), (0, 127, 128), (0, 128, 129), (1, 129, 130), (0, 299, 300), (2, 0, 1)],
        [(0, 0, 2), (1, 1, 8), (2, 8, 70), (0, 50, 300), (1, 63, 65), (1, 8, 9)],
        [(2, 64, 65), (0, 100, 255), (1, 0, 128), (0, 240, 243)],
    ]
    for block_size, step in zip((1, 24, 64), pieces, strict=True):
        for (index, start, stop), part in zip(step, case.attend(step, block_size, plan), strict=True):
            assert torch.equal(part, whole[index][start:stop]), (block_size, index, start, stop)


def test_decode_bits_at_every_length() -> None:
    case = Case(9, 3, 64, torch.bfloat16, [200])
    whole = case.attend([(0, 0, 200)], 16, PagedAttention)[0]
    rows = case.attend([(0, at, at + 1) for at in range(200)], 32, PagedAttention)
    assert torch.equal(torch.cat(rows), whole)


def test_bits_do_not_depend_on_the_threads() -> None:
    case = Case(9, 3, 64, torch.bfloat16, [300, 130])
    steps = [[(0, 299, 300)], [(0, 10, 300), (1, 129, 130)], [(0, at, at + 1) for at in range(200, 220)]]
    alone = [torch.cat(case.attend(step, 16, PagedAttention)) for step in steps]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = [torch.cat(case.attend(step, 16, PagedAttention)) for step in steps]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_queries_may_lie_in_wider_rows() -> None:
    """As queries do beside their keys and values."""
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(5, 2, 16, 64, generator=generator).bfloat16() for _ in range(2))
    wide = torch.randn(10, 8, 64, generator=generator).bfloat16()
    results = [torch.empty(10, 4, 64, dtype=torch.bfloat16) for _ in range(2)]
    for query, out in zip((wide[:, :4], wide[:, :4].contiguous()), results, strict=True):
        PagedAttention([0, 10], [70], [[3, 1, 2, 0, 4]], keys).attend(query, keys, values, 0.125, out)
    assert torch.equal(*results)


@pytest.mark.parametrize("blocks", [[0, 5], [-1, 2]])
def test_a_block_outside_the_pool_is_refused(blocks: list[int]) -> None:
    with pytest.raises(ValueError, match="of a pool of 5"):
        PagedAttention([0, 1], [20], [blocks], torch.zeros(5, 2, 16, 64))
