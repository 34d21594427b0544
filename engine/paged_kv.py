"""The KV pool of one rank as a tensor, and the copies into and out of it.

[layers, k|v, blocks, heads of this rank, tokens in a block, row]: a slice of heads of a block is contiguous. A row is
head_dim values, or as many codes and their scale (kernels/kv_rows.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.kv_pages import NativePages, Span
from ..kernels.kv_quantize import CODES
from ..kernels.kv_rows import plain, row_width
from ..kernels.memory import prefer_huge_pages
from ..kernels.native import library
from ..proto.kv_layout import KVLayout, block_count
from .kv_copy import Pages, segments, split

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | CODES


def bytes_per_block(layout: KVLayout, rank: int) -> int:
    """Bytes of one block in the pool of `rank`."""
    start, stop = layout.head_ranges[rank]
    dtype, rows = KV_DTYPES[layout.dtype], layout.layers * 2 * (stop - start) * layout.block_size
    return rows * row_width(layout.head_dim, dtype) * dtype.itemsize


class PagedKV:
    """A pool of `blocks` blocks for the heads of `rank`.

    `gather` and `scatter` come from transfer threads while a step computes: they touch the named blocks only, and who
    may touch which block when is the owner's business (engine thread and transfer book).
    """

    def __init__(self, layout: KVLayout, rank: int, blocks: int, device: torch.device) -> None:
        start, stop = layout.head_ranges[rank]
        self.block_size = layout.block_size
        # Zeros, because kernels may read and then mask the unwritten end of a block: it must hold numbers.
        dtype = KV_DTYPES[layout.dtype]
        self._row = row_width(layout.head_dim, dtype)
        shape = (layout.layers, 2, blocks, stop - start, layout.block_size, self._row)
        self.data = torch.empty(shape, dtype=dtype, device=device)
        self._plain = plain(prefer_huge_pages(self.data)).zero_()
        self._keys, self._values = (self.data[:, kind].unbind() for kind in (0, 1))
        self._limits = (layout.layers, blocks, stop - start)
        self._pages = _pages(self._plain)

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self.data.device

    def key(self, layer: int) -> Tensor:
        """A view [blocks, heads, block_size, row]."""
        return self._keys[layer]

    def value(self, layer: int) -> Tensor:
        """A view [blocks, heads, block_size, row]."""
        return self._values[layer]

    def gather(
        self, blocks: Sequence[int], layers: Span, heads: Span, tokens: Span, out: Tensor | None = None
    ) -> Tensor:
        """A contiguous copy [layers, 2, heads, tokens, row] of a range of a sequence's tokens.

        `blocks[i]` holds the sequence's tokens [i * block_size, (i + 1) * block_size); ranges are half open; `heads`
        counts this rank's heads from 0. With `out` (contiguous: so many elements of the pool's dtype, or their bytes as
        uint8; on any device) the copy is made there and `out` is returned as it is, without another copy on the way
        where both are in CPU memory. Raises ValueError for a range outside the pool and for another size of `out`.
        """
        first, whole = self._cover(blocks, layers, heads, tokens)
        shape, low = self._wire_shape(layers, heads, tokens), tokens[0] - first * self.block_size
        if out is None:
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._check_size(out, shape)
        if self._pages is not None and out.device == self.device:
            self._pages.gather(whole, layers, heads, low, shape[3], out)
            return out
        index = torch.tensor(whole, dtype=torch.int64, device=self.device)
        part = self._plain[layers[0] : layers[1], :, :, heads[0] : heads[1]].index_select(2, index)
        # [layers, 2, blocks, heads, block_size, row] -> heads first, then the tokens of all blocks
        part = part.transpose(2, 3).flatten(3, 4)[:, :, :, low : low + shape[3]]
        out.view(-1).view(self._plain.dtype).view(shape).copy_(part)
        return out

    def scatter(self, blocks: Sequence[int], layers: Span, heads: Span, tokens: Span, payload: Tensor) -> None:
        """Write what `gather` returned, with or without `out`; on any device.

        Raises ValueError for another size, a dtype that is neither the pool's nor uint8, and a range outside the pool.
        """
        first, whole = self._cover(blocks, layers, heads, tokens)
        shape, size, low = self._wire_shape(layers, heads, tokens), self.block_size, tokens[0] - first * self.block_size
        self._check_size(payload, shape)
        if payload.dtype == self.dtype and payload.shape != shape:
            raise ValueError(f"KV of {tuple(payload.shape)} where {shape} belongs")
        payload = payload.to(self.device)
        if self._pages is not None:
            self._pages.scatter(whole, layers, heads, low, shape[3], payload)
            return
        kv = payload.view(-1).view(self._plain.dtype).view(shape)
        target = self._plain[layers[0] : layers[1], :, :, heads[0] : heads[1]]
        for done, block, offset, run in segments(low, shape[3], size):
            if run:  # whole blocks
                index = torch.tensor(whole[block : block + run], dtype=torch.int64, device=self.device)
                target[:, :, index] = split(kv[:, :, :, done : done + run * size], size).transpose(2, 3)
            else:
                part = min(size - offset, shape[3] - done)
                target[:, :, whole[block], :, offset : offset + part] = kv[:, :, :, done : done + part]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each source block over its destination, all layers and heads: (source, destination)."""
        if pairs:
            source, destination = torch.tensor(list(pairs), dtype=torch.int64, device=self.device).unbind(1)
            self._plain[:, :, destination] = self._plain[:, :, source]

    def _check_size(self, memory: Tensor, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless `memory` is a contiguous copy of KV of that shape, or its bytes."""
        if (
            memory.nbytes != math.prod(shape) * self.dtype.itemsize
            or memory.dtype not in (self.dtype, torch.uint8)
            or not memory.is_contiguous()
        ):
            raise ValueError(f"{tuple(memory.shape)} {memory.dtype} where KV of {shape} {self.dtype} belongs")

    def _wire_shape(self, layers: Span, heads: Span, tokens: Span) -> tuple[int, int, int, int, int]:
        return (layers[1] - layers[0], 2, heads[1] - heads[0], tokens[1] - tokens[0], self._row)

    def _cover(self, blocks: Sequence[int], layers: Span, heads: Span, tokens: Span) -> tuple[int, Sequence[int]]:
        """The first of the sequence's blocks that `tokens` touches, and all of them, after checking every range."""
        first, last = tokens[0] // self.block_size, block_count(tokens[1], self.block_size)
        if not (
            0 <= layers[0] < layers[1] <= self._limits[0]
            and 0 <= heads[0] < heads[1] <= self._limits[2]
            and 0 <= tokens[0] < tokens[1] <= len(blocks) * self.block_size
        ):
            raise ValueError(
                f"layers {layers}, heads {heads}, tokens {tokens} of {len(blocks)} blocks: not in this pool"
            )
        whole = blocks[first:last]
        if min(whole) < 0 or max(whole) >= self._limits[1]:
            raise ValueError(f"blocks {min(whole)}..{max(whole)} of a pool of {self._limits[1]}")
        return first, whole


def _pages(data: Tensor) -> Pages | NativePages | None:
    """What copies whole pages of a pool in CPU memory."""
    if data.device.type != "cpu":
        return None
    return Pages(data) if library() is None else NativePages(data)
