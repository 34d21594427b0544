"""Paged attention of one new token for each sequence, over its whole context: split, then merged.

A split is `split` tokens (configurations.yaml) from an absolute multiple of it on, whatever the batch and the context,
and splits are merged in order: so the bits of a row depend on its query, keys and values alone. The query heads of one
KV head are the rows of one tile and share each read of keys and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_codes import FACTORS, kind_of, widen
from .launch import sizes

LOG2_E = 1.4426950408889634
_MERGED = 8  # splits that the merge reads at a time


@triton.jit
def _split(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    context_lens,
    part_sums,
    part_stats,
    scale,
    stride_query,
    stride_block,
    stride_table,
    splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Of one split: sums of weighted values, the largest score (in units of log 2) and the sum of weights."""
    sequence, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(context_lens + sequence)
    begin = split * SPLIT
    if begin >= length:
        return
    end = tl.minimum(begin + SPLIT, length)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    tile = tl.arange(0, TILE)
    is_head, is_dim = row < GROUP, dim < HEAD_DIM
    compute: tl.constexpr = tl.float32 if WIDE else query.dtype.element_ty
    q = tl.load(
        query + sequence * stride_query + (head * GROUP + row)[:, None] * HEAD_DIM + dim[None, :],
        mask=is_head[:, None] & is_dim[None, :],
        other=0.0,
    ).to(compute)
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(begin, end, TILE):
        position = start + tile
        there = position < end
        block = tl.load(tables + sequence * stride_table + position // PAGE, mask=there, other=0).to(tl.int64)
        token = block * stride_block + (head * PAGE + position % PAGE) * HEAD_DIM
        where = token[:, None] + dim[None, :]
        k = tl.load(keys + where, mask=there[:, None] & is_dim[None, :], other=0)
        v = tl.load(values + where, mask=there[:, None] & is_dim[None, :], other=0)
        score = tl.dot(q, tl.trans(widen(k, KIND, compute)), input_precision="ieee") * scale
        if KIND != "none":
            place = (block * HEADS + head) * PAGE + position % PAGE
            score *= tl.load(key_scales + place, mask=there, other=0.0)[None, :]
        score = tl.where(there[None, :], score, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        weight = tl.exp2(score - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weight, 1)
        if KIND != "none":
            weight *= tl.load(value_scales + place, mask=there, other=0.0)[None, :]
        sums = tl.dot(weight.to(compute), widen(v, KIND, compute), sums * shrink[:, None], input_precision="ieee")
        largest = new_largest
    part = ((sequence * HEADS + head) * GROUP + row) * splits + split
    tl.store(part_sums + part[:, None] * HEAD_DIM + dim[None, :], sums, mask=is_head[:, None] & is_dim[None, :])
    tl.store(part_stats + 2 * part, largest, mask=is_head)
    tl.store(part_stats + 2 * part + 1, total, mask=is_head)


@triton.jit
def _merge(
    part_sums,
    part_stats,
    context_lens,
    out,
    factor,
    splits,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGED: tl.constexpr,
):
    """The softmax over all splits of one query head; zeros for a sequence of no tokens."""
    sequence = tl.program_id(0).to(tl.int64)
    row = sequence * tl.num_programs(1) + tl.program_id(1)
    used = tl.cdiv(tl.load(context_lens + sequence), SPLIT)
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    largest = -float("inf")
    total = 0.0
    sums = tl.zeros((DIM,), tl.float32)
    for start in range(0, used, MERGED):
        split = start + tl.arange(0, MERGED)
        part = row * splits + split
        top = tl.load(part_stats + 2 * part, mask=split < used, other=-float("inf"))
        mass = tl.load(part_stats + 2 * part + 1, mask=split < used, other=0.0)
        values = tl.load(
            part_sums + part[:, None] * HEAD_DIM + dim[None, :],
            mask=(split < used)[:, None] & is_dim[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(top, 0))
        shrink = tl.exp2(largest - new_largest)
        weight = tl.exp2(top - new_largest)
        total = total * shrink + tl.sum(mass * weight, 0)
        sums = sums * shrink + tl.sum(values * weight[:, None], 0)
        largest = new_largest
    result = tl.where(total > 0, sums * (factor / tl.where(total > 0, total, 1.0)), 0.0)
    tl.store(out + row * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=is_dim)


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context: int,
    scale: float,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of query [B, Hq, D] over pools [blocks, H, block_size, D]: [B, Hq, D] of the query's dtype, contiguous.

    Sequence i has the first context_lens[i] (int32 [B], at most `max_context`) tokens of its blocks block_tables[i]
    (int32 [B, blocks of the longest]; what stands behind the last one is not looked at); 0 gives zeros. The query may
    lie in wider rows. Pools of the query's dtype, of another float dtype (then all products are float32's), or of codes
    with `scales` of keys and values: see `kv_codes.kind_of`. Raises ValueError for shapes and dtypes; blocks are not
    checked.
    """
    batch, heads, dim = query.shape
    kind = kind_of(keys, values, scales)
    _, kv_heads, size, _ = keys.shape
    check_query(query, keys)
    check_int32("block_tables", block_tables, batch, block_tables.shape[-1])
    check_int32("context_lens", context_lens, batch)
    wide = kind == "none" and keys.dtype != query.dtype
    padded = max(16, triton.next_power_of_2(dim))
    options = sizes("paged_decode", case_of(kind, wide or query.dtype == torch.float32, padded))
    split = options["SPLIT"]
    splits = max(1, triton.cdiv(max_context, split))
    out = torch.empty((batch, heads, dim), dtype=query.dtype, device=query.device)
    part_sums = torch.empty((batch, heads, splits, dim), dtype=torch.float32, device=query.device)
    part_stats = torch.empty((batch, heads, splits, 2), dtype=torch.float32, device=query.device)
    if not batch:
        return out
    _split[(batch, kv_heads, splits)](
        *(query, keys, values, *(scales or (None, None)), block_tables, context_lens, part_sums, part_stats),
        *(scale * LOG2_E * FACTORS[kind], query.stride(0), keys.stride(0), block_tables.stride(0), splits),
        HEADS=kv_heads,
        GROUP=heads // kv_heads,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        HEAD_DIM=dim,
        DIM=padded,
        PAGE=size,
        KIND=kind,
        WIDE=wide,
        **options,
    )
    _merge[(batch, heads)](
        *(part_sums, part_stats, context_lens, out, FACTORS[kind], splits),
        HEAD_DIM=dim,
        DIM=padded,
        SPLIT=split,
        MERGED=_MERGED,
        num_warps=4,
    )
    return out


def check_query(query: Tensor, keys: Tensor) -> None:
    """Raises ValueError unless query [T, Hq, D], each token contiguous, is for pools like keys [.., H, .., D]."""
    if query.shape[1] % keys.shape[1] or keys.shape[3] != query.shape[2] or query.stride()[1:] != (query.shape[2], 1):
        raise ValueError(f"query {list(query.shape)} of strides {query.stride()} for pools {list(keys.shape)}")


def check_int32(name: str, tensor: Tensor, *shape: int) -> None:
    """Raises ValueError unless `tensor` is int32, of that shape, and contiguous in its last dimension."""
    if tuple(tensor.shape) != shape or tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
        raise ValueError(f"{name} {list(tensor.shape)} of {tensor.dtype}: must be int32 {list(shape)}")


def case_of(kind: str, wide: bool, padded: int) -> str:
    """The name of a variant in configurations.yaml: how the pool holds its values, and the width of a head."""
    return f"{'float32' if wide else {'none': 'half'}.get(kind, kind)}_{max(64, min(padded, 256))}"
