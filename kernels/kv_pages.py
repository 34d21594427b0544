"""Whole KV pages by C: the copies of c/kv_pages.c over a pool in CPU memory."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from torch import Tensor

from .native import library

Span = tuple[int, int]  # half-open


class _Pool(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("blocks", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    )


class NativePages:
    """Copies for a pool [layers, 2, blocks, heads, block_size, row], contiguous in CPU memory.

    Raises OSError where there is no library.
    """

    def __init__(self, data: Tensor) -> None:
        if (native := library()) is None:
            raise OSError("no C kernels")
        _, _, blocks, heads, size, dim = data.shape
        self._keep = data
        self._pool = _Pool(data.data_ptr(), blocks, heads, size, dim * data.element_size())
        self._where = ctypes.addressof(self._pool)
        self._copy = native.baton_copy_pages
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 7, ctypes.c_void_p, ctypes.c_int]
        self._copy.restype = ctypes.c_int

    def gather(self, blocks: Sequence[int], layers: Span, heads: Span, low: int, tokens: int, memory: Tensor) -> None:
        """Copy [layers, 2, heads, tokens, row] out of the pool into `memory` (contiguous, so many bytes).

        `blocks` are those that the tokens touch, the first token being `low` tokens into the first of them. The ranges
        of layers, heads and tokens are the caller's to check. Raises ValueError for a block that is not in the pool.
        """
        self._move(blocks, layers, heads, low, tokens, memory, 0)

    def scatter(self, blocks: Sequence[int], layers: Span, heads: Span, low: int, tokens: int, memory: Tensor) -> None:
        """Copy `memory` into the pool; the inverse of `gather`."""
        self._move(blocks, layers, heads, low, tokens, memory, 1)

    def _move(
        self, blocks: Sequence[int], layers: Span, heads: Span, low: int, tokens: int, memory: Tensor, to_pool: int
    ) -> None:
        where, count = (table := array("q", blocks)).buffer_info()
        extents = (layers[0], layers[1] - layers[0], heads[0], heads[1] - heads[0])
        if self._copy(self._where, where, count, low, tokens, *extents, memory.data_ptr(), to_pool):
            raise ValueError(f"blocks {min(table)}..{max(table)} of a pool of {self._pool.blocks}")
