"""Rotary positions, and the way of keys and values into the pages: one program for some heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_codes import widen

_HEADS = 8  # of one program


@triton.jit
def _rotate(
    heads,
    cos,
    sin,
    slots,
    keys,
    values,
    stride_token,
    stride_block,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF_BLOCK)
    inside = (head < QUERIES + 2 * KV_HEADS)[:, None] & (column < HALF)[None, :]
    source = heads + token * stride_token + head[:, None] * (2 * HALF) + column[None, :]
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    turns = (head < QUERIES + KV_HEADS)[:, None]
    own: tl.constexpr = heads.dtype.element_ty
    new_left = tl.where(turns, left * c - right * s, left).to(own)
    new_right = tl.where(turns, right * c + left * s, right).to(own)
    is_query = inside & (head < QUERIES)[:, None]
    tl.store(source, new_left, mask=is_query)
    tl.store(source + HALF, new_right, mask=is_query)

    slot = tl.load(slots + token)
    if slot < 0:
        return
    is_value = head >= QUERIES + KV_HEADS
    row = tl.where(is_value, head - QUERIES - KV_HEADS, head - QUERIES)
    place = slot // PAGE * stride_block + (row * PAGE + slot % PAGE) * (2 * HALF)
    target = place[:, None] + column[None, :]
    pooled = inside & (head >= QUERIES)[:, None]
    to_keys, to_values = pooled & turns, pooled & is_value[:, None]
    stored_left = widen(new_left, "none", keys.dtype.element_ty)
    stored_right = widen(new_right, "none", keys.dtype.element_ty)
    tl.store(keys + target, stored_left, mask=to_keys)
    tl.store(keys + target + HALF, stored_right, mask=to_keys)
    tl.store(values + target, stored_left, mask=to_values)
    tl.store(values + target + HALF, stored_right, mask=to_values)


def rotate_into_pages(heads: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Rotate queries and keys of heads [T, Hq + 2H, D] (contiguous); keys and values go into the pools.

    Queries are rotated where they are, and returned as a view [T, Hq, D]; what `heads` holds behind them stays as it
    was. cos and sin [T, 1, D/2] contiguous: dimension i turns with i + D/2. slots int64 [T] = block * block_size +
    offset; -1 writes nothing (the padding of a captured graph). Pools [blocks, H, block_size, D] of any float dtype, of
    equal strides, each block contiguous. Raises ValueError for shapes; slots are not checked.
    """
    tokens, count, dim = heads.shape
    kv_heads, size = keys.shape[1:3]
    queries = count - 2 * kv_heads
    if queries < 1 or dim % 2 or not heads.is_contiguous():
        raise ValueError(f"heads {list(heads.shape)} of strides {heads.stride()} for {kv_heads} KV heads")
    expected = (kv_heads, size, dim), (size * dim, dim, 1)
    for name, pool in (("keys", keys), ("values", values)):
        if (pool.shape[1:], pool.stride()[1:]) != expected or pool.stride(0) != keys.stride(0):
            raise ValueError(f"{name} {list(pool.shape)} of strides {pool.stride()} for heads of {dim}")
    if tuple(slots.shape) != (tokens,) or slots.dtype != torch.int64:
        raise ValueError(f"slots {list(slots.shape)} of {slots.dtype} for {tokens} tokens: must be int64")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (tokens, 1, dim // 2) or not table.is_contiguous():
            raise ValueError(f"{name} {list(table.shape)} for {tokens} tokens and heads of {dim}")
    half = triton.next_power_of_2(dim // 2)
    if tokens:
        _rotate[(tokens, triton.cdiv(count, _HEADS))](
            *(heads, cos, sin, slots, keys, values, heads.stride(0), keys.stride(0)),
            QUERIES=queries,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            HALF_BLOCK=half,
            PAGE=size,
            HEADS=_HEADS,
            num_warps=max(1, min(4, _HEADS * half // 256)),  # 16 bytes for a thread
        )
    return heads[:, :queries]
