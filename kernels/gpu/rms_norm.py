"""RMS normalisation, alone or behind a residual addition: one program for one row, or for some short ones."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import check_rows

_WARPS = ((2048, 4), (8192, 8), (32768, 16))  # columns below which so many warps share a row
_SHORT = 512  # values of one program that takes several rows


@triton.jit
def _rms_norm(
    rows,
    part,
    weight,
    out,
    count,
    columns,
    eps,
    heads,
    stride_token,
    stride_head,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (index < count)[:, None] & (column < columns)[None, :]
    source = rows + (index // heads * stride_token + index % heads * stride_head)[:, None] + column[None, :]
    dense = (index * columns)[:, None] + column[None, :]
    dtype = rows.dtype.element_ty
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(part + dense, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(source, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)
    normed = (x * scale[:, None]).to(dtype).to(tl.float32)  # rounded before the product, as in Transformers
    w = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + dense, (normed * w[None, :]).to(dtype), mask=inside)


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rows [T, n] or [T, H, n] / sqrt(mean(rows^2) + eps) * weight [n]: a new contiguous tensor of the dtype of `rows`.

    Any float dtype; only the last dimension must be contiguous. Sums are float32's. Raises ValueError.
    """
    return _launch(rows, None, weight, eps)


def add_rms_norm(rows: Tensor, part: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rows` [T, n] becomes rows + part [T, n] (contiguous), rounded to its dtype; the result is the norm of that."""
    if part.shape != rows.shape or part.dtype != rows.dtype or not part.is_contiguous():
        raise ValueError(f"part {list(part.shape)} of {part.dtype} for rows {list(rows.shape)} of {rows.dtype}")
    return _launch(rows, part, weight, eps)


def _launch(rows: Tensor, part: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    check_rows("rows", rows)
    columns = rows.shape[-1]
    if rows.dim() not in (2, 3):
        raise ValueError(f"rows {list(rows.shape)}: must be [T, n] or [T, H, n]")
    if weight.shape != (columns,) or not weight.is_contiguous():
        raise ValueError(f"weight {list(weight.shape)} for rows of {columns}")
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    heads, stride_head = (rows.shape[1], rows.stride(1)) if rows.dim() == 3 else (1, 0)
    count, block = rows.numel() // columns, triton.next_power_of_2(columns)
    together = max(1, _SHORT // block)
    options: dict[str, Any] = {
        "ADD": part is not None,
        "ROWS": together,
        "BLOCK": block,
        "num_warps": next((min(warps, -(-together * block // 256)) for limit, warps in _WARPS if columns < limit), 32),
    }
    if count:
        grid = (triton.cdiv(count, together),)
        where = (rows, part, weight, out, count, columns, eps, heads, rows.stride(0), stride_head)
        _rms_norm[grid](*where, **options)
    return out
