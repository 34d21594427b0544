"""Sequences with known queries, keys and values, attended in any pieces over any pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from baton.kernels import reference
from baton.kernels.kv_rows import convert
from baton.kernels.rotary import kv_rows, write_kv
from torch import Tensor


class Attends(Protocol):
    """What a plan of kernels/cpu_attention.py does, and plans of the kernels for GPUs."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
        """Causal attention of query [T, Hq, D] over keys and values [blocks, H, block_size, D] into out [T, Hq, D]."""


Plan = Callable[[Sequence[int], Sequence[int], Sequence[Sequence[int]], Tensor], Attends]


class Case:
    """Sequences with random queries, keys and values for every position, in pages of any size."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, lengths: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(7)

        def normal(length: int, count: int) -> Tensor:
            return torch.randn(length, count, dim, generator=generator).to(dtype)

        self.query = [2 * normal(length, heads) for length in lengths]
        self.keys = [normal(length, kv_heads) for length in lengths]
        self.values = [normal(length, kv_heads) for length in lengths]
        self.scale = dim**-0.5
        self._stored = dtype

    def stored_as(self, dtype: torch.dtype) -> Case:
        """The same with a pool of another dtype."""
        self._stored = dtype
        return self

    def attend(self, pieces: Sequence[tuple[int, int, int]], block_size: int, plan: Plan | None) -> list[Tensor]:
        """Queries [start, stop) of some sequences in one step, behind all that stands before them.

        Without a plan by the plain reference. What the pools hold elsewhere is NaN.
        """
        blocks = [-(-stop // block_size) for _, _, stop in pieces]
        kv_heads, dim = self.keys[0].shape[1:]
        pools = [torch.full((sum(blocks) + 3, kv_heads, block_size, dim), float("nan")) for _ in range(2)]
        keys, values = (convert(pool, self._stored) for pool in pools)
        generator = torch.Generator().manual_seed(block_size)
        free = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
        tables = []
        for (index, _, stop), count in zip(pieces, blocks, strict=True):
            tables.append([free.pop() for _ in range(count)])
            slots = torch.tensor([tables[-1][p // block_size] * block_size + p % block_size for p in range(stop)])
            for pool, source in ((keys, self.keys[index]), (values, self.values[index])):
                write_kv(pool, kv_rows(slots, pool), source[:stop])
        offsets = [0, *accumulate(stop - start for _, start, stop in pieces)]
        query = torch.cat([self.query[index][start:stop] for index, start, stop in pieces])
        ends = [stop for _, _, stop in pieces]
        out = torch.empty_like(query)
        if plan is None:
            out = reference.paged_attention(query, keys, values, offsets, ends, tables, self.scale)
        else:
            plan(offsets, ends, tables, keys).attend(query, keys, values, self.scale, out)
        return [out[a:b] for a, b in pairwise(offsets)]
