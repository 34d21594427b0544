"""Causal attention over pages: equal to the plain reference, and to itself bit for bit however a prompt is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from baton.kernels.gpu import paged_prefill as module
from baton.kernels.gpu.paged_prefill import paged_prefill
from baton.tests.gpu.attention_plan import PrefillPlan
from baton.tests.harness.attention_case import Case

TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3}
QUANTISED = {"int8": 3e-2, "fp8": 1e-1}  # of values of about 1: half a scale, and a sixteenth
HEADS = [(1, 1, 64), (9, 3, 64), (8, 1, 32), (2, 2, 80), (17, 1, 16), (4, 2, 128)]
PIECES = [(0, 40, 150), (1, 0, 5), (2, 69, 70), (0, 149, 150), (2, 63, 64), (2, 0, 65)]


def plan(device: torch.device, **settings: object) -> type[PrefillPlan]:
    return type("Plan", (PrefillPlan,), {"device": device, **settings})


@pytest.fixture(params=["pages", "descriptors"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """One that takes the way through pointers, and one that takes the way through descriptors."""
    described: list[bool] = []
    make = module._descriptors

    def note(keys: torch.Tensor, values: torch.Tensor, tile: int) -> tuple[Any, Any]:
        described.append(True)
        return make(keys, values, tile)

    monkeypatch.setattr(module, "_descriptors", note)
    size = {"pages": 16, "descriptors": 64}[request.param]
    yield size
    assert bool(described) == (request.param == "descriptors")


SHAPES = [(*shape, dtype) for shape in HEADS for dtype in TOLERANCE] + [(2, 1, 256, torch.float16)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype"), SHAPES)
def test_equals_the_reference_for_every_shape(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(heads, kv_heads, dim, dtype, [150, 5, 70])
    expected, ours = torch.cat(case.attend(PIECES, 16, None)), torch.cat(case.attend(PIECES, 16, plan(device)))
    torch.testing.assert_close(ours, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dim", [64, 128])
def test_both_ways_equal_the_reference(dim: int, block_size: int, device: torch.device) -> None:
    case = Case(4, 2, dim, torch.float16, [200, 5, 70])
    pieces = [(0, 100, 200), (1, 0, 5), (2, 69, 70), (0, 0, 64), (0, 127, 129)]
    expected = torch.cat(case.attend(pieces, block_size, None))
    ours = torch.cat(case.attend(pieces, block_size, plan(device)))
    torch.testing.assert_close(ours, expected, atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("size", [1, 24, 128])
def test_equals_the_reference_for_other_pages(size: int, device: torch.device) -> None:
    case = Case(6, 2, 32, torch.float32, [150, 5, 70])
    expected, ours = torch.cat(case.attend(PIECES, size, None)), torch.cat(case.attend(PIECES, size, plan(device)))
    torch.testing.assert_close(ours, expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (4, 2, 80)])
def test_quantised_pages(heads: int, kv_heads: int, dim: int, kind: str, device: torch.device) -> None:
    case = Case(heads, kv_heads, dim, torch.float32, [150, 5, 70])
    for tensors in (case.keys, case.values):
        for tensor in tensors:
            tensor *= torch.linspace(0.5, 2, len(tensor))[:, None, None]  # scales that differ from token to token
    expected = torch.cat(case.attend(PIECES, 16, None))
    ours = torch.cat(case.attend(PIECES, 16, plan(device, kind=kind)))
    error = (ours - expected).norm() / expected.norm()
    assert error < QUANTISED[kind], error


def test_pools_of_another_float_dtype(device: torch.device) -> None:
    case = Case(6, 2, 32, torch.float16, [150, 5, 70]).stored_as(torch.float32)
    expected, ours = torch.cat(case.attend(PIECES, 64, None)), torch.cat(case.attend(PIECES, 64, plan(device)))
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


def test_bits_do_not_depend_on_the_step(block_size: int, device: torch.device) -> None:
    case = Case(6, 2, 64, torch.float16, [200, 70])
    whole = [case.attend([(index, 0, n)], block_size, plan(device))[0] for index, n in enumerate((200, 70))]
    steps = [
        [(0, 0, 1), (1, 63, 64), (0, 127, 128), (0, 128, 129), (1, 69, 70)],
        [(0, 50, 200), (1, 1, 8), (0, 63, 65), (1, 8, 70)],
    ]
    for step in steps:
        for (index, start, stop), part in zip(step, case.attend(step, block_size, plan(device)), strict=True):
            assert torch.equal(part, whole[index][start:stop]), (index, start, stop)


def test_sequences_without_new_tokens(device: torch.device) -> None:
    query, pool = torch.randn(3, 4, 32, device=device), torch.randn(4, 2, 8, 32, device=device)
    tables = torch.tensor([[-1, -1], [3, -1], [-1, -1], [1, 2], [-1, -1]], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 0, 2, 2, 3, 3], dtype=torch.int32, device=device)
    contexts = torch.tensor([0, 2, 5, 11, 0], dtype=torch.int32, device=device)
    ours = paged_prefill(query, pool, pool, tables, offsets, contexts, 0.5)
    rows = (torch.tensor([0, 2]), torch.tensor([2, 3]))
    for row, at in ((1, 0), (3, 1)):
        low, high = (int(part[at]) for part in rows)
        local = torch.tensor([0, high - low], dtype=torch.int32, device=device)
        alone = paged_prefill(query[low:high], pool, pool, tables[row : row + 1], local, contexts[row : row + 1], 0.5)
        assert torch.equal(ours[low:high], alone)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    query, pool = torch.ones(2, 4, 32, device=device), torch.zeros(3, 2, 8, 32, device=device)
    tables = torch.zeros(1, 4, dtype=torch.int32, device=device)
    one, two = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 2))
    with pytest.raises(ValueError, match="cu_seqlens"):
        paged_prefill(query, pool, pool, tables, one, one, 1.0)
    with pytest.raises(ValueError, match="query"):
        paged_prefill(query[:, :3], pool, pool, tables, two, one, 1.0)
