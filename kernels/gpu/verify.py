"""Speculative decoding: which proposals are what the model would have drawn itself.

A draw is a function of (seed, position, token id), so a proposal is right when it equals the draw at its position:
tokens are the same with and without proposals, whatever proposes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _verify(drawn, proposed, lengths, tokens, counts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    draw = tl.load(drawn + row * WIDTH + at, mask=at < WIDTH, other=-1)
    is_proposed = at < tl.minimum(tl.load(lengths + row), WIDTH - 1)
    proposal = tl.load(proposed + row * (WIDTH - 1) + at, mask=is_proposed, other=-1)
    accepted = tl.min(tl.where(is_proposed & (proposal == draw), BLOCK, at), 0)
    tl.store(tokens + row * WIDTH + at, tl.where(at <= accepted, draw, -1), mask=at < WIDTH)
    tl.store(counts + row, accepted + 1)


def verify(drawn: Tensor, proposed: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of each row [R, K + 1], -1 behind the last one, and how many they are (int32 [R], at least 1).

    Column i of drawn (int64 [R, K + 1]) is the draw behind i proposals, proposed int64 [R, K] holds lengths[r] of them
    (int32 [R], at most K). Draws are taken while the one before them was proposed. Raises ValueError.
    """
    rows, width = drawn.shape
    if tuple(proposed.shape) != (rows, width - 1) or drawn.dtype != torch.int64 or proposed.dtype != torch.int64:
        raise ValueError(f"drawn {list(drawn.shape)} {drawn.dtype}, proposed {list(proposed.shape)} {proposed.dtype}")
    if tuple(lengths.shape) != (rows,) or lengths.dtype != torch.int32:
        raise ValueError(f"lengths {list(lengths.shape)} of {lengths.dtype}: must be int32 [{rows}]")
    tokens = torch.empty_like(drawn, memory_format=torch.contiguous_format)
    counts = torch.empty(rows, dtype=torch.int32, device=drawn.device)
    if rows:
        block = triton.next_power_of_2(width)
        parts = (drawn.contiguous(), proposed.contiguous(), lengths.contiguous())
        _verify[(rows,)](*parts, tokens, counts, WIDTH=width, BLOCK=block, num_warps=1)
    return tokens, counts
