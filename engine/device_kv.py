"""The KV pool of one rank on a GPU.

Like paged_kv.py's, but a quantised pool has its codes and their scales apart: [layers, k|v, blocks, heads, block_size,
head_dim] and the same without head_dim, so that kernels read codes 16 bytes at a time. On the wire both pools' rows are
the same (kernels/kv_rows.py), so GPUs and CPUs hand KV to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.kv_pages import Span
from ..kernels.kv_rows import KINDS, row_width
from ..proto.kv_layout import KVLayout
from .device_edge import Edge, Mark, upload
from .paged_kv import KV_DTYPES, PagedKV

_CODES = {"int8": torch.int8, "fp8": torch.uint8}  # as kernels take them


class DeviceKV(PagedKV):
    """A pool of `blocks` blocks for the heads of `rank`, where `edge` computes."""

    def __init__(self, layout: KVLayout, rank: int, blocks: int, edge: Edge) -> None:
        from ..kernels.gpu.kv_pages import DevicePages

        start, stop = layout.head_ranges[rank]
        self.block_size = layout.block_size
        self._dtype = KV_DTYPES[layout.dtype]
        self._row = row_width(layout.head_dim, self._dtype)
        self._limits = (layout.layers, blocks, stop - start)
        self._edge = edge
        shape = (layout.layers, 2, blocks, stop - start, layout.block_size)
        stored = _CODES[KINDS[self._dtype]] if self._dtype in KINDS else self._dtype
        self.data = torch.zeros(*shape, layout.head_dim, dtype=stored, device=edge.device)
        self.scale_data = torch.zeros(shape, device=edge.device) if self._dtype in KINDS else None
        self._keys, self._values = (self.data[:, kind].unbind() for kind in (0, 1))
        self._device_pages = DevicePages(self.data, self.scale_data)
        self._ahead: tuple[tuple[frozenset[int], Mark], ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements, as they travel."""
        return self._dtype

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Of keys and values, [blocks, heads, block_size] each; None for a pool of floats."""
        return None if self.scale_data is None else (self.scale_data[layer, 0], self.scale_data[layer, 1])

    def runs_ahead(self, blocks: Sequence[int], mark: Mark) -> None:
        """A step writes to these blocks until `mark`, although their owners may be gone before: who is given such a
        block, and fills it from beside the steps, waits. Two such steps are under way at most."""
        self._ahead = (*self._ahead, (frozenset(blocks), mark))[-2:]

    def gather(
        self, blocks: Sequence[int], layers: Span, heads: Span, tokens: Span, out: Tensor | None = None
    ) -> Tensor:
        """See PagedKV. On a stream of the calling thread; the copy is made when this returns."""
        first, whole = self._cover(blocks, layers, heads, tokens)
        shape, low = self._wire_shape(layers, heads, tokens), tokens[0] - first * self.block_size
        if out is not None:
            self._check_size(out, shape)
        with torch.inference_mode(), self._edge.beside():
            near = out
            if near is None or near.device != self.device or near.data_ptr() % 4:
                near = torch.empty(shape, dtype=self.dtype, device=self.device)
            self._device_pages.gather(whole, layers, heads, low, shape[3], near)
            if out is not None and near is not out:
                out.view(-1).view(torch.uint8).copy_(near.view(-1).view(torch.uint8))
        return near if out is None else out

    def scatter(self, blocks: Sequence[int], layers: Span, heads: Span, tokens: Span, payload: Tensor) -> None:
        """See PagedKV. On a stream of the calling thread; it is written when this returns."""
        first, whole = self._cover(blocks, layers, heads, tokens)
        shape, low = self._wire_shape(layers, heads, tokens), tokens[0] - first * self.block_size
        self._check_size(payload, shape)
        for written, mark in self._ahead:
            if not written.isdisjoint(whole):
                mark.wait()
        with torch.inference_mode(), self._edge.beside():
            near = payload.view(-1).view(torch.uint8).to(self.device)
            if near.data_ptr() % 4:
                near = near.clone()
            self._device_pages.scatter(whole, layers, heads, low, shape[3], near)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See PagedKV. Queued between two steps."""
        if not pairs:
            return
        with torch.inference_mode(), self._edge.queue():
            ((source, target),) = upload(self._edge, [torch.tensor(list(pairs), dtype=torch.int64).t().contiguous()])
            for pool in (self.data, self.scale_data):
                if pool is not None:
                    pool[:, :, target] = pool[:, :, source]
