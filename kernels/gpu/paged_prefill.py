"""Causal paged attention of any number of new tokens for each sequence; the context, new tokens included, is in pages.

Keys are walked in tiles from absolute position 0, whatever the chunk and the batch, and a masked key adds exactly zero:
so the bits of a row depend on its query, keys and values alone. The query heads that share a KV head lie side by side
in a tile of rows (row r is head r % group of token r // group) and share each read of keys and values.

Where pages hold whole tiles of plain values, GPUs with TMA (compute capability 9.0, 10.x) fetch them by descriptors.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .kv_codes import FACTORS, kind_of, widen
from .launch import sizes
from .paged_decode import LOG2_E, case_of, check_int32, check_query
from .ragged import find_group


@triton.jit
def _fetch(
    keys,
    values,
    key_scales,
    value_scales,
    table,
    start,
    end,
    head,
    stride_block,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    compute: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys and values [TILE, DIM] of the tokens from `start` on, and their scales [TILE]; zeros from `end` on."""
    position = start + tl.arange(0, TILE)
    dim = tl.arange(0, DIM)
    there = position < end if MASKED else position >= 0
    block = tl.load(table + position // PAGE, mask=there, other=0).to(tl.int64)
    where = (block * stride_block + (head * PAGE + position % PAGE) * HEAD_DIM)[:, None] + dim[None, :]
    if MASKED or HEAD_DIM != DIM:
        inside = there[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys + where, mask=inside, other=0)
        v = tl.load(values + where, mask=inside, other=0)
    else:
        k, v = tl.load(keys + where), tl.load(values + where)
    if KIND == "none":
        k_scale = tl.full((TILE,), 1.0, tl.float32)
        v_scale = k_scale
    else:
        place = (block * HEADS + head) * PAGE + position % PAGE
        k_scale = tl.load(key_scales + place, mask=there, other=0.0)
        v_scale = tl.load(value_scales + place, mask=there, other=0.0)
    return widen(k, KIND, compute), widen(v, KIND, compute), k_scale, v_scale


@triton.jit
def _fetch_described(keys, values, table, start, head, HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Keys and values of a whole tile, which lies in one page, through descriptors of [blocks * heads * page, DIM]."""
    block = tl.load(table + start // PAGE)
    row = (block * HEADS + head) * PAGE + start % PAGE
    return keys.load([row, 0]), values.load([row, 0])


@triton.jit
def _accumulate(
    q, k, v, k_scale, v_scale, visible, scale, largest, total, sums, KIND: tl.constexpr, MASKED: tl.constexpr
):
    """One tile more of the running softmax."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if KIND != "none":
        score *= k_scale[None, :]
    if MASKED:
        score = tl.where(visible, score, -float("inf"))
    new_largest = tl.maximum(largest, tl.max(score, 1))
    weight = tl.exp2(score - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.sum(weight, 1)
    if KIND != "none":
        weight *= v_scale[None, :]
    sums = tl.dot(weight.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
    return new_largest, total, sums


@triton.jit
def _prefill(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    described_keys,
    described_values,
    tables,
    cu_seqlens,
    context_lens,
    out,
    scale,
    factor,
    sequences,
    stride_query,
    stride_block,
    stride_table,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = find_group(cu_seqlens, sequences, tile, TOKENS)
    begin = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - begin
    first = (tile - begin // TOKENS - sequence) * TOKENS  # token of the sequence's new ones
    if first >= count:
        return
    before = tl.load(context_lens + sequence) - count  # tokens in front of the new ones
    table = tables + sequence.to(tl.int64) * stride_table
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    token = first + row // GROUP
    is_row = (row < TOKENS * GROUP) & (token < count)
    inside = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    column = (head * GROUP + row % GROUP) * HEAD_DIM
    at = (begin + token).to(tl.int64)
    q = tl.load(query + (at * stride_query + column)[:, None] + dim[None, :], mask=inside, other=0.0)
    compute: tl.constexpr = tl.float32 if WIDE else query.dtype.element_ty
    q = q.to(compute)
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    end = before + tl.minimum(first + TOKENS, count)
    whole = (before + first + 1) // TILE * TILE  # tiles below this are seen by every row
    key = tl.arange(0, TILE)
    for start in range(0, whole, TILE):
        if DESCRIBED:
            k, v = _fetch_described(described_keys, described_values, table, start, head, HEADS, PAGE)
            ks, vs = largest, largest
        else:
            k, v, ks, vs = _fetch(
                keys, values, key_scales, value_scales, table, start, end, head, stride_block,
                HEADS, HEAD_DIM, DIM, PAGE, TILE, KIND, compute, False,
            )  # fmt: skip
        largest, total, sums = _accumulate(q, k, v, ks, vs, True, scale, largest, total, sums, KIND, False)
    for start in range(whole, end, TILE):
        k, v, ks, vs = _fetch(
            keys, values, key_scales, value_scales, table, start, end, head, stride_block,
            HEADS, HEAD_DIM, DIM, PAGE, TILE, KIND, compute, True,
        )  # fmt: skip
        visible = (start + key)[None, :] <= (before + token)[:, None]
        largest, total, sums = _accumulate(q, k, v, ks, vs, visible, scale, largest, total, sums, KIND, True)
    result = sums * (factor / total)[:, None]
    target = out + (at * (HEADS * GROUP * HEAD_DIM) + column)[:, None] + dim[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    scale: float,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention of query [T, Hq, D] over pools [blocks, H, block_size, D]: [T, Hq, D], contiguous.

    The tokens of sequence i are rows cu_seqlens[i]:cu_seqlens[i + 1] (int32 [S + 1]) of the query, and the last ones of
    its context_lens[i] tokens (int32 [S]) in blocks block_tables[i] (int32 [S, n]; what stands behind the last one is
    not looked at). A sequence may have no new token. Query, pools and `scales` as in `paged_decode`; the result has
    the query's dtype. Raises ValueError for shapes and dtypes; lengths and blocks are not checked.
    """
    tokens, heads, dim = query.shape
    kind = kind_of(keys, values, scales)
    _, kv_heads, size, _ = keys.shape
    sequences, group = block_tables.shape[0], heads // kv_heads
    check_query(query, keys)
    check_int32("block_tables", block_tables, sequences, block_tables.shape[-1])
    check_int32("context_lens", context_lens, sequences)
    check_int32("cu_seqlens", cu_seqlens, sequences + 1)
    wide = kind == "none" and keys.dtype != query.dtype
    padded = max(16, triton.next_power_of_2(dim))
    out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
    options = sizes("paged_prefill", case_of(kind, wide or query.dtype == torch.float32, padded))
    described = options.pop("DESCRIBED") and size % options["TILE"] == 0 and dim == padded and keys.is_contiguous()
    rows = max(options.pop("ROWS"), triton.next_power_of_2(group))
    together = rows // group
    if not tokens:
        return out
    _prefill[(tokens // together + sequences, kv_heads)](
        *(query, keys, values, *(scales or (None, None))),
        *(_descriptors(keys, values, options["TILE"]) if described else (None, None)),
        *(block_tables, cu_seqlens, context_lens, out, scale * LOG2_E * FACTORS[kind], FACTORS[kind], sequences),
        *(query.stride(0), keys.stride(0), block_tables.stride(0)),
        HEADS=kv_heads,
        GROUP=group,
        TOKENS=together,
        ROWS=rows,
        HEAD_DIM=dim,
        DIM=padded,
        PAGE=size,
        KIND=kind,
        WIDE=wide,
        DESCRIBED=described,
        **options,
    )
    return out


def _descriptors(keys: Tensor, values: Tensor, tile: int) -> tuple[Any, Any]:
    """Of pools seen as [blocks * H * block_size, D], in boxes of one tile."""
    dim = keys.shape[3]
    return tuple(TensorDescriptor.from_tensor(pool.view(-1, dim), [tile, dim]) for pool in (keys, values))
