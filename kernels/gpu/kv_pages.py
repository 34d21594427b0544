"""KV between pages and the wire, on a GPU: one launch for all layers of a group, with few programs.

Wire order is [layers, k|v, heads, tokens, head_dim], so any cut of heads between ranks is a range. A program takes one
run after the other (one head's tokens of one page); how many run at once is part of configurations.yaml, because a
copy should leave most of the GPU to the step that it overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_pages import Span
from .kv_codes import KINDS, encode, widen
from .launch import sizes

_CHUNK = 2048  # words that a program moves at a time, at most
_TILE = 2048  # values that a program quantises at a time, at most


@triton.jit
def _run(item, blocks, pages, heads, low, tokens, PAGE: tl.constexpr):
    """Of one item: its layer (k and v counted apart), head, block, first token in it, place on the wire, and length."""
    page = item % pages
    head = item // pages % heads
    layer = item // (pages * heads)
    begin = tl.maximum(page * PAGE, low)
    end = tl.minimum((page + 1) * PAGE, low + tokens)
    block = tl.load(blocks + page).to(tl.int64)
    wire = (layer * heads + head).to(tl.int64) * tokens + begin - low
    return layer, head, block, begin - page * PAGE, wire, end - begin


@triton.jit
def _copy(
    table,
    wire,
    blocks,
    items,
    pages,
    heads,
    first_head,
    low,
    tokens,
    stride_block,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    TO_POOL: tl.constexpr,
):
    """Rows of ROW words of four bytes, whatever they hold."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        layer, head, block, first, place, count = _run(item, blocks, pages, heads, low, tokens, PAGE)
        pool = tl.load(table + layer).to(tl.pointer_type(tl.int32))
        if ALIGNED:
            pool = tl.multiple_of(pool, 16)  # nothing is known of an address that was read from memory
        pool += block * stride_block + ((first_head + head) * PAGE + first) * ROW
        target = wire + place * ROW
        for start in range(0, PAGE * ROW, CHUNK):
            word = start + tl.arange(0, CHUNK)
            inside = word < count * ROW
            if TO_POOL:
                tl.store(pool + word, tl.load(target + word, mask=inside), mask=inside)
            else:
                tl.store(target + word, tl.load(pool + word, mask=inside), mask=inside)


@triton.jit
def _copy_rows(
    table,
    scale_table,
    wire,
    blocks,
    items,
    pages,
    heads,
    first_head,
    low,
    tokens,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    TO_POOL: tl.constexpr,
):
    """Rows of codes: WORDS words in the pool, and behind them on the wire their scale."""
    wide: tl.constexpr = WORDS + 1
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        layer, head, block, first, place, count = _run(item, blocks, pages, heads, low, tokens, PAGE)
        at = (block * HEADS + first_head + head) * PAGE + first
        codes = tl.load(table + layer).to(tl.pointer_type(tl.int32)) + at * WORDS
        scales = tl.load(scale_table + layer).to(tl.pointer_type(tl.int32)) + at
        target = wire + place * wide
        for start in range(0, PAGE * wide, CHUNK):
            word = start + tl.arange(0, CHUNK)
            row, column = word // wide, word % wide
            inside = word < count * wide
            is_code, is_scale = inside & (column < WORDS), inside & (column == WORDS)
            if TO_POOL:
                value = tl.load(target + word, mask=inside)
                tl.store(codes + row * WORDS + column, value, mask=is_code)
                tl.store(scales + row, value, mask=is_scale)
            else:
                value = tl.load(codes + row * WORDS + column, mask=is_code, other=0)
                value |= tl.load(scales + row, mask=is_scale, other=0)
                tl.store(target + word, value, mask=inside)


