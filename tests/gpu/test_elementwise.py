"""Norm, rotation with page writes, and gate against the plain reference."""

from __future__ import annotations

import pytest
import torch
from baton.kernels import reference
from baton.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from baton.kernels.gpu.rotary import rotate_into_pages
from baton.kernels.gpu.silu_mul import silu_mul
from baton.kernels.rotary import angles

# Two roundings where the reference has one; the interpreter cuts float32 to bfloat16 instead of rounding it.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(ours.cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (7, 37), (3, 5, 80), (2, 4096), (9, 1)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    rows, weight = normal(*shape, dtype=dtype), 1 + 0.1 * normal(shape[-1], dtype=dtype, seed=1)
    ours = rms_norm(rows.to(device), weight.to(device), 1e-2)
    close(ours, reference.rms_norm(rows, weight, 1e-2))
    assert torch.equal(rms_norm(rows[-1:].to(device), weight.to(device), 1e-2), ours[-1:])


def test_rms_norm_of_some_heads(device: torch.device) -> None:
    heads, weight = normal(6, 7, 24, dtype=torch.float32), normal(24, dtype=torch.float32, seed=1)
    ours = rms_norm(heads.to(device)[:, 2:5], weight.to(device), 1e-5)
    close(ours, reference.rms_norm(heads[:, 2:5], weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(4, 576), (3, 37), (5, 128)])
def test_add_rms_norm_is_an_addition_and_a_norm(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    rows, part = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)
    weight, total = 1 + 0.1 * normal(shape[1], dtype=dtype, seed=2), rows + part
    stream = rows.to(device)
    ours = add_rms_norm(stream, part.to(device), weight.to(device), 1e-5)
    assert torch.equal(stream.cpu(), total)
    close(ours, reference.rms_norm(total, weight, 1e-5))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # whose result is the right one: infinity
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 64), (2, 37), (1, 1500)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    gate_up = 5 * normal(shape[0], 2 * shape[1], dtype=dtype)
    gate_up[0, :4] = torch.tensor([60.0, -60.0, 0.0, -1e4])
    close(silu_mul(gate_up.to(device)), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("queries", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 80), (1, 1, 2), (12, 2, 16)])
def test_a_rotation_on_the_way_into_the_pages(
    queries: int, kv_heads: int, dim: int, dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device
) -> None:
    heads = normal(6, queries + 2 * kv_heads, dim, dtype=dtype)
    positions, slots = torch.arange(100, 106), torch.tensor([19, 0, -1, 8, 7, 12])
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles(positions, frequencies, 1.1, torch.float32)
    pools = torch.full((2, 5, kv_heads, 4, dim), 7.0, dtype=pool_dtype)
    turned = reference.rotate(heads[:, : queries + kv_heads], positions, frequencies, 1.1)
    expected, there = pools.clone(), slots >= 0
    reference.write_kv(expected[0], slots[there], turned[there, queries:])
    reference.write_kv(expected[1], slots[there], heads[there, queries + kv_heads :])
    keys, values = pools.to(device)
    ours = heads.to(device)
    found = rotate_into_pages(ours, cos.to(device), sin.to(device), slots.to(device), keys, values)
    close(found, turned[:, :queries])
    close(torch.stack((keys, values)), expected)
    assert torch.equal(ours[:, queries:].cpu(), heads[:, queries:])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(("queries", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 20)])
def test_a_rotation_on_the_way_into_pages_of_codes(
    queries: int, kv_heads: int, dim: int, kind: str, device: torch.device
) -> None:
    """The codes of the plain floats that a pool of floats gets; a row with what is no number is none."""
    heads = normal(5, queries + 2 * kv_heads, dim, dtype=torch.float32)
    heads[3, queries, 1], heads[2, -1, 0] = float("inf"), float("nan")
    slots = torch.tensor([9, 0, 7, -1, 4]).to(device)
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = (part.to(device) for part in angles(torch.arange(5), frequencies, 1.0, torch.float32))
    floats = torch.zeros(2, 3, kv_heads, 4, dim, device=device)
    rotate_into_pages(heads.clone().to(device), cos, sin, slots, *floats)
    stored = torch.int8 if kind == "int8" else torch.uint8
    codes = torch.full(floats.shape, 7, dtype=stored, device=device)
    scales = torch.full(floats.shape[:4], 7.0, device=device)
    rotate_into_pages(heads.clone().to(device), cos, sin, slots, codes[0], codes[1], (scales[0], scales[1]))
    written = torch.zeros(2, 3, kv_heads, 4, dtype=torch.bool)
    for slot in (9, 0, 7, 4):
        written[:, slot // 4, :, slot % 4] = True
    assert (scales.cpu()[~written] == 7).all()
    assert (codes.cpu()[~written] == 7).all()
    finite = floats.isfinite().all(-1).cpu()
    assert not finite.all()
    assert scales.cpu()[~finite].isnan().all()
    expected, expected_scales = reference.quantize_kv(floats.cpu()[written & finite], kind)
    assert torch.equal(codes.cpu()[written & finite], expected.view(stored))
    assert torch.equal(scales.cpu()[written & finite], expected_scales)


def test_wrong_shapes_are_named(device: torch.device) -> None:
    rows = torch.zeros(3, 8, device=device)
    with pytest.raises(ValueError, match=r"weight \[4\] for rows of 8"):
        rms_norm(rows, torch.zeros(4, device=device), 1e-5)
    with pytest.raises(ValueError, match="last dimension must be contiguous"):
        rms_norm(rows.t(), torch.zeros(3, device=device), 1e-5)
    with pytest.raises(ValueError, match="part"):
        add_rms_norm(rows, rows[:2], torch.zeros(8, device=device), 1e-5)
    with pytest.raises(ValueError, match="gate_up"):
        silu_mul(torch.zeros(3, 7, device=device))
    slots = torch.zeros(3, dtype=torch.int32, device=device)
    pool = torch.zeros(2, 1, 4, 8, device=device)
    cos = torch.zeros(3, 1, 4, device=device)
    with pytest.raises(ValueError, match=r"slots .* must be int64"):
        rotate_into_pages(torch.zeros(3, 3, 8, device=device), cos, cos, slots, pool, pool)
