"""Norm, rotation, gate and cache writes against the plain reference; rows do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from baton.kernels import native, reference, rotary
from baton.kernels import rms_norm as norms
from baton.kernels import silu_mul as gates
from baton.kernels.kv_quantize import CODES
from baton.kernels.kv_rows import convert, plain
from baton.kernels.native import LEVELS
from baton.kernels.rms_norm import add_rms_norm, rms_norm
from baton.kernels.rotary import Rotation, angles, kv_rows, rotate, write_kv
from baton.kernels.silu_mul import silu_mul

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 3e-2}


@pytest.fixture(params=["torch", *LEVELS])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each way to run an operation: torch's, and C at each level of the processor."""
    if request.param == "torch":
        for module in (norms, rotary, gates):
            monkeypatch.setattr(module, "function", lambda name, arguments: None)
        return 0
    if native.library() is None:
        pytest.skip("no C kernels here")
    return LEVELS[request.param]


def _normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 576), (37, 576), (5, 9, 64), (5, 37), (512, 4096)])
def test_rms_norm(level: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, weight = _normal(*shape, dtype=dtype), 1 + 0.1 * _normal(shape[-1], dtype=dtype, seed=1)
    ours, tolerance = rms_norm(rows, weight, 1e-5, level), TOLERANCE[dtype]
    torch.testing.assert_close(ours, reference.rms_norm(rows, weight, 1e-5), atol=tolerance, rtol=tolerance)
    assert torch.equal(rms_norm(rows[-1:], weight, 1e-5, level), ours[-1:])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [576, 37])
def test_add_rms_norm_is_an_addition_and_a_norm(level: int, size: int, dtype: torch.dtype) -> None:
    rows, part = _normal(9, size, dtype=dtype), _normal(9, size, dtype=dtype, seed=1)
    weight, total = 1 + 0.1 * _normal(size, dtype=dtype, seed=2), rows + part
    ours = add_rms_norm(rows, part, weight, 1e-5, level)
    assert torch.equal(rows, total)
    assert torch.equal(ours, rms_norm(total, weight, 1e-5, level))


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
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_a_rotation_on_the_way_into_the_pool(level: int, dim: int, dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Bit for bit what torch's operations give, one after the other."""
    heads, slots = _normal(40, 5 + 2 * 2, dim, dtype=dtype), torch.randperm(64)[:40]
    cos, sin = angles(torch.arange(100, 140), 10000.0 ** (-torch.arange(0, dim, 2) / dim), 1.1, dtype)
    turned = rotate(heads[:, :7], cos, sin)
    pools, expected = torch.zeros(2, 2, 16, 2, 4, dim, dtype=pool_dtype).unbind()
    for pool, part in zip(expected, (turned[:, 5:], heads[:, 7:]), strict=True):
        write_kv(pool, kv_rows(slots, pool), part)
    queries = Rotation(cos, sin, slots, pools[0], level).apply(heads, pools[0], pools[1])
    assert torch.equal(queries, turned[:, :5])
    assert torch.equal(pools, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("dim", [16, 64, 80, 24])
def test_a_rotation_into_codes(level: int, dim: int, dtype: torch.dtype, kind: str) -> None:
    """The reference's codes and scales of what the plain operations give, bit for bit; NaN for what is not finite."""
    heads, slots = 3 * _normal(40, 5 + 2 * 2, dim, dtype=dtype), torch.randperm(64)[:40]
    for row, (part, size) in enumerate(((5, 0), (6, 1e-6), (5, 1e30), (7, 1e-39), (8, 0), (7, 1e30))):
        heads[row, part] *= size
    heads[9, 8, 1], heads[10, 5, 0], heads[11, 7, dim - 1] = float("nan"), float("inf"), -float("inf")
    cos, sin = angles(torch.arange(100, 140), 10000.0 ** (-torch.arange(0, dim, 2) / dim), 1.1, dtype)
    written = torch.cat((rotate(heads[:, :7], cos, sin)[:, 5:], heads[:, 7:]), 1)
    pools = [convert(torch.zeros(16, 2, 4, dim), CODES[kind]) for _ in range(2)]
    Rotation(cos, sin, slots, pools[0], level).apply(heads, *pools)
    rows = torch.stack([plain(pool)[slots // 4, :, slots % 4] for pool in pools], 1).view(-1, dim + 4)
    got, values = rows[:, dim:].clone().view(torch.float32)[:, 0], written.reshape(-1, dim)
    finite = values.isfinite().all(-1)
    codes, scales = reference.quantize_kv(values[finite], kind)
    assert torch.equal(got[finite], scales)
    assert torch.equal(rows[finite, :dim], codes.view(torch.uint8))
    assert int((~finite).sum()) == 3
    assert got[~finite].isnan().all()
    assert convert(rows.view(CODES[kind]), torch.bfloat16).isnan().all(-1).equal(~finite)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [100, 64])
def test_silu_mul(level: int, size: int, dtype: torch.dtype) -> None:
    gate_up, tolerance = 20 * _normal(33, 2 * size, dtype=dtype), TOLERANCE[dtype]
    gate_up[0, :4] = torch.tensor([100.0, -100.0, 0.0, -1e4])
    ours = silu_mul(gate_up, level)
    torch.testing.assert_close(ours, reference.silu_mul(gate_up), atol=tolerance, rtol=tolerance)
    assert torch.equal(silu_mul(gate_up[3:4], level), ours[3:4])


def test_not_a_number_stays_visible(level: int) -> None:
    rows, weight = torch.ones(2, 40), torch.ones(40)
    rows[1, 7] = float("nan")
    assert rms_norm(rows, weight, 1e-5, level).isnan().any(dim=1).tolist() == [False, True]
    assert silu_mul(rows, level).isnan().any(dim=1).tolist() == [False, True]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_write_and_gather(dtype: torch.dtype) -> None:
    heads, slots = _normal(6, 3, 8, dtype=dtype), torch.tensor([20, 21, 22, 23, 4, 5])
    pool, expected = torch.zeros(7, 3, 4, 8, dtype=dtype), torch.zeros(7, 3, 4, 8, dtype=dtype)
    write_kv(pool, kv_rows(slots, pool), heads)
    reference.write_kv(expected, slots, heads)
    assert torch.equal(pool, expected)
    assert torch.equal(reference.gather_kv(pool, [5, 1], 6), heads.transpose(0, 1))
