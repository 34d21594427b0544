"""Copies into and out of the paged pool, against a plain loop over tokens."""

from __future__ import annotations

import pytest
import torch
from baton.engine import kv_copy
from baton.engine.paged_kv import KV_DTYPES, PagedKV, bytes_per_block
from baton.kernels.kv_pages import NativePages
from baton.kernels.kv_rows import plain
from baton.proto.kv_layout import KVLayout

LAYERS, DIM, BLOCKS = 3, 4, 9


def layout(block_size: int, dtype: str = "float32") -> KVLayout:
    return KVLayout("model", LAYERS, 3, DIM, "default", dtype, block_size, ((0, 2), (2, 3)))


def empty(block_size: int, pages: str = "numpy") -> PagedKV:
    kv = PagedKV(layout(block_size), 0, BLOCKS, torch.device("cpu"))
    if pages == "C" and not isinstance(kv._pages, NativePages):
        pytest.skip("no C kernels here")
    if pages != "C":
        kv._pages = kv_copy.Pages(kv.data) if pages == "numpy" else None
    return kv


def filled(block_size: int, pages: str = "numpy") -> PagedKV:
    kv = empty(block_size, pages)
    kv.data.copy_(torch.arange(kv.data.numel()).view(kv.data.shape))
    return kv


def expected(kv: PagedKV, blocks: list[int], tokens: tuple[int, int]) -> torch.Tensor:
    """[layers, 2, heads, tokens, head_dim], token by token."""
    size = kv.block_size
    return torch.stack([kv.data[:, :, blocks[t // size], :, t % size] for t in range(*tokens)], dim=3)


@pytest.mark.parametrize("pages", ["C", "numpy", "as on another device"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_gather_and_scatter_of_every_range(block_size: int, pages: str) -> None:
    kv, blocks = filled(block_size, pages), [5, 2, 7]
    for low in range(3 * block_size):
        for high in range(low + 1, 3 * block_size + 1):
            payload = kv.gather(blocks, (0, LAYERS), (0, 2), (low, high))
            assert payload.is_contiguous()
            assert torch.equal(payload, expected(kv, blocks, (low, high)))
            target = empty(block_size, pages)
            target.scatter([1, 8, 0], (0, LAYERS), (0, 2), (low, high), payload)
            assert torch.equal(expected(target, [1, 8, 0], (low, high)), payload)
            target.scatter([1, 8, 0], (0, LAYERS), (0, 2), (low, high), payload.view(-1).view(torch.uint8))
            assert torch.equal(expected(target, [1, 8, 0], (low, high)), payload)
            assert torch.count_nonzero(target.data) <= torch.count_nonzero(payload)


@pytest.mark.parametrize("pages", ["C", "numpy", "as on another device"])
@pytest.mark.parametrize("blocks", [[1, 2, 3], [3, 2, 7], [4, 5, 0]])
@pytest.mark.parametrize("short", [1 << 30, 0])
def test_gather_into_a_buffer(blocks: list[int], pages: str, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_copy, "_SHORT_RUN_BYTES", short)
    kv = filled(4, pages)
    for span in ((0, 12), (1, 12), (3, 9)):
        want = expected(kv, blocks, span)
        flat = torch.full((want.numel() * 4 + 64,), 255, dtype=torch.uint8)
        assert kv.gather(blocks, (0, LAYERS), (0, 2), span, flat[:-64]).data_ptr() == flat.data_ptr()
        assert torch.equal(flat[:-64].view(torch.float32), want.flatten())
        assert torch.all(flat[-64:] == 255)
        shaped = torch.empty(want.shape)
        assert kv.gather(blocks, (0, LAYERS), (0, 2), span, shaped).data_ptr() == shaped.data_ptr()
        with pytest.raises(ValueError, match="belongs"):
            kv.gather(blocks, (0, LAYERS), (0, 2), span, flat)


@pytest.mark.parametrize("pages", ["C", "numpy", "as on another device"])
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_rows_with_codes_move_as_they_are(dtype: str, pages: str) -> None:
    """Every bit pattern, codes and scales together, between pools of unequal blocks; and from block to block."""
    pools = [PagedKV(layout(size, dtype), 0, BLOCKS, torch.device("cpu")) for size in (4, 16)]
    for kv in pools:
        if pages == "C" and not isinstance(kv._pages, NativePages):
            pytest.skip("no C kernels here")
        if pages != "C":
            kv._pages = kv_copy.Pages(plain(kv.data)) if pages == "numpy" else None
    source, target = pools
    whole = plain(source.data).copy_(torch.arange(source.data.numel()).view(source.data.shape) % 251)
    blocks, span = [5, 2, 7, 0, 1], ((0, LAYERS), (0, 2), (3, 19))
    moved = source.gather(blocks, *span)
    assert (moved.dtype, moved.shape) == (source.dtype, (LAYERS, 2, 2, 16, DIM + 4))
    rows = torch.stack([plain(whole)[:, :, blocks[t // 4], :, t % 4] for t in range(3, 19)], dim=3)
    assert torch.equal(plain(moved), plain(rows))
    target.scatter([8, 3], *span, moved)
    target.copy_blocks([(8, 0), (3, 4)])
    assert torch.equal(plain(target.gather([0, 4], *span)), plain(moved))
    out = torch.empty(moved.numel(), dtype=torch.uint8)
    assert torch.equal(target.gather([8, 3], *span, out), plain(moved).flatten())


def test_parts_of_layers_and_heads() -> None:
    kv = filled(4)
    part = kv.gather([3, 1], (1, 3), (1, 2), (2, 7))
    assert torch.equal(part, expected(kv, [3, 1], (2, 7))[1:3, :, 1:2])
    target = PagedKV(layout(4), 0, BLOCKS, torch.device("cpu"))
    target.scatter([3, 1], (1, 3), (1, 2), (2, 7), part)
    assert torch.equal(target.gather([3, 1], (1, 3), (1, 2), (2, 7)), part)
    assert not target.data[0].any()
    assert not target.data[:, :, :, 0].any()


def test_unequal_block_sizes_meet_in_the_wire_order() -> None:
    source = filled(4)
    target = PagedKV(layout(16), 0, BLOCKS, torch.device("cpu"))
    blocks = [5, 2, 7, 0, 1]
    for low, high in ((0, 7), (7, 16), (16, 18)):
        target.scatter([8, 3], (0, 3), (0, 2), (low, high), source.gather(blocks, (0, 3), (0, 2), (low, high)))
    assert torch.equal(expected(target, [8, 3], (0, 18)), expected(source, blocks, (0, 18)))


@pytest.mark.parametrize(
    ("layers", "heads", "tokens", "blocks"),
    [
        ((0, 4), (0, 2), (0, 4), [0]),
        ((1, 1), (0, 2), (0, 4), [0]),
        ((0, 3), (0, 3), (0, 4), [0]),
        ((0, 3), (-1, 2), (0, 4), [0]),
        ((0, 3), (0, 2), (0, 5), [0]),
        ((0, 3), (0, 2), (3, 3), [0]),
        ((0, 3), (0, 2), (0, 4), [9]),
        ((0, 3), (0, 2), (0, 4), [-1]),
    ],
)
def test_ranges_outside_the_pool_are_refused(
    layers: tuple[int, int], heads: tuple[int, int], tokens: tuple[int, int], blocks: list[int]
) -> None:
    with pytest.raises(ValueError, match="pool"):
        filled(4).gather(blocks, layers, heads, tokens)


def test_a_payload_of_another_shape_or_dtype_is_refused() -> None:
    kv = filled(4)
    payload = kv.gather([0], (0, 3), (0, 2), (0, 4))
    before = kv.data.clone()
    with pytest.raises(ValueError, match="belongs"):
        kv.scatter([1], (0, 3), (0, 2), (0, 4), payload[:, :, :, :3])
    with pytest.raises(ValueError, match="belongs"):
        kv.scatter([1], (0, 3), (0, 2), (0, 4), payload.bfloat16())
    with pytest.raises(ValueError, match="belongs"):
        kv.scatter([1], (0, 3), (0, 2), (0, 4), payload.transpose(2, 3).contiguous())
    assert torch.equal(kv.data, before)


def test_copy_blocks() -> None:
    kv = filled(4)
    before = kv.data.clone()
    kv.copy_blocks([(0, 3), (5, 1)])
    kv.copy_blocks([])
    assert torch.equal(kv.data[:, :, 3], before[:, :, 0])
    assert torch.equal(kv.data[:, :, 1], before[:, :, 5])
    assert torch.equal(kv.data[:, :, [0, 2, 4, 5, 6, 7, 8]], before[:, :, [0, 2, 4, 5, 6, 7, 8]])


def test_bytes_per_block_are_those_of_the_tensor() -> None:
    for dtype in ("float32", "bfloat16", "int8", "fp8"):
        for rank in (0, 1):
            kv = PagedKV(layout(16, dtype), rank, BLOCKS, torch.device("cpu"))
            assert bytes_per_block(layout(16, dtype), rank) * BLOCKS == kv.data.numel() * kv.data.element_size()
    row = {dtype: bytes_per_block(layout(16, dtype), 1) // (LAYERS * 2 * 16) for dtype in KV_DTYPES}
    assert row == {"float32": 4 * DIM, "bfloat16": 2 * DIM, "float16": 2 * DIM, "int8": DIM + 4, "fp8": DIM + 4}