@triton.jit
def _convert(
    table,
    codes,
    scales,
    like,
    blocks,
    items,
    pages,
    heads,
    first_head,
    low,
    tokens,
    stride_block,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    TO_POOL: tl.constexpr,
):
    """Rows of DIM values of the type of `like`, as codes and a scale on the wire."""
    column = tl.arange(0, WIDTH)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        layer, head, block, first, place, count = _run(item, blocks, pages, heads, low, tokens, PAGE)
        pool = tl.load(table + layer).to(tl.pointer_type(like.dtype.element_ty))
        if ALIGNED:
            pool = tl.multiple_of(pool, 16)
        pool += block * stride_block + ((first_head + head) * PAGE + first) * DIM
        for start in range(0, PAGE, TILE):
            token = start + tl.arange(0, TILE)
            there = token < count
            inside = there[:, None] & (column < DIM)[None, :]
            value = token[:, None] * DIM + column[None, :]
            if TO_POOL:
                code = tl.load(codes + place * DIM + value, mask=inside, other=0)
                scale = tl.load(scales + place + token, mask=there, other=0.0)
                numbers = widen(code, KIND, tl.float32)
                if KIND == "fp8":
                    numbers *= 256.0
                tl.store(pool + value, widen(numbers * scale[:, None], "none", like.dtype.element_ty), mask=inside)
            else:
                code, scale = encode(tl.load(pool + value, mask=inside, other=0.0).to(tl.float32), KIND)
                tl.store(codes + place * DIM + value, code, mask=inside)
                tl.store(scales + place + token, scale, mask=there)


