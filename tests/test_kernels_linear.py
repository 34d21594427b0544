"""Linear layers by C against plain torch: every instruction set of this processor, edges, and rows that do not depend
on one another."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from baton.kernels.linear import (
    GROUP,
    INT8_GROUP,
    Kind,
    NativeLinear,
    best_level,
    bf16_linear,
    int4_linear,
    int8_linear,
)
from baton.kernels.native import library
from torch import Tensor

pytestmark = pytest.mark.skipif(library() is None, reason="no C kernels")

SHAPES = [(64, 64), (200, 96), (1, 32), (130, 2080), (65, 1056)]  # outputs, inputs; whole groups and others
ODD = [(33, 2), (100, 70), (64, 1090)]  # inputs that fill no step of a tile; bfloat16 and int8 take them
PARTS = [(0, 1), (7, 1), (3, 2), (1, 5), (2, 8), (4, 13), (3, 17), (9, 32), (0, 96), (0, 97), (40, 260)]  # start, rows
Made = tuple[Callable[[Tensor | None, int | None], NativeLinear], Tensor]  # of a bias and a level; the exact weight


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _bf16(outputs: int, inputs: int) -> Made:
    weight = _random(outputs, inputs).bfloat16()
    return lambda bias, level: bf16_linear(weight, bias, level), weight.float()


def _int8(outputs: int, inputs: int) -> Made:
    codes = (_random(outputs, inputs) * 60).clamp(-128, 127).to(torch.int8)
    scales = _random(outputs, -(-inputs // INT8_GROUP), seed=1).abs() / 60
    weight = codes * scales.repeat_interleave(INT8_GROUP, 1)[:, :inputs]
    return lambda bias, level: int8_linear(codes, scales, bias, level), weight


def _int4(outputs: int, inputs: int, minima: bool) -> Made:
    codes = torch.randint(0, 16, (outputs, inputs), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scales = (_random(outputs, inputs // GROUP, seed=1) / 4).half()
    scales[0] *= 1e-5  # subnormal
    least = (_random(outputs, inputs // GROUP, seed=2)).half() if minima else None
    spread = scales.float().repeat_interleave(GROUP, 1)
    weight = spread * (codes.float() - 8)
    if least is not None:
        weight = spread * codes + least.float().repeat_interleave(GROUP, 1)
    return lambda bias, level: int4_linear(codes, scales, least, bias, level), weight


KINDS: dict[str, tuple[Kind, Callable[[int, int], Made]]] = {
    "bf16": ("bf16", _bf16),
    "int8": ("int8", _int8),
    "int4": ("int4", lambda outputs, inputs: _int4(outputs, inputs, False)),
    "int4 with minima": ("int4", lambda outputs, inputs: _int4(outputs, inputs, True)),
}


def _quantized(rows: Tensor, group: int) -> Tensor:
    """What the integer kernels see of the rows."""
    parts = F.pad(rows.float(), (0, -rows.shape[1] % group)).view(len(rows), -1, group)
    scales = parts.abs().amax(-1, keepdim=True) / 127
    return ((parts / scales).nan_to_num(0).round() * scales).view(len(rows), -1)[:, : rows.shape[1]]


@pytest.mark.parametrize("level", range(5))
@pytest.mark.parametrize(
    ("name", "shape"),
    [*itertools.product(KINDS, SHAPES), *itertools.product(("bf16", "int8"), ODD)],
)
def test_products(name: str, shape: tuple[int, int], level: int) -> None:
    kind, make = KINDS[name]
    if level > best_level(kind):
        pytest.skip("not on this processor")
    layer, weight = make(*shape)
    weight = weight.double()
    rows = _random(101, shape[1], seed=3).bfloat16()
    rows[5] = 0
    seen = rows.double() if kind == "bf16" else _quantized(rows, INT8_GROUP if kind == "int8" else GROUP).double()
    bias = _random(shape[0], seed=4).bfloat16()
    for given, added in ((None, 0.0), (bias, bias.double())):
        exact = seen @ weight.T + added
        scale = exact.abs().mean()
        torch.testing.assert_close(layer(given, level)(rows).double() / scale, exact / scale, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    kind, make = KINDS[name]
    layer, _ = make(130, 2080)
    rows = _random(300, 2080, seed=3).bfloat16()
    for level in range(best_level(kind) + 1):
        linear = layer(None, level)
        whole = linear(rows[: 300 if level > 1 else 20])
        for start, count in (
            (0, 1),
            (7, 1),
            (3, 2),
            (1, 5),
            (2, 8),
            (4, 13),
            (3, 17),
            (9, 32),
            (0, 96),
            (0, 97),
            (40, 260),
        ):
            if start + count <= len(whole):
                assert torch.equal(linear(rows[start : start + count]), whole[start : start + count])


def test_byte_products_are_the_same_on_matrix_tiles() -> None:
    if best_level("int8") < 4:
        pytest.skip("not on this processor")
    for shape in (*SHAPES, *ODD):
        layer, _ = _int8(*shape)
        rows = _random(50, shape[1], seed=3).bfloat16()
        assert torch.equal(layer(None, 3)(rows), layer(None, 4)(rows))


@pytest.mark.parametrize("name", KINDS)
def test_threads_change_no_bit(name: str) -> None:
    _, make = KINDS[name]
    layer, _ = make(200, 96)
    rows = _random(300, 96, seed=3).bfloat16()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(layer(None, None)(rows))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_threads_are_those_of_torch() -> None:
    native = library()
    assert native is not None
    assert native.baton_has_threads() == ("OpenMP" in torch.__config__.parallel_info().split("backend:")[1])


@pytest.mark.parametrize("name", KINDS)
def test_a_nan_stays_in_its_row(name: str) -> None:
    _, make = KINDS[name]
    layer, _ = make(64, 64)
    rows = _random(3, 64, seed=3).bfloat16()
    rows[1, 7] = float("nan")
    bad = layer(None, None)(rows).isnan()
    assert bad[1].all()
    assert not bad[[0, 2]].any()


def test_rows_of_another_width_or_dtype_are_refused() -> None:
    layer = _bf16(64, 64)[0](None, None)
    for rows in (torch.zeros(2, 32, dtype=torch.bfloat16), torch.zeros(2, 64)):
        with pytest.raises(ValueError, match="64 inputs"):
            layer(rows)
