"""Linear layers in e4m3 against the product of what both sides' codes stand for."""

from __future__ import annotations

import pytest
import torch
from baton.kernels import reference
from baton.kernels.gpu.fp8_linear import fp8_linear, quantise_rows

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}  # relative to the largest output


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "batch_invariant"), [(1, 20, 48, True), (5, 70, 144, True), (17, 16, 272, False)]
)
def test_equals_the_product_of_what_codes_stand_for(
    rows: int, outputs: int, inputs: int, batch_invariant: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = normal(rows, inputs, seed=1).to(dtype), normal(outputs, inputs, seed=2)
    x *= torch.linspace(0.1, 3, rows, dtype=dtype)[:, None]
    codes, scales = reference.quantize_kv(weight, "fp8")
    bias = normal(outputs, seed=3) if rows > 1 else None
    parts = (codes.to(device), scales.to(device), None if bias is None else bias.to(device))
    ours = fp8_linear(x.to(device), *parts, batch_invariant=batch_invariant).cpu().double()
    own = reference.dequantize_kv(*reference.quantize_kv(x, "fp8"), torch.float32).double()
    expected = own @ reference.dequantize_kv(codes, scales, torch.float32).double().t()
    expected += 0 if bias is None else bias
    assert (ours - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("inputs", [16, 100, 576])
def test_rows_become_the_codes_of_the_reference(inputs: int, device: torch.device) -> None:
    x = normal(5, inputs, seed=1).half()
    for ours, expected in zip(quantise_rows(x.to(device)), reference.quantize_kv(x, "fp8"), strict=True):
        assert torch.equal(ours.cpu(), expected)


def test_bits_do_not_depend_on_the_rows(device: torch.device) -> None:
    x, weight = normal(19, 272, seed=1).half().to(device), normal(20, 272, seed=2)
    parts = [part.to(device) for part in reference.quantize_kv(weight, "fp8")]
    whole = fp8_linear(x, parts[0], parts[1])
    for part in (slice(0, 1), slice(3, 9), slice(18, 19)):
        assert torch.equal(fp8_linear(x[part], parts[0], parts[1]), whole[part])


def test_wrong_arguments_are_named(device: torch.device) -> None:
    codes, scales = torch.zeros(4, 32, dtype=torch.uint8, device=device), torch.zeros(4, device=device)
    with pytest.raises(ValueError, match=r"x \[1, 16\] for 32 inputs"):
        fp8_linear(torch.zeros(1, 16, device=device), codes, scales)
    with pytest.raises(ValueError, match="scales"):
        fp8_linear(torch.zeros(1, 32, device=device), codes, scales[:3])