class DevicePages:
    """What kernels/kv_pages.py does, for a pool [layers, 2, blocks, heads, block_size, head_dim] on a GPU.

    A pool of codes has its `scales` apart, float32 [layers, 2, blocks, heads, block_size], contiguous: the wire's rows
    are the codes and behind them the scale (kernels/kv_rows.py), head_dim + 4 bytes.

    In all calls `blocks` are those that the tokens touch, the first token being `low` tokens into the first of them.
    Everything is queued on the current stream. Ranges are the caller's to check.
    """

    def __init__(self, data: Tensor, scales: Tensor | None = None, programs: int | None = None) -> None:
        """`data` contiguous; rows of head_dim values in whole words of four bytes. Raises ValueError.

        programs: how many copy at once, at most; None: as few as leave the GPU to the step that they overlap.
        """
        if not data.is_contiguous() or data.shape[5] * data.element_size() % 4:
            raise ValueError(f"a pool {list(data.shape)} of strides {data.stride()}: rows must be whole words")
        if scales is not None and (scales.shape != data.shape[:5] or not scales.is_contiguous()):
            raise ValueError(f"scales {list(scales.shape)} of strides {scales.stride()} for a pool {list(data.shape)}")
        _, _, self._blocks, self._heads, self._size, self._dim = data.shape
        addresses = _addresses(data)
        self._aligned = all(address % 16 == 0 for address in addresses)
        self._table = torch.tensor(addresses, dtype=torch.int64, device=data.device)
        self._scale_table = None
        if scales is not None:
            self._scale_table = torch.tensor(_addresses(scales), dtype=torch.int64, device=data.device)
        self._keep = (data, scales)
        self._programs = programs
        self._data = data

    def gather(self, blocks: Sequence[int], layers: Span, heads: Span, low: int, tokens: int, memory: Tensor) -> None:
        """Copy [layers, 2, heads, tokens, head_dim] out of the pool into `memory` (contiguous, so many bytes)."""
        self._move(blocks, layers, heads, low, tokens, memory, False)

    def scatter(self, blocks: Sequence[int], layers: Span, heads: Span, low: int, tokens: int, memory: Tensor) -> None:
        """Copy `memory` into the pool; the inverse of `gather`."""
        self._move(blocks, layers, heads, low, tokens, memory, True)

    def gather_codes(
        self, blocks: Sequence[int], layers: Span, heads: Span, low: int, tokens: int, codes: Tensor, scales: Tensor
    ) -> None:
        """Quantise [layers, 2, heads, tokens, head_dim] of the pool: `codes` of that shape (int8, or e4m3 as uint8) and
        `scales` float32 [layers, 2, heads, tokens], both contiguous; see kernels/kv_quantize.py.

        A value that is not finite shows as a scale that is not: look at the scales before the codes are used.
        """
        self._quantised(blocks, layers, heads, low, tokens, codes, scales, False)

    def scatter_codes(
        self, blocks: Sequence[int], layers: Span, heads: Span, low: int, tokens: int, codes: Tensor, scales: Tensor
    ) -> None:
        """What codes and scales stand for, into the pool, rounded once to its dtype."""
        self._quantised(blocks, layers, heads, low, tokens, codes, scales, True)

    def _move(
        self, blocks: Sequence[int], layers: Span, heads: Span, low: int, tokens: int, memory: Tensor, to_pool: bool
    ) -> None:
        row = self._dim * self._data.element_size() // 4
        wire = memory.view(-1).view(torch.int32)
        if self._scale_table is not None:
            options = self._options(to_pool)
            del options["ALIGNED"]
            _copy_rows[self._grid(blocks, layers, heads)](
                *(self._table[2 * layers[0] :], self._scale_table[2 * layers[0] :], wire),
                *self._where(blocks, layers, heads, low, tokens),
                HEADS=self._heads,
                WORDS=row,
                CHUNK=min(_CHUNK, triton.next_power_of_2(self._size * (row + 1))),
                **options,
            )
            return
        _copy[self._grid(blocks, layers, heads)](
            *(self._table[2 * layers[0] :], wire, *self._where(blocks, layers, heads, low, tokens)),
            self._heads * self._size * row,
            ROW=row,
            CHUNK=min(_CHUNK, triton.next_power_of_2(self._size * row)),
            **self._options(to_pool),
        )

    def _quantised(
        self,
        blocks: Sequence[int],
        layers: Span,
        heads: Span,
        low: int,
        tokens: int,
        codes: Tensor,
        scales: Tensor,
        to_pool: bool,
    ) -> None:
        shape = (layers[1] - layers[0], 2, heads[1] - heads[0], tokens)
        kind = KINDS.get(codes.dtype)
        for name, tensor, expected in (("codes", codes, (*shape, self._dim)), ("scales", scales, shape)):
            if tuple(tensor.shape) != expected or not tensor.is_contiguous():
                raise ValueError(f"{name} {list(tensor.shape)} where {list(expected)} belongs")
        if kind is None or scales.dtype != torch.float32:
            raise ValueError(f"codes of {codes.dtype}, scales of {scales.dtype}: must be int8 or uint8, and float32")
        width = triton.next_power_of_2(self._dim)
        _convert[self._grid(blocks, layers, heads)](
            *(self._table[2 * layers[0] :], codes, scales, self._data),
            *self._where(blocks, layers, heads, low, tokens),
            self._heads * self._size * self._dim,
            DIM=self._dim,
            WIDTH=width,
            TILE=min(max(1, _TILE // width), triton.next_power_of_2(self._size)),
            KIND=kind,
            **self._options(to_pool),
        )

    def _grid(self, blocks: Sequence[int], layers: Span, heads: Span) -> tuple[int]:
        items = 2 * (layers[1] - layers[0]) * (heads[1] - heads[0]) * len(blocks)
        return (min(items, self._programs or sizes("kv_pages", "all")["PROGRAMS"]),)

    def _where(self, blocks: Sequence[int], layers: Span, heads: Span, low: int, tokens: int) -> tuple[Any, ...]:
        """The arguments that say which runs: blocks, items, pages, heads, first_head, low, tokens."""
        if min(blocks) < 0 or max(blocks) >= self._blocks:
            raise ValueError(f"blocks {min(blocks)}..{max(blocks)} of a pool of {self._blocks}")
        table = torch.tensor(list(blocks), dtype=torch.int64, device=self._data.device)
        count = heads[1] - heads[0]
        items = 2 * (layers[1] - layers[0]) * count * len(blocks)
        return table, items, len(blocks), count, heads[0], low, tokens

    def _options(self, to_pool: bool) -> dict[str, Any]:
        options = sizes("kv_pages", "all")
        del options["PROGRAMS"]
        return {"PAGE": self._size, "ALIGNED": self._aligned, "TO_POOL": to_pool, **options}


def _addresses(data: Tensor) -> list[int]:
    """Of each layer's keys and values, in turn."""
    step = data.stride(1) * data.element_size()
    return [data.data_ptr() + step * index for index in range(data.shape[0] * 2)]
