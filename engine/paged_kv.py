"""The KV pool of one rank as a tensor, and the copies into and out of it.

[layers, k|v, blocks, heads of this rank, tokens in a block, head_dim]: a slice of heads of a block is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..proto.kv_layout import KVLayout, block_count

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
        self.data = torch.zeros(
            (layout.layers, 2, blocks, stop - start, layout.block_size, layout.head_dim),
            dtype=DTYPES[layout.dtype],
            device=device,
        )

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
        self, blocks: Sequence[int], layers: tuple[int, int], heads: tuple[int, int], tokens: tuple[int, int]
    ) -> Tensor:
        """A contiguous copy [layers, 2, heads, tokens, head_dim] of a range of a sequence's tokens.

        `blocks[i]` holds the sequence's tokens [i * block_size, (i + 1) * block_size); ranges are half open; `heads`
        counts this rank's heads from 0. Raises ValueError for a range outside the pool.
        """
        first, whole = self._cover(blocks, layers, heads, tokens)
        index = torch.tensor(whole, dtype=torch.int64, device=self.device)
        part = self.data[layers[0] : layers[1], :, :, heads[0] : heads[1]].index_select(2, index)
        # [layers, 2, blocks, heads, block_size, head_dim] -> heads first, then the tokens of all blocks
        part = part.transpose(2, 3).flatten(3, 4)
        low = tokens[0] - first * self.block_size
        return part[:, :, :, low : low + tokens[1] - tokens[0]].contiguous()

    def scatter(
        self,
        blocks: Sequence[int],
        layers: tuple[int, int],
        heads: tuple[int, int],
        tokens: tuple[int, int],
        payload: Tensor,
    ) -> None:
        """Write what `gather` returned (same shape and dtype). Raises ValueError for another shape, dtype or range."""
        first, whole = self._cover(blocks, layers, heads, tokens)
        size, count = self.block_size, tokens[1] - tokens[0]
        shape = (layers[1] - layers[0], 2, heads[1] - heads[0], count, self.data.shape[5])
        if tuple(payload.shape) != shape or payload.dtype != self.dtype:
            raise ValueError(f"KV of {tuple(payload.shape)} {payload.dtype} where {shape} {self.dtype} belongs")
        target = self.data[layers[0] : layers[1], :, :, heads[0] : heads[1]]
        done = 0
        while done < count:
            position = tokens[0] + done
            block, offset = position // size - first, position % size
            if offset == 0 and count - done >= size:  # as many whole blocks as follow, at once
                run = (count - done) // size
                index = torch.tensor(whole[block : block + run], dtype=torch.int64, device=self.device)
                source = payload[:, :, :, done : done + run * size].reshape(*shape[:3], run, size, shape[4])
                target[:, :, index] = source.transpose(2, 3)
                done += run * size
            else:
                part = min(size - offset, count - done)
                target[:, :, whole[block], :, offset : offset + part] = payload[:, :, :, done : done + part]
                done += part

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each source block over its destination, all layers and heads: (source, destination)."""
        if pairs:
            source, destination = torch.tensor(list(pairs), dtype=torch.int64, device=self.device).unbind(1)
            self.data[:, :, destination] = self.data[:, :, source]

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
