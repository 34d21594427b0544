"""Every operation in plain torch, as the oracle of the fast ones, and as the way to run where no fast one exists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_rows import convert, plain


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
    """Put heads [T, H, D] into pool [blocks, H, block_size, row] at slots int64 [T] = block * block_size + offset."""
    size, rows = pool.shape[2], convert(heads, pool.dtype)
    for row, slot in enumerate(slots.tolist()):
        plain(pool)[slot // size, :, slot % size] = plain(rows[row])


def gather_kv(pool: Tensor, blocks: Sequence[int], tokens: int) -> Tensor:
    """The first `tokens` tokens in `blocks` of pool [blocks, H, block_size, row]: [H, tokens, row]."""
    picked = plain(pool)[torch.tensor(list(blocks), device=pool.device)].transpose(0, 1)
    return picked.reshape(pool.shape[1], -1, pool.shape[3])[:, :tokens].view(pool.dtype)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    scale: float,
) -> Tensor:
    """Causal attention of query [T, Hq, D] over paged keys and values [blocks, H, block_size, row]: [T, Hq, D].

    The tokens of sequence i are rows cu_seqlens[i]:cu_seqlens[i + 1] of the query and the last ones of its
    context_lens[i] tokens. float32 inside, rounded once.
    """
    out = torch.empty_like(query)
    group = query.shape[1] // keys.shape[1]
    for i, (context, blocks) in enumerate(zip(context_lens, block_tables, strict=True)):
        rows = slice(cu_seqlens[i], cu_seqlens[i + 1])
        gathered = (convert(gather_kv(pool, blocks, context), torch.float32) for pool in (keys, values))
        k, v = (rows.repeat_interleave(group, 0) for rows in gathered)
        scores = query[rows].float().transpose(0, 1) @ k.transpose(1, 2) * scale
        count = cu_seqlens[i + 1] - cu_seqlens[i]
        hidden = torch.ones(count, context, dtype=torch.bool, device=query.device).triu(context - count + 1)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        out[rows] = (weights @ v).transpose(0, 1).to(query.dtype)
    return out


def quantize_kv(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """See kernels/kv_quantize.py: int8 codes or e4m3 ones as uint8 [R, D], and float32 scales [R]; all finite."""
    wide = values.float()
    largest = {"int8": 127.0, "fp8": 448.0}[kind]
    limits = torch.finfo(torch.float32)
    top = torch.nextafter(torch.tensor(limits.max / largest, dtype=torch.float32), torch.zeros(()))
    scales = (wide.abs().amax(-1) / largest).clamp(min=limits.tiny).minimum(top)
    scaled = (wide / scales[:, None]).double()
    if kind == "int8":
        return scaled.round().clamp(-127, 127).to(torch.int8), scales
    numbers = e4m3_numbers()[:127]  # ascending, from zero to 448
    size = scaled.abs().clamp(max=448).contiguous()
    above = torch.searchsorted(numbers, size).clamp(1, 126)
    middle = (numbers[above - 1] + numbers[above]) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    code = torch.where(up, above, above - 1) + 128 * torch.signbit(scaled).long()
    return code.to(torch.uint8), scales


def dequantize_kv(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [R, D] that `quantize_kv` stands for, rounded once to `dtype`."""
    numbers = codes.float() if codes.dtype == torch.int8 else e4m3_numbers()[codes.long()].float()
    return (numbers * scales[:, None]).to(dtype)


def e4m3_numbers() -> Tensor:
    """What each of the 256 codes means, float64: (-1)^s * 2^(e - 7) * (1 + m / 8), or 2^-6 * m / 8 where e is 0."""
    code = torch.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7).double()
    normal = torch.ldexp(1 + mantissa / 8, exponent - 7)
    numbers = torch.where(exponent == 0, torch.ldexp(mantissa / 8, torch.tensor(-6)), normal)
    numbers[code & 127 == 127] = float("nan")
    return torch.where(code < 128, numbers, -numbers)
