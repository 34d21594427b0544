"""Linears by oneDNN, as without a C library: the same bits for a row whatever comes with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from baton.engine.linear import ROW_COUNTS, PackedLinear, Packing, PlainLinear, TiledLinear, cover, padded_rows
from baton.kernels.linear import NativeLinear
from baton.kernels.native import library

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (320, 64), (640, 576), (96, 40), (5000, 72), (97, 33)]


@pytest.fixture(autouse=True)
def _onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.linear._native_is_best", lambda: False)


def _weight(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator).mul_(inputs**-0.5).bfloat16()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_does_not_depend_on_the_others(outputs: int, inputs: int, biased: bool) -> None:
    bias = _weight(outputs, 1, seed=2)[:, 0].contiguous() if biased else None
    linear = Packing(batch_invariant=True).linear(_weight(outputs, inputs), bias)
    assert isinstance(linear, TiledLinear)
    assert 32 in linear.counts
    rows = _weight(700, inputs, seed=1) * inputs**0.5
    whole = linear(rows)
    for count in (1, 2, 5, 8, 31, 32, 33, 64, 100, 128, 300, 511, 512, 513):
        for start in (0, 77, 187):
            assert torch.equal(linear(rows[start : start + count]), whole[start : start + count]), (start, count)
    exact = F.linear(rows.float(), _weight(outputs, inputs).float(), None if bias is None else bias.float())
    torch.testing.assert_close(whole.float(), exact, atol=0.03, rtol=0.01)


def test_equal_shapes_are_packed_alike() -> None:
    packing = Packing(batch_invariant=True)
    first, second = (packing.linear(_weight(576, 576, seed), None) for seed in (0, 1))
    assert isinstance(first, TiledLinear)
    assert isinstance(second, TiledLinear)
    assert first.counts == second.counts


def test_which_layer_for_which_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Packing(batch_invariant=True).pads(torch.bfloat16)
    assert isinstance(Packing(batch_invariant=True).linear(_weight(64, 64).float(), None), PlainLinear)
    assert isinstance(Packing(batch_invariant=False).linear(_weight(64, 64), None), PackedLinear)
    if library() is not None:
        monkeypatch.setattr("baton.engine.linear._native_is_best", lambda: True)
        assert not Packing(batch_invariant=True).pads(torch.bfloat16)
        for packing in (Packing(batch_invariant=True), Packing(batch_invariant=False)):
            assert isinstance(packing.linear(_weight(64, 64), None), NativeLinear)
            assert isinstance(packing.head(_weight(64, 64)), NativeLinear)
            assert not isinstance(packing.linear(_weight(64, 33), None), NativeLinear)


def test_without_packed_products_rows_are_still_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.linear._packs", lambda weight: False)
    linear = Packing(batch_invariant=True).linear(_weight(576, 576), None)
    assert isinstance(linear, TiledLinear)
    rows = _weight(100, 576, seed=1)
    assert torch.equal(linear(rows[40:41]), linear(rows)[40:41])


@pytest.mark.parametrize("counts", [ROW_COUNTS, (32,), (8, 32, 128)])
def test_cover_is_enough_and_not_wasteful(counts: tuple[int, ...]) -> None:
    for rows in range(1, 1500):
        pieces = cover(rows, counts)
        assert set(pieces) <= set(counts)
        assert rows <= sum(pieces) < max(rows * 1.34 + 1, rows + 32)
    assert cover(0, counts) == []


def test_padded_rows_need_no_more_padding() -> None:
    for rows in range(1, 1500):
        assert padded_rows(padded_rows(rows)) == padded_rows(rows)
    assert [padded_rows(rows) for rows in (1, 2, 9, 20, 33, 64, 130, 400, 512)] == [1, 8, 16, 32, 33, 64, 136, 512, 512]
