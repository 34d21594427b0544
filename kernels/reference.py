"""Every operation in plain torch, as the oracle of the fast ones, and as the way to run where no fast one exists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels/rms_norm.py; all in float32, rounded once."""
    wide = rows.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(rows.dtype)


def rotate(heads: Tensor, positions: Tensor, frequencies: Tensor, factor: float) -> Tensor:
    """See kernels/rotary.py; all in float32, rounded once."""
    angle = positions.float()[:, None, None] * frequencies
    cos, sin = angle.cos() * factor, angle.sin() * factor
    left, right = heads.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(heads.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See kernels/silu_mul.py; all in float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def write_kv(pool: Tensor, slots: Tensor, heads: Tensor) -> None:
    """Put heads [T, H, D] into pool [blocks, H, block_size, D] at slots int64 [T] = block * block_size + offset."""
    size = pool.shape[2]
    for row, slot in enumerate(slots.tolist()):
        pool[slot // size, :, slot % size] = heads[row].to(pool.dtype)


def gather_kv(pool: Tensor, blocks: Sequence[int], tokens: int) -> Tensor:
    """The first `tokens` tokens in `blocks` of pool [blocks, H, block_size, D]: [H, tokens, D]."""
    picked = pool[torch.tensor(list(blocks), device=pool.device)].transpose(0, 1)
    return picked.reshape(pool.shape[1], -1, pool.shape[3])[:, :tokens]


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    scale: float,
) -> Tensor:
    """Causal attention of query [T, Hq, D] over paged keys and values [blocks, H, block_size, D]: [T, Hq, D].

    The tokens of sequence i are rows cu_seqlens[i]:cu_seqlens[i + 1] of the query and the last ones of its
    context_lens[i] tokens. float32 inside, rounded once.
    """
    out = torch.empty_like(query)
    group = query.shape[1] // keys.shape[1]
    for i, (context, blocks) in enumerate(zip(context_lens, block_tables, strict=True)):
        rows = slice(cu_seqlens[i], cu_seqlens[i + 1])
        k, v = (gather_kv(pool, blocks, context).float().repeat_interleave(group, 0) for pool in (keys, values))
        scores = query[rows].float().transpose(0, 1) @ k.transpose(1, 2) * scale
        count = cu_seqlens[i + 1] - cu_seqlens[i]
        hidden = torch.ones(count, context, dtype=torch.bool, device=query.device).triu(context - count + 1)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        out[rows] = (weights @ v).transpose(0, 1).to(query.dtype)
    return out
