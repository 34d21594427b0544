"""Linear layers of int8 and 4-bit weights against the product with the weights that the codes stand for."""

from __future__ import annotations

import pytest
import torch
from baton.engine.device_model import coded_linear
from baton.engine.params import Quantization
from baton.engine.quantized import Int4Weight, Int8Weight, full, quantize
from baton.kernels.gpu.linear import int4_linear, int8_linear, pack_int4

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}  # relative to the largest output
SHAPES = [(1, 40, 64), (3, 70, 96), (17, 16, 160), (2, 33, 1088)]  # rows, outputs, inputs


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(kind: str, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, **options: bool) -> torch.Tensor:
    code = quantize(weight, "w8a8" if kind == "int8" else "int4")
    device = x.device
    on = None if bias is None else bias.to(device)
    if isinstance(code, Int8Weight):
        return int8_linear(x, code.codes.to(device), turned(code.scales, device), on, **options)
    assert isinstance(code, Int4Weight)
    minima = None if kind == "int4 without minima" or code.minima is None else turned(code.minima, device)
    return int4_linear(x, pack_int4(code.codes).to(device), turned(code.scales, device), minima, on, **options)


def turned(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    return numbers.t().contiguous().to(device)


def expected(kind: str, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    code = quantize(weight, "w8a8" if kind == "int8" else "int4")
    if isinstance(code, Int4Weight) and kind == "int4 without minima":
        code = Int4Weight(code.codes, code.scales, None)
    out = x.double() @ full(code).double().t()
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("shape", "batch_invariant"), [*((shape, True) for shape in SHAPES), (SHAPES[2], False)])
@pytest.mark.parametrize("kind", ["int8", "int4", "int4 without minima"])
def test_equals_the_product_with_the_weights_that_codes_stand_for(
    kind: str, shape: tuple[int, int, int], dtype: torch.dtype, batch_invariant: bool, device: torch.device
) -> None:
    rows, outputs, inputs = shape
    weight, x = normal(outputs, inputs, seed=1), normal(rows, inputs, seed=2).to(dtype)
    bias = normal(outputs, seed=3) if rows > 1 else None
    ours = run(kind, weight, x.to(device), bias, batch_invariant=batch_invariant).cpu().double()
    target = expected(kind, weight, x, bias)
    assert (ours - target).abs().max() <= TOLERANCE[dtype] * target.abs().max()


def test_a_group_that_is_not_full(device: torch.device) -> None:
    """As int8 may have at its end; 4 bits have whole groups only."""
    weight, x = normal(5, 100, seed=1), normal(2, 100, seed=2)
    ours = run("int8", weight, x.to(device), None).cpu().double()
    target = expected("int8", weight, x, None)
    assert (ours - target).abs().max() <= 2e-5 * target.abs().max()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_bits_do_not_depend_on_the_rows(kind: str, device: torch.device) -> None:
    weight, x = normal(40, 1024, seed=1), normal(19, 1024, seed=2).half().to(device)
    whole = run(kind, weight, x, None)
    for part in (slice(0, 1), slice(3, 9), slice(18, 19)):
        assert torch.equal(run(kind, weight, x[part], None), whole[part])


@pytest.mark.parametrize("scheme", ["w8a8", "int4"])
def test_the_engine_weights_in_codes(scheme: Quantization, device: torch.device) -> None:
    weight, rows = quantize(normal(40, 128, seed=1), scheme), normal(3, 128, seed=2)
    assert not isinstance(weight, torch.Tensor)
    bias = normal(40, seed=3)
    ours = coded_linear(weight, bias.to(device), device, True)(rows.to(device)).cpu()
    torch.testing.assert_close(ours, rows @ weight.dequantize().t() + bias, atol=1e-4, rtol=1e-4)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.int8, device=device), torch.zeros(1, 5, device=device)
    with pytest.raises(ValueError, match=r"x \[1, 32\] for 64 inputs"):
        int8_linear(torch.zeros(1, 32, device=device), codes, scales)
    with pytest.raises(ValueError, match="scales"):
        int8_linear(torch.zeros(1, 64, device=device), codes, scales)
    with pytest.raises(ValueError, match="packed"):
        int4_linear(torch.zeros(1, 64, device=device), codes, scales, None)
