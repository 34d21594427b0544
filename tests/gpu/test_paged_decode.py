"""Split decode attention: equal to the plain reference, and to itself bit for bit whatever the batch."""

from __future__ import annotations

import pytest
import torch
from baton.kernels.gpu.paged_decode import paged_decode
from baton.tests.gpu.attention_plan import DecodePlan
from baton.tests.harness.attention_case import Case

TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3}
QUANTISED = {"int8": 3e-2, "fp8": 1e-1}  # of values of about 1: half a scale, and a sixteenth
HEADS = [(1, 1, 64), (9, 3, 64), (8, 1, 32), (2, 2, 80), (17, 1, 16), (4, 2, 128)]


def plan(device: torch.device, **settings: object) -> type[DecodePlan]:
    return type("Plan", (DecodePlan,), {"device": device, **settings})


def last(lengths: list[int]) -> list[tuple[int, int, int]]:
    return [(index, length - 1, length) for index, length in enumerate(lengths)]


SHAPES = [(*shape, dtype) for shape in HEADS for dtype in TOLERANCE] + [(2, 1, 256, torch.float16)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype"), SHAPES)
def test_equals_the_reference_for_every_shape(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    case, steps = Case(heads, kv_heads, dim, dtype, [150, 5, 17]), last([150, 5, 17])
    expected, ours = torch.cat(case.attend(steps, 16, None)), torch.cat(case.attend(steps, 16, plan(device)))
    torch.testing.assert_close(ours, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("block_size", [1, 16, 24, 64])
def test_equals_the_reference_around_edges(block_size: int, device: torch.device) -> None:
    """Of pages, tiles and splits."""
    lengths = [1, 16, 17, 33, 127, 128, 129, 256, 257]
    case, steps = Case(2, 1, 32, torch.float32, lengths), last(lengths)
    expected = torch.cat(case.attend(steps, block_size, None))
    ours = torch.cat(case.attend(steps, block_size, plan(device)))
    torch.testing.assert_close(ours, expected, atol=5e-6, rtol=5e-6)


def test_many_splits_are_merged(device: torch.device) -> None:
    length = 256 * 9 + 3
    case, steps = Case(2, 1, 16, torch.float32, [length, 40]), last([length, 40])
    case.keys[0][700] *= 30  # one split outweighs the others, and one is nothing beside it
    expected, ours = torch.cat(case.attend(steps, 32, None)), torch.cat(case.attend(steps, 32, plan(device)))
    torch.testing.assert_close(ours, expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (3, 1, 80)])
def test_quantised_pages(heads: int, kv_heads: int, dim: int, kind: str, device: torch.device) -> None:
    case, steps = Case(heads, kv_heads, dim, torch.float32, [70, 260, 5]), last([70, 260, 5])
    for tensors in (case.keys, case.values):
        for tensor in tensors:
            tensor *= torch.linspace(0.5, 2, len(tensor))[:, None, None]  # scales that differ from token to token
    expected = torch.cat(case.attend(steps, 16, None))
    ours = torch.cat(case.attend(steps, 16, plan(device, kind=kind)))
    error = (ours - expected).norm() / expected.norm()
    assert error < QUANTISED[kind], error


def test_pools_of_another_float_dtype(device: torch.device) -> None:
    case, steps = Case(6, 2, 32, torch.float16, [70, 5]).stored_as(torch.float32), last([70, 5])
    expected, ours = torch.cat(case.attend(steps, 16, None)), torch.cat(case.attend(steps, 16, plan(device)))
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype, device: torch.device) -> None:
    """Nor on the block size, nor on the longest context that is allowed for."""
    case, steps = Case(6, 2, 32, dtype, [300, 130, 70]), last([300, 130, 70])
    whole = case.attend(steps, 16, plan(device))
    for index, part in enumerate(whole):
        for block_size, slack in ((16, 0), (24, 1000)):
            (alone,) = case.attend([steps[index]], block_size, plan(device, slack=slack))
            assert torch.equal(alone, part), (index, block_size)


def test_a_row_without_tokens_is_zero(device: torch.device) -> None:
    query, pool = torch.ones(2, 4, 32, device=device), torch.full((3, 2, 8, 32), float("nan"), device=device)
    tables = torch.full((2, 4), -1, dtype=torch.int32, device=device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    assert not paged_decode(query, pool, pool, tables, lengths, 600, 1.0).any()


def test_wrong_arguments_are_named(device: torch.device) -> None:
    query, pool = torch.ones(2, 4, 32, device=device), torch.zeros(3, 2, 8, 32, device=device)
    tables = torch.zeros(2, 4, dtype=torch.int32, device=device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"context_lens .* must be int32"):
        paged_decode(query, pool, pool, tables, lengths.long(), 8, 1.0)
    with pytest.raises(ValueError, match="query"):
        paged_decode(query[:, :3], pool, pool, tables, lengths, 8, 1.0)
    with pytest.raises(ValueError, match="without scales"):
        paged_decode(query, pool.char(), pool.char(), tables, lengths, 8, 1.0)
    with pytest.raises(ValueError, match="differ"):
        paged_decode(query, pool, pool.half(), tables, lengths, 8, 1.0)
