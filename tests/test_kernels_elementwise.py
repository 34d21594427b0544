"""Norm, rotation, gate and cache writes against the plain reference; rows do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from baton.kernels import cpu_attention, reference
from baton.kernels.rms_norm import rms_norm
from baton.kernels.rotary import angles, rotate
from baton.kernels.silu_mul import silu_mul

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-2}


def _normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 576), (37, 576), (5, 9, 64), (512, 4096)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, weight = _normal(*shape, dtype=dtype), 1 + 0.1 * _normal(shape[-1], dtype=dtype, seed=1)
    ours, tolerance = rms_norm(rows, weight, 1e-5), TOLERANCE[dtype]
    torch.testing.assert_close(ours, reference.rms_norm(rows, weight, 1e-5), atol=tolerance, rtol=tolerance)
    assert torch.equal(rms_norm(rows[-1:], weight, 1e-5), ours[-1:])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_rotate(dim: int, dtype: torch.dtype) -> None:
    heads, positions = _normal(21, 5, dim, dtype=dtype), torch.arange(100, 121)
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles(positions, frequencies, 1.1, dtype)
    ours, tolerance = rotate(heads, cos, sin), TOLERANCE[dtype]
    expected = reference.rotate(heads, positions, frequencies, 1.1)
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(rotate(heads[7:8], cos[7:8], sin[7:8]), ours[7:8])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up, tolerance = _normal(33, 200, dtype=dtype), TOLERANCE[dtype]
    ours = silu_mul(gate_up)
    torch.testing.assert_close(ours, reference.silu_mul(gate_up), atol=tolerance, rtol=tolerance)
    assert torch.equal(silu_mul(gate_up[3:4]), ours[3:4])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_write_and_gather(dtype: torch.dtype) -> None:
    heads, slots = _normal(6, 3, 8, dtype=dtype), torch.tensor([20, 21, 22, 23, 4, 5])
    pool, expected = torch.zeros(7, 3, 4, 8, dtype=dtype), torch.zeros(7, 3, 4, 8, dtype=dtype)
    cpu_attention.write_kv(pool, cpu_attention.kv_rows(slots, pool), heads)
    reference.write_kv(expected, slots, heads)
    assert torch.equal(pool, expected)
    assert torch.equal(reference.gather_kv(pool, [5, 1], 6), heads.transpose(0, 1))
