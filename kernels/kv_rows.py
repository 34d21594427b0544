"""Rows of a KV pool: a row is the head_dim values of one layer, k or v, head and token.

A pool of float32, bfloat16 or float16 has them as they are. A quantised pool has codes, a byte each, and the row's
float32 scale in the 4 bytes behind them, so that a page stays one run of equal rows and a row is one whole, wherever it
is copied to. Its tensors have the dtype of the codes, int8 or float8_e4m3fn, and rows of head_dim + 4 elements.

Codes and scales are those of kernels/kv_quantize.py, but for what is not finite: a pool has to take what the model
computes, so a row with such a value gets NaN as its scale, and none of it is a number any more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_quantize import CODES, encode_rows, from_fp8

SCALE_BYTES = 4
KINDS = {dtype: kind for kind, dtype in CODES.items()}  # of the pools that have codes


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row of a pool of that dtype."""
    return head_dim + SCALE_BYTES if dtype in KINDS else head_dim


def head_dim_of(pool: Tensor) -> int:
    """Values of a row of a pool [..., row]."""
    return pool.shape[-1] - (SCALE_BYTES if pool.dtype in KINDS else 0)


def plain(pool: Tensor) -> Tensor:
    """The same memory in a dtype that every copy of torch's takes."""
    return pool.view(torch.uint8) if pool.dtype in KINDS else pool


def convert(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., row] of one pool's dtype as rows of another's; the same tensor where the dtype is the same.

    Between floats it is rounded once; codes are made of the rows' own values, in float32, and rounded once when they
    become floats again. Codes of the other kind are made of float32 values.
    """
    if rows.dtype == dtype:
        return rows
    values = rows if rows.dtype not in KINDS else _values(rows, torch.float32 if dtype in KINDS else dtype)
    return _coded(values, dtype) if dtype in KINDS else values.to(dtype)


def _coded(values: Tensor, dtype: torch.dtype) -> Tensor:
    dim = values.shape[-1]
    rows = torch.empty(*values.shape[:-1], dim + SCALE_BYTES, dtype=torch.uint8, device=values.device)
    flat = rows.view(-1, dim + SCALE_BYTES)
    scales = torch.empty(len(flat), device=values.device)
    encode_rows(values.reshape(-1, dim), KINDS[dtype], flat[:, :dim].view(dtype), scales)
    flat[:, dim:] = scales.view(torch.uint8).view(-1, SCALE_BYTES)
    return rows.view(dtype)


def _values(rows: Tensor, dtype: torch.dtype) -> Tensor:
    codes, dim = rows[..., :-SCALE_BYTES], rows.shape[-1] - SCALE_BYTES
    scales = plain(rows)[..., dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    if rows.dtype == torch.int8:
        return codes.to(torch.float32).mul_(scales).to(dtype)
    wide, factor = from_fp8(codes)
    return wide.mul_(scales * factor).to(dtype)
