"""Paged attention on a CPU by C (c/attention*.c): keys and values are read where they are, each byte once a step.

A row's result depends on nothing but its query and the keys and values before it: keys are walked in tiles of 64 from
absolute position 0, whatever the batch, the chunk, the block size and the number of threads. Matrix tiles
(AMX), AVX-512 with bfloat16 products, AVX-512, AVX2 and plain C differ from each other in the last bits; a machine
always takes the same.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from .kv_rows import head_dim_of
from .native import BEST, COMPUTED, DTYPES, library

_LOG2_E = 1.4426950408889634


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "out")),
        *((name, ctypes.c_void_p) for name in ("tables", "table_starts", "cu_seqlens", "context_lens", "scratch")),
        ("scratch_bytes", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("sequences", "query_heads", "kv_heads", "block_size", "head_dim")),
        *((name, ctypes.c_int64) for name in ("query_stride", "query_dtype", "pool_dtype", "threads")),
        ("scale", ctypes.c_float),
    )


class PagedAttention:
    """A step's attention, planned once and run in each layer. Raises OSError where there is no library.

    For pools shaped like `pool` [blocks, H, block_size, row] (kernels/kv_rows.py), contiguous in CPU memory. The
    tokens of sequence i are rows cu_seqlens[i]:cu_seqlens[i + 1], the last ones of its context_lens[i] tokens, and
    block_tables[i] holds its blocks, in order. Raises ValueError for a block that is not in the pool.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        pool: Tensor,
        level: int = BEST,
    ) -> None:
        if (native := library()) is None:
            raise OSError("no C kernels")
        blocks, heads, size, _ = pool.shape
        used = [table[: -(-length // size)] for table, length in zip(block_tables, context_lens, strict=True)]
        tables = array("q", chain.from_iterable(used))
        if tables and not 0 <= min(tables) <= max(tables) < blocks:
            raise ValueError(f"blocks {min(tables)}..{max(tables)} of a pool of {blocks}")
        starts = array("q", accumulate((len(table) for table in used), initial=0))
        arrays = (tables, starts, array("q", cu_seqlens), array("q", context_lens))
        self._keep = arrays
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._level = level
        self._run, self._scratch_bytes = native.baton_attend, native.baton_attention_scratch
        self._scratch_bytes.restype = ctypes.c_int64
        self._call = _Attention(
            **dict(zip(("tables", "table_starts", "cu_seqlens", "context_lens"), map(_address, arrays), strict=True)),
            sequences=len(context_lens),
            kv_heads=heads,
            block_size=size,
            head_dim=head_dim_of(pool),
            pool_dtype=DTYPES[pool.dtype],
            threads=torch.get_num_threads(),
        )
        self._where = ctypes.c_void_p(ctypes.addressof(self._call))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
        """Causal attention of query [T, Hq, D] over keys and values [blocks, H, block_size, row] into out [T, Hq, D].

        The query is float32 or bfloat16 with contiguous tokens; `out` is of its dtype, contiguous. Sums are float32's;
        with bfloat16 on both sides, or bfloat16 and codes, the weights may be rounded to it before their product with
        the values. Codes are multiplied as they are; their scales are factors of the scores and of the weights.
        """
        call = self._call
        if query.stride()[1:] != (query.shape[2], 1):
            raise ValueError(f"queries with strides {query.stride()}")
        self.prepare(query.shape[1], query.stride(0), query.dtype, scale)
        call.query, call.keys, call.values = query.data_ptr(), keys.data_ptr(), values.data_ptr()
        call.out = out.data_ptr()
        self._run(self._where, self._level)

    def prepare(self, heads: int, stride: int, dtype: torch.dtype, scale: float) -> int:
        """Once for all layers of the step: queries of `dtype`, `heads` a token, tokens `stride` numbers apart.

        Returns where C finds the plan, for callers that set the places of queries, pools and results themselves.
        """
        call = self._call
        if call.scratch:
            return ctypes.addressof(call)
        if dtype not in COMPUTED:
            raise ValueError(f"queries of {dtype}")
        call.query_heads, call.query_stride, call.query_dtype = heads, stride, DTYPES[dtype]
        call.scale = scale * _LOG2_E
        call.scratch_bytes = self._scratch_bytes(self._where)
        self._scratch = torch.empty(call.threads * call.scratch_bytes + 64, dtype=torch.uint8)
        call.scratch = -(-self._scratch.data_ptr() // 64) * 64
        return ctypes.addressof(call)


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
