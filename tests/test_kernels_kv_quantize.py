"""Codes and scales of KV: the bits of the plain reference, errors within their bounds, and no number where none was."""

from __future__ import annotations

import pytest
import torch
from baton.kernels import reference
from baton.kernels.kv_quantize import CODES, LARGEST, dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROUNDED = 1 + 2**-20  # the bounds are those of exact arithmetic; float32 adds a little


def coded(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    codes, scales = torch.empty(values.shape, dtype=CODES[kind]), torch.empty(values.shape[:1])
    quantize(values, kind, codes, scales)
    return codes, scales


def back(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    values = torch.empty(codes.shape, dtype=dtype)
    dequantize(codes, scales, values)
    return values


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of all magnitudes that the dtype has, with zeros and outliers among them."""
    generator = torch.Generator().manual_seed(count + width)
    values = torch.randn(count, width, generator=generator)
    spread = 4 if dtype == torch.float16 else 30
    values *= 10 ** ((torch.rand(count, 1, generator=generator) - 0.5) * 2 * spread)
    values[::7] *= torch.where(torch.rand(width, generator=generator) < 0.1, 100.0, 0.01)
    values[3::11] = 0
    return values.to(dtype).nan_to_num_(0, 1, -1)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (40, 5), (33, 16), (2500, 64), (300, 128)])
def test_bits_are_those_of_the_reference(kind: str, dtype: torch.dtype, count: int, width: int) -> None:
    values = rows(count, width, dtype)
    codes, scales = coded(values, kind)
    expected_codes, expected_scales = reference.quantize_kv(values, kind)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(bits(codes), bits(expected_codes))
    for target in FLOATS:
        expected = reference.dequantize_kv(expected_codes, scales, target)
        assert torch.equal(bits(back(codes, scales, target)), bits(expected))


def test_every_code_of_fp8_means_what_the_format_says() -> None:
    numbers = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    codes = numbers.view(torch.float8_e4m3fn).reshape(-1, 2)
    values = back(codes, torch.full((127,), 0.5), torch.float32)
    assert torch.equal(values.flatten(), (reference.e4m3_numbers()[numbers.long()] / 2).float())
    assert torch.equal(values, codes.float() / 2)


@pytest.mark.parametrize("kind", CODES)
@given(data=st.data())
def test_errors_are_bounded(kind: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOATS))
    limit = float(torch.finfo(dtype).max)
    number = st.floats(-limit, limit, width=32) | st.floats(-1, 1, width=32) | st.sampled_from([0.0, limit, 1e-44])
    width = data.draw(st.integers(1, 9))
    values = torch.tensor([data.draw(st.lists(number, min_size=width, max_size=width))]).to(dtype)
    values = values.nan_to_num(0, limit, -limit)  # what was rounded to the dtype may have become infinite
    codes, scales = coded(values, kind)
    exact, scale = values.double(), scales.double()[:, None]
    for target in FLOATS:
        got = back(codes, scales, target).double()
        error = (got - exact).abs()
        bound = scale / 2 if kind == "int8" else torch.maximum(exact.abs() / 16, scale / 1024)
        info = torch.finfo(target)
        rounding = torch.clamp((exact.abs() + bound) * info.eps, min=info.smallest_normal * info.eps)
        overflow = exact.abs() + bound + rounding >= info.max
        assert (overflow | (error <= bound * ROUNDED + rounding)).all(), (values, got, scales)
        assert not got.isnan().any()
        if target == torch.float32:
            assert got.isfinite().all()


@pytest.mark.parametrize("kind", CODES)
def test_zero_rows_stay_zero_beside_others(kind: str) -> None:
    values = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.0], [0.0, -0.0, 0.0]])
    got = back(*coded(values, kind), torch.float32)
    assert torch.equal(got[::2], torch.zeros(2, 3))
    assert got[1].tolist() == [pytest.approx(1, rel=2**-4), pytest.approx(-2, rel=1e-6), 0]


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("row", [0, 2999])
def test_kv_04_what_is_not_finite_is_refused(kind: str, dtype: torch.dtype, value: float, row: int) -> None:
    values = torch.ones(3000, 64, dtype=dtype)
    values[row, 5] = value
    with pytest.raises(ValueError, match=f"a value is not finite, which {kind} cannot express"):
        coded(values, kind)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_none_wrote_is_refused(kind: str, scale: float) -> None:
    codes, scales = coded(torch.ones(3, 4), kind)
    scales[1] = scale
    with pytest.raises(ValueError, match="a scale is not a positive finite number"):
        back(codes, scales, torch.float32)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_is_refused(code: int) -> None:
    codes, scales = coded(torch.ones(3, 4), "fp8")
    codes.view(torch.uint8)[2, 3] = code
    with pytest.raises(ValueError, match="a code is not a number"):
        back(codes, scales, torch.float32)


@pytest.mark.parametrize("kind", CODES)
def test_the_largest_number_stays_finite(kind: str) -> None:
    largest = torch.finfo(torch.float32).max
    got = back(*coded(torch.tensor([[largest, -largest, 1.0]]), kind), torch.float32)
    assert got.isfinite().all()
    assert float(got[0, 0]) == pytest.approx(largest, rel=1e-6)
    assert LARGEST[kind] * float(coded(torch.tensor([[largest]]), kind)[1]) <= largest
