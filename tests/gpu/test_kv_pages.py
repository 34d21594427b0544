"""Copies between pages and the wire: the same bytes as on a CPU, and the same codes as the reference."""

from __future__ import annotations

import math

import pytest
import torch
from baton.engine.kv_copy import Pages
from baton.kernels import reference
from baton.kernels.gpu.kv_pages import DevicePages

SHAPES = [(2, 3, 4, 16), (1, 1, 1, 4), (2, 2, 24, 2), (1, 3, 8, 80)]  # layers, heads, block size, D
CODES = {"int8": torch.int8, "fp8": torch.uint8}


def pool_of(shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    layers, heads, size, dim = shape
    return torch.randn(layers, 2, 7, heads, size, dim, generator=torch.Generator().manual_seed(3)).to(dtype)


def cuts(shape: tuple[int, int, int, int]) -> list[tuple[list[int], tuple[int, int], tuple[int, int], int, int]]:
    """blocks, layers, heads, low, tokens: all, and parts of everything."""
    layers, heads, size, _ = shape
    blocks = [5, 0, 6]
    return [
        (blocks, (0, layers), (0, heads), 0, 3 * size),
        (blocks, (layers - 1, layers), (heads // 2, heads), size - 1, 2 * size + 1),
        (blocks[:1], (0, layers), (heads - 1, heads), size // 2, size - size // 2),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bytes_as_on_a_cpu(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    pool = (10 * pool_of(shape, torch.float32)).to(dtype)
    ours = DevicePages(pool.to(device))
    for blocks, layers, heads, low, tokens in cuts(shape):
        wire = torch.empty(layers[1] - layers[0], 2, heads[1] - heads[0], tokens, shape[3], dtype=dtype)
        found = torch.zeros_like(wire, device=device)
        Pages(pool).gather(blocks, layers, heads, low, tokens, wire)
        ours.gather(blocks, layers, heads, low, tokens, found)
        assert torch.equal(found.cpu(), wire)
        expected, target = pool.clone(), pool.clone().to(device)
        wire = wire.flip(3).contiguous()
        Pages(expected).scatter(blocks, layers, heads, low, tokens, wire)
        DevicePages(target).scatter(blocks, layers, heads, low, tokens, wire.to(device))
        assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("shape", [(2, 3, 4, 16), (1, 1, 24, 8)])
def test_rows_of_codes_travel_with_their_scales(shape: tuple[int, int, int, int], device: torch.device) -> None:
    """A pool of rows (codes, then the scale) on a CPU, and the same with scales apart."""
    layers, heads, size, dim = shape
    rows = torch.randint(-128, 128, (layers, 2, 7, heads, size, dim + 4), dtype=torch.int8)
    codes = rows[..., :dim].contiguous().to(device)
    scales = rows[..., dim:].contiguous().view(torch.float32)[..., 0].contiguous().to(device)
    for blocks, layer_span, head_span, low, tokens in cuts(shape):
        counts = (layer_span[1] - layer_span[0], 2, head_span[1] - head_span[0], tokens)
        wire = torch.empty(*counts, dim + 4, dtype=torch.int8)
        Pages(rows).gather(blocks, layer_span, head_span, low, tokens, wire)
        found = torch.zeros_like(wire, device=device)
        DevicePages(codes, scales).gather(blocks, layer_span, head_span, low, tokens, found)
        assert torch.equal(found.cpu(), wire)
        expected, wire = rows.clone(), wire.flip(3).contiguous()
        Pages(expected).scatter(blocks, layer_span, head_span, low, tokens, wire)
        own, own_scales = codes.clone(), scales.clone()
        DevicePages(own, own_scales).scatter(blocks, layer_span, head_span, low, tokens, wire.to(device))
        assert torch.equal(own.cpu(), expected[..., :dim])
        assert torch.equal(
            own_scales.cpu().view(torch.int32), expected[..., dim:].contiguous().view(torch.int32)[..., 0]
        )


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("shape", [(2, 3, 4, 16), (1, 1, 24, 80)])
def test_the_same_codes_as_the_reference(shape: tuple[int, int, int, int], kind: str, device: torch.device) -> None:
    pool = pool_of(shape, torch.float32)
    pool[0, 0, 5, 0, 0] = 0.0
    pool[0, 1, 0, -1, 1] *= 1e-38  # where scales are at their least
    pool[0, 1, 5, -1, 2, 1] = torch.finfo(torch.float32).max  # and at their largest
    pool[0, 0, 0, 0, 2] = torch.linspace(-448, 448, shape[3])  # every size of code
    ours = DevicePages(pool.to(device))
    for blocks, layers, heads, low, tokens in cuts(shape):
        dims = (layers[1] - layers[0], 2, heads[1] - heads[0], tokens)
        wire = torch.empty(*dims, shape[3])
        Pages(pool).gather(blocks, layers, heads, low, tokens, wire)
        codes, scales = reference.quantize_kv(wire.view(-1, shape[3]), kind)
        found = torch.zeros(*dims, shape[3], dtype=CODES[kind], device=device)
        found_scales = torch.zeros(dims, device=device)
        ours.gather_codes(blocks, layers, heads, low, tokens, found, found_scales)
        assert torch.equal(found_scales.flatten().cpu(), scales)
        assert torch.equal(found.view(-1, shape[3]).cpu(), codes)
        values = reference.dequantize_kv(codes, scales, torch.float32).view(wire.shape)
        expected, target = pool.clone(), pool.clone().to(device)
        Pages(expected).scatter(blocks, layers, heads, low, tokens, values)
        DevicePages(target).scatter_codes(blocks, layers, heads, low, tokens, found, found_scales)
        assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("kind", CODES)
def test_every_code(kind: str, device: torch.device) -> None:
    """And what lies half way between two of them."""
    largest = {"int8": 127.0, "fp8": 448.0}[kind]
    numbers = reference.e4m3_numbers()[:127].float() if kind == "fp8" else torch.arange(0.0, 128.0)
    between = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat((numbers, between, torch.nextafter(between, torch.tensor(math.inf)), -numbers, -between))
    rows = torch.nn.functional.pad(values, (0, -len(values) % 63)).view(-1, 63)
    rows = torch.nn.functional.pad(rows, (0, 1), value=largest)  # so that the scale is one
    pool = rows.new_zeros(1, 2, 1, 1, len(rows), 64)
    pool[0, :, 0, 0] = rows
    codes = torch.zeros(1, 2, 1, len(rows), 64, dtype=CODES[kind], device=device)
    scales = torch.zeros(1, 2, 1, len(rows), device=device)
    DevicePages(pool.to(device)).gather_codes([0], (0, 1), (0, 1), 0, len(rows), codes, scales)
    expected, _ = reference.quantize_kv(rows, kind)
    assert torch.equal(codes[0, 0, 0].cpu(), expected)
    assert (scales == 1).all()


@pytest.mark.filterwarnings("ignore:invalid value")  # the codes mean nothing
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_shows(value: float, device: torch.device) -> None:
    pool = torch.ones(1, 2, 1, 1, 4, 8)
    pool[0, 1, 0, 0, 2, 5] = value
    codes = torch.zeros(1, 2, 1, 4, 8, dtype=torch.int8, device=device)
    scales = torch.zeros(1, 2, 1, 4, device=device)
    DevicePages(pool.to(device)).gather_codes([0], (0, 1), (0, 1), 0, 4, codes, scales)
    assert scales.isfinite().flatten().tolist() == [True] * 6 + [False, True]


def test_rows_are_whole_words(device: torch.device) -> None:
    with pytest.raises(ValueError, match="whole words"):
        DevicePages(torch.zeros(1, 2, 3, 1, 4, 3, dtype=torch.bfloat16, device=device))


def test_blocks_outside_the_pool_are_refused(device: torch.device) -> None:
    pages, memory = DevicePages(torch.zeros(1, 2, 3, 1, 4, 8, device=device)), torch.zeros(1, 2, 1, 4, 8, device=device)
    with pytest.raises(ValueError, match="of a pool of 3"):
        pages.gather([3], (0, 1), (0, 1), 0, 4, memory)
