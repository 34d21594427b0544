"""RMS normalisation over the last dimension, alone or behind a residual addition; on a CPU by C (c/layer.c)."""

from __future__ import annotations

import torch
from torch import Tensor

from .native import BEST, COMPUTED, DTYPES, function


def rms_norm(rows: Tensor, weight: Tensor, eps: float, level: int = BEST) -> Tensor:
    """rows [..., n] / sqrt(mean(rows^2) + eps) * weight [n], in the dtype of `rows`.

    As in Transformers, the quotient is computed in float32 and rounded before the product with the weight.
    """
    out = _native(rows, None, weight, eps, level)
    if out is None:
        wide = rows.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        out = wide.mul(scale).to(rows.dtype).mul_(weight)
    return out


def add_rms_norm(rows: Tensor, part: Tensor, weight: Tensor, eps: float, level: int = BEST) -> Tensor:
    """`rows` [..., n] becomes rows + part, rounded to its dtype; the result is the norm of that: see `rms_norm`."""
    out = _native(rows, part, weight, eps, level)
    return rms_norm(rows.add_(part), weight, eps, level) if out is None else out


def norm_heads(heads: Tensor, query_norm: Tensor, key_norm: Tensor, queries: int, keys: int, eps: float) -> Tensor:
    """Each query and key of heads [T, queries + 2 * keys, D] under `rms_norm` with query_norm or key_norm [D].

    Changes `heads`, or returns a new tensor.
    """
    run = function("baton_norm_heads", "pppnnnnnfii")
    parts = (heads, query_norm, key_norm)
    plain = all(part.is_contiguous() and part.dtype == heads.dtype for part in parts)
    if run is None or heads.device.type != "cpu" or heads.dtype not in COMPUTED or not plain:
        normed = (rms_norm(heads[:, :queries], query_norm, eps), rms_norm(heads[:, queries:-keys], key_norm, eps))
        return torch.cat((*normed, heads[:, -keys:]), dim=1)
    shape = (heads.shape[0], queries, keys, heads.shape[2])
    run(*(part.data_ptr() for part in parts), *shape, DTYPES[heads.dtype], eps, torch.get_num_threads(), BEST)
    return heads


def _native(rows: Tensor, part: Tensor | None, weight: Tensor, eps: float, level: int) -> Tensor | None:
    """None where it is not for the C function."""
    run = function("baton_norm", "ppppnnnfii")
    if run is None or rows.device.type != "cpu" or rows.dtype not in COMPUTED:
        return None
    if not all(t.is_contiguous() and t.dtype == rows.dtype for t in (rows, weight if part is None else part, weight)):
        return None
    out = torch.empty_like(rows)
    other = None if part is None else part.data_ptr()
    size, threads = rows.shape[-1], torch.get_num_threads()
    where = (rows.data_ptr(), other, weight.data_ptr(), out.data_ptr())
    run(*where, rows.numel() // size, size, DTYPES[rows.dtype], eps, threads, level)
    return out
