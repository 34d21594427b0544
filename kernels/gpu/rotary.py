"""Rotary positions, and the way of keys and values into the pages: one program for some heads of one token.

Pools of codes get what kernels/kv_quantize.py makes of the same values, and NaN as the scale of a row with a value that
is not finite: none of it is a number any more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_codes import codes_of, kind_of, peak, scale_of, widen

_HEADS = 8  # of one program


@triton.jit
def _rotate(
    heads,
    cos,
    sin,
    slots,
    keys,
    values,
    key_scales,
    value_scales,
    stride_token,
    stride_block,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KIND: tl.constexpr,
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
    if KIND == "none":
        stored_left = widen(new_left, "none", keys.dtype.element_ty)
        stored_right = widen(new_right, "none", keys.dtype.element_ty)
    else:
        wide_left, wide_right = new_left.to(tl.float32), new_right.to(tl.float32)
        top = tl.maximum(peak(wide_left), peak(wide_right))
        finite = top < 0x7F800000
        scale = tl.where(finite, scale_of(top, KIND), 1.0)
        stored_left = codes_of(tl.where(finite[:, None], wide_left, 0.0), scale, KIND)
        stored_right = codes_of(tl.where(finite[:, None], wide_right, 0.0), scale, KIND)
        scale = tl.where(finite, scale, float("nan"))
        at = (slot // PAGE * KV_HEADS + row) * PAGE + slot % PAGE
        is_key = (head >= QUERIES) & (head < QUERIES + KV_HEADS)
        tl.store(key_scales + at, scale, mask=is_key)
        tl.store(value_scales + at, scale, mask=is_value & (head < QUERIES + 2 * KV_HEADS))
    tl.store(keys + target, stored_left, mask=to_keys)
    tl.store(keys + target + HALF, stored_right, mask=to_keys)
    tl.store(values + target, stored_left, mask=to_values)
    tl.store(values + target + HALF, stored_right, mask=to_values)


def rotate_into_pages(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Rotate queries and keys of heads [T, Hq + 2H, D] (contiguous); keys and values go into the pools.

    Queries are rotated where they are, and returned as a view [T, Hq, D]; what `heads` holds behind them stays as it
    was. cos and sin [T, 1, D/2] contiguous: dimension i turns with i + D/2. slots int64 [T] = block * block_size +
    offset; -1 writes nothing (the padding of a captured graph). Pools [blocks, H, block_size, D] of any float dtype, or
    of codes with `scales` of keys and values (see `kv_codes.kind_of`); of equal strides, each block contiguous. Raises
    ValueError for shapes; slots are not checked.
    """
    tokens, count, dim = heads.shape
    kv_heads, size = keys.shape[1:3]
    queries = count - 2 * kv_heads
    if queries < 1 or dim % 2 or not heads.is_contiguous():
        raise ValueError(f"heads {list(heads.shape)} of strides {heads.stride()} for {kv_heads} KV heads")
    if keys.shape[3] != dim:
        raise ValueError(f"keys {list(keys.shape)} for heads of {dim}")
    kind = kind_of(keys, values, scales)
    if tuple(slots.shape) != (tokens,) or slots.dtype != torch.int64:
        raise ValueError(f"slots {list(slots.shape)} of {slots.dtype} for {tokens} tokens: must be int64")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (tokens, 1, dim // 2) or not table.is_contiguous():
            raise ValueError(f"{name} {list(table.shape)} for {tokens} tokens and heads of {dim}")
    half = triton.next_power_of_2(dim // 2)
    if tokens:
        _rotate[(tokens, triton.cdiv(count, _HEADS))](
            *(heads, cos, sin, slots, keys, values, *(scales or (None, None)), heads.stride(0), keys.stride(0)),
            QUERIES=queries,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            HALF_BLOCK=half,
            PAGE=size,
            HEADS=_HEADS,
            KIND=kind,
            num_warps=max(1, min(4, _HEADS * half // 256)),  # 16 bytes for a thread
        )
    return heads[:, :queries]
