"""Copies between a pool's blocks and KV in wire order, on the CPU: one pass over the bytes, nothing allocated.

Wire order is [layers, k|v, heads, tokens, row]. numpy moves whole pages (one head's tokens of one block) as opaque
items, several times faster than torch moves the elements of such strided views; both release the GIL while they copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.kv_pages import Span

_SHORT_RUN_BYTES = 48 << 10  # a run of blocks with less in it is not worth a numpy call of its own


class Pages:
    """What kernels/kv_pages.py does in C, for a pool [layers, 2, blocks, heads, block_size, row] in CPU memory.

    In both calls `blocks` are those that the tokens touch, the first token being `low` tokens into the first of them;
    `memory` is contiguous KV [layers, 2, heads, tokens, row] of the pool's dtype, or the same bytes as uint8.
    """

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self._size = data.shape[4]
        self._items = _opaque(data, self._size)[..., 0]  # [layers, 2, blocks, heads]

    def gather(self, blocks: Sequence[int], layers: Span, heads: Span, low: int, tokens: int, memory: Tensor) -> None:
        """Copy out of the pool into `memory`."""
        kv = self._shaped(memory, layers, heads, tokens)
        for done, block, offset, run in segments(low, tokens, self._size):
            if not run:
                part = min(self._size - offset, tokens - done)
                kv[:, :, :, done : done + part] = self._rows(layers, heads, blocks[block], offset, part)
                continue
            picked = blocks[block : block + run]
            target = kv[:, :, :, done : done + run * self._size]
            runs = list(_runs(picked))
            if target.numel() * target.element_size() < len(runs) * _SHORT_RUN_BYTES:
                source = self._data[layers[0] : layers[1], :, :, heads[0] : heads[1]].transpose(2, 3)
                index = torch.tensor(picked, dtype=torch.int64)
                torch.index_select(source, 3, index, out=split(target, self._size))
                continue
            items, pool = _opaque(target, self._size), self._picked(layers, heads).swapaxes(2, 3)
            for start, stop, at in runs:
                np.copyto(items[:, :, :, start:stop], pool[:, :, :, at : at + stop - start])

    def scatter(self, blocks: Sequence[int], layers: Span, heads: Span, low: int, tokens: int, memory: Tensor) -> None:
        """Copy `memory` into the pool; the inverse of `gather`."""
        kv = self._shaped(memory, layers, heads, tokens)
        for done, block, offset, run in segments(low, tokens, self._size):
            if not run:
                part = min(self._size - offset, tokens - done)
                self._rows(layers, heads, blocks[block], offset, part).copy_(kv[:, :, :, done : done + part])
                continue
            picked = blocks[block : block + run]
            items = _opaque(kv[:, :, :, done : done + run * self._size], self._size).swapaxes(2, 3)
            pool, runs = self._picked(layers, heads), list(_runs(picked))
            if items.nbytes < len(runs) * _SHORT_RUN_BYTES:
                pool[:, :, picked] = items
                continue
            for start, stop, at in runs:
                np.copyto(pool[:, :, at : at + stop - start], items[:, :, start:stop])

    def _shaped(self, memory: Tensor, layers: Span, heads: Span, tokens: int) -> Tensor:
        shape = (layers[1] - layers[0], 2, heads[1] - heads[0], tokens, self._data.shape[5])
        return memory.view(-1).view(self._data.dtype).view(shape)

    def _rows(self, layers: Span, heads: Span, block: int, offset: int, count: int) -> Tensor:
        """Some tokens of one block, [layers, 2, heads, count, head_dim]."""
        return self._data[layers[0] : layers[1], :, block, heads[0] : heads[1], offset : offset + count]

    def _picked(self, layers: Span, heads: Span) -> Any:
        """The pages of some layers and heads, [layers, 2, blocks, heads]."""
        return self._items[layers[0] : layers[1], :, :, heads[0] : heads[1]]


def segments(low: int, tokens: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """How `tokens` tokens from token `low` on lie in blocks of `size`: (tokens before, block, offset in it, run).

    `run` is a number of whole blocks, or 0 for a part of one block.
    """
    done = 0
    while done < tokens:
        block, offset = divmod(low + done, size)
        run = 0 if offset else (tokens - done) // size
        yield done, block, offset, run
        done += run * size or min(size - offset, tokens - done)


def split(kv: Tensor, size: int) -> Tensor:
    """Whole blocks of KV [layers, 2, heads, tokens, row] as a view [layers, 2, heads, blocks, size, head_dim]."""
    return kv.view(*kv.shape[:3], kv.shape[3] // size, size, kv.shape[4])


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches of consecutive blocks: (from, to, the block at `from`), indices into `blocks`."""
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield start, index, blocks[start]
            start = index


def _opaque(tensor: Tensor, size: int) -> Any:
    """A numpy view in which each page of `size` rows is one item: [..., rows, dim] becomes [..., rows / size]."""
    raw: Any = tensor.view(torch.uint8).numpy()
    page = size * raw.shape[-1]
    return raw.reshape(*raw.shape[:-2], raw.shape[-2] // size, page).view(f"V{page}")[..., 0]
