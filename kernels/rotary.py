"""Rotary positions: the angles of a step, the rotation of query and key heads (two halves of a head), and the way of
keys and values into the pool; on a CPU by C (c/layer.c)."""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_rows import convert, head_dim_of, plain
from .native import BEST, DTYPES, function


def angles(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D/2] of positions int64 [T] x frequencies [D/2], times `factor`, rounded to `dtype`."""
    angle = positions.float()[:, None, None] * frequencies
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [T, H, D] by cos, sin [T, 1, D/2]: dimension i turns with i + D/2. A new tensor."""
    half = heads.shape[-1] // 2
    left, right = heads[..., :half], heads[..., half:]
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    torch.mul(left, cos, out=out[..., :half]).sub_(right * sin)
    torch.mul(right, cos, out=out[..., half:]).add_(left * sin)
    return out


def kv_rows(slots: Tensor, pool: Tensor) -> Tensor:
    """Where the heads of tokens at slots int64 [T] (block * block_size + offset) lie in the pool seen as [rows, D]."""
    _, heads, size, _ = pool.shape
    block, offset = slots // size, slots % size
    return ((block[:, None] * heads + torch.arange(heads, device=slots.device)) * size + offset[:, None]).reshape(-1)


def write_kv(pool: Tensor, rows: Tensor, heads: Tensor) -> None:
    """Put heads [T, H, D] into pool [blocks, H, block_size, row] at `rows` from `kv_rows`; rows: kernels/kv_rows.py."""
    new = plain(convert(heads.reshape(-1, head_dim_of(pool)), pool.dtype))
    plain(pool).view(-1, pool.shape[3]).index_copy_(0, rows, new)


class Rotation:
    """The angles of a step's T tokens, and their places in pools shaped like `pool` [blocks, H, block_size, row].

    `slots` int64 [T]: block * block_size + offset. They must be in the pool: nothing here checks them.
    """

    def __init__(self, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor, level: int = BEST) -> None:
        self._cos, self._sin, self._slots, self._level = cos, sin, slots, level
        self._run = function("baton_rotate", "ppppppnnnnnnnii") if pool.device.type == "cpu" else None
        self._rows = kv_rows(slots, pool) if self._run is None else slots

    def apply(self, heads: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Rotate queries and keys of heads [T, Hq + 2H, D], contiguous; keys and values go into the pools.

        Returns the queries [T, Hq, D], a part of `heads` or a new tensor; the rest of `heads` means nothing afterwards.
        """
        tokens, count, dim = heads.shape
        kv_heads, size = keys.shape[1:3]
        queries = count - 2 * kv_heads
        if self._run is None:
            turned = rotate(heads[:, : queries + kv_heads], self._cos, self._sin)
            write_kv(keys, self._rows, turned[:, queries:])
            write_kv(values, self._rows, heads[:, queries + kv_heads :])
            return turned[:, :queries]
        parts = (heads, self._cos, self._sin, self._slots, keys, values)
        dtypes = (DTYPES[heads.dtype], DTYPES[keys.dtype])
        shape = (tokens, queries, kv_heads, dim, size)
        self._run(*(part.data_ptr() for part in parts), *shape, *dtypes, torch.get_num_threads(), self._level)
        return heads[:, :queries]
