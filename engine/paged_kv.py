"""The KV pool of one rank as a tensor, and the copies into and out of it.

[layers, k|v, blocks, heads of this rank, tokens in a block, head_dim]: a slice of heads of a block is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.memory import prefer_huge_pages
from ..proto.kv_layout import KVLayout, block_count
from .kv_copy import Pages, segments, split

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def bytes_per_block(layout: KVLayout, rank: int) -> int:
    """Bytes of one block in the pool of `rank`."""
    start, stop = layout.head_ranges[rank]
    values = layout.layers * 2 * (stop - start) * layout.block_size * layout.head_dim
    return values * DTYPES[layout.dtype].itemsize


class PagedKV:
    """A pool of `blocks` blocks for the heads of `rank`.

    `gather` and `scatter` come from transfer threads while a step computes: they touch the named blocks only, and who
    may touch which block when is the owner's business (engine thread and transfer book).
    """

    def __init__(self, layout: KVLayout, rank: int, blocks: int, device: torch.device) -> None:
        start, stop = layout.head_ranges[rank]
        self.block_size = layout.block_size
        # Zeros, because kernels may read and then mask the unwritten end of a block: it must hold numbers.
        shape = (layout.layers, 2, blocks, stop - start, layout.block_size, layout.head_dim)
        self.data = prefer_huge_pages(torch.empty(shape, dtype=DTYPES[layout.dtype], device=device)).zero_()
        self._pages = Pages(self.data) if device.type == "cpu" else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self.data.device

    def key(self, layer: int) -> Tensor:
        """A view [blocks, heads, block_size, head_dim]."""
        return self.data[layer, 0]

    def value(self, layer: int) -> Tensor:
        """A view [blocks, heads, block_size, head_dim]."""
        return self.data[layer, 1]

    def gather(
        self,
        blocks: Sequence[int],
        layers: tuple[int, int],
        heads: tuple[int, int],
        tokens: tuple[int, int],
        out: Tensor | None = None,
    ) -> Tensor:
        """A contiguous copy [layers, 2, heads, tokens, head_dim] of a range of a sequence's tokens.

        `blocks[i]` holds the sequence's tokens [i * block_size, (i + 1) * block_size); ranges are half open; `heads`
        counts this rank's heads from 0. With `out` (contiguous: so many elements of the pool's dtype, or their bytes as
        uint8; on any device) the copy is made there, without another on the way where both are in CPU memory. Raises
        ValueError for a range outside the pool and for another size of `out`.
        """
        first, whole = self._cover(blocks, layers, heads, tokens)
        shape, low = self._wire_shape(layers, heads, tokens), tokens[0] - first * self.block_size
        if out is None:
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
        if out.numel() * out.element_size() != math.prod(shape) * self.dtype.itemsize:
            raise ValueError(f"a buffer of {out.numel()} {out.dtype} for KV of {shape} {self.dtype}")
        kv = out.view(-1).view(self.dtype).view(shape)
        if self._pages is not None and kv.device == self.device:
            self._pages.gather(whole, layers, heads, low, kv)
            return kv
        index = torch.tensor(whole, dtype=torch.int64, device=self.device)
        part = self.data[layers[0] : layers[1], :, :, heads[0] : heads[1]].index_select(2, index)
        # [layers, 2, blocks, heads, block_size, head_dim] -> heads first, then the tokens of all blocks
        return kv.copy_(part.transpose(2, 3).flatten(3, 4)[:, :, :, low : low + shape[3]])

    def scatter(
        self,
        blocks: Sequence[int],
        layers: tuple[int, int],
        heads: tuple[int, int],
        tokens: tuple[int, int],
        payload: Tensor,
    ) -> None:
        """Write what `gather` returned (same shape and dtype, any device).

        Raises ValueError for another shape, dtype or range.
        """
        first, whole = self._cover(blocks, layers, heads, tokens)
        shape, size, low = self._wire_shape(layers, heads, tokens), self.block_size, tokens[0] - first * self.block_size
        if tuple(payload.shape) != shape or payload.dtype != self.dtype:
            raise ValueError(f"KV of {tuple(payload.shape)} {payload.dtype} where {shape} {self.dtype} belongs")
        if self._pages is not None:
            self._pages.scatter(whole, layers, heads, low, payload.cpu().contiguous())
            return
        payload = payload.to(self.device)
        target = self.data[layers[0] : layers[1], :, :, heads[0] : heads[1]]
        for done, block, offset, run in segments(low, shape[3], size):
            if run:  # whole blocks
                index = torch.tensor(whole[block : block + run], dtype=torch.int64, device=self.device)
                pages = split(payload[:, :, :, done : done + run * size], size)
                target[:, :, index] = pages.transpose(2, 3)
            else:
                part = min(size - offset, shape[3] - done)
                target[:, :, whole[block], :, offset : offset + part] = payload[:, :, :, done : done + part]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each source block over its destination, all layers and heads: (source, destination)."""
        if pairs:
            source, destination = torch.tensor(list(pairs), dtype=torch.int64, device=self.device).unbind(1)
            self.data[:, :, destination] = self.data[:, :, source]

    def _wire_shape(
        self, layers: tuple[int, int], heads: tuple[int, int], tokens: tuple[int, int]
    ) -> tuple[int, int, int, int, int]:
        return (layers[1] - layers[0], 2, heads[1] - heads[0], tokens[1] - tokens[0], self.data.shape[5])

    def _cover(
        self, blocks: Sequence[int], layers: tuple[int, int], heads: tuple[int, int], tokens: tuple[int, int]
    ) -> tuple[int, list[int]]:
        """The first of the sequence's blocks that `tokens` touches, and all of them, after checking every range."""
        first, last = tokens[0] // self.block_size, block_count(tokens[1], self.block_size)
        limits = (layers, self.data.shape[0]), (heads, self.data.shape[3]), (tokens, len(blocks) * self.block_size)
        if any(not 0 <= low < high <= limit for (low, high), limit in limits):
            raise ValueError(
                f"layers {layers}, heads {heads}, tokens {tokens} of {len(blocks)} blocks: not in this pool"
            )
        whole = list(blocks[first:last])
        if min(whole) < 0 or max(whole) >= self.data.shape[2]:
            raise ValueError(f"blocks {min(whole)}..{max(whole)} of a pool of {self.data.shape[2]}")
        return first, whole
