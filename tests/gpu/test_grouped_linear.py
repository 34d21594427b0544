"""Layers of many experts against one product for each row."""

from __future__ import annotations

import pytest
import torch
from baton.kernels.gpu.grouped_linear import combine, grouped_linear, route

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}  # relative to the largest output


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "per_row", "experts", "outputs", "inputs"),
    [(40, 2, 4, 70, 96), (1, 1, 1, 16, 16), (5, 3, 8, 33, 50), (70, 1, 3, 40, 32)],
)
def test_equals_one_product_for_each_row(
    rows: int, per_row: int, experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = normal(rows, inputs, seed=1).to(dtype), normal(experts, outputs, inputs, seed=2).to(dtype)
    chosen = normal(rows, experts, seed=3).topk(per_row).indices
    chosen[chosen == 1] = 0  # an expert with nothing to do, where there is more than one
    order, offsets = route(chosen.to(device), experts)
    ours = grouped_linear(x.to(device), weight.to(device), order, offsets).cpu().double()
    expected = torch.einsum("tk,tpok->tpo", x.double(), weight.double()[chosen]).flatten(0, 1)
    assert (ours - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    again = grouped_linear(
        expected.to(dtype).to(device), weight.new_ones(experts, 7, outputs).to(device), order, offsets
    )
    sums = expected.to(dtype).double().sum(1, keepdim=True).expand(-1, 7)  # of the pairs themselves, one row for each
    assert (again.cpu().double() - sums).abs().max() <= TOLERANCE[dtype] * expected.abs().sum(1).max()


def test_bits_do_not_depend_on_the_batch(device: torch.device) -> None:
    x, weight = normal(70, 96, seed=1).half().to(device), normal(3, 40, 96, seed=2).half().to(device)
    chosen = torch.arange(70).remainder(3)[:, None].to(device)
    whole = grouped_linear(x, weight, *route(chosen, 3))
    for part in (slice(0, 1), slice(5, 60)):
        assert torch.equal(grouped_linear(x[part], weight, *route(chosen[part], 3)), whole[part])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_combine(dtype: torch.dtype, device: torch.device) -> None:
    parts, shares = normal(3, 2, 37, seed=1).to(dtype), normal(3, 2, seed=2).softmax(-1)
    ours = combine(parts.to(device), shares.to(device)).cpu()
    expected = (parts.float() * shares[:, :, None]).sum(1).to(dtype)
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    x, weight = torch.zeros(4, 8, device=device), torch.zeros(2, 5, 8, device=device)
    order, offsets = route(torch.zeros(4, 1, dtype=torch.int64, device=device), 2)
    with pytest.raises(ValueError, match="4 pairs"):
        grouped_linear(x[:3], weight, order, offsets)
    with pytest.raises(ValueError, match="offsets"):
        grouped_linear(x, weight, order, offsets.long())
    with pytest.raises(ValueError, match="x "):
        grouped_linear(x.half(), weight, order, offsets)
