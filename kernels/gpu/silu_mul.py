"""The gate of the MLP: one program for a stretch of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, half, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < half
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + half + column, mask=inside, other=0.0).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # rounded, as in Transformers
    tl.store(out + row * half + column, (gated * up).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [T, n] of gate_up [T, 2n], contiguous, in its dtype. Raises ValueError."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"gate_up {list(gate_up.shape)} of strides {gate_up.stride()}: must be contiguous [T, 2n]")
    rows, half = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, half, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _silu_mul[(rows, triton.cdiv(half, _BLOCK))](gate_up, out, half, 2 * half, BLOCK=_BLOCK, num_warps=4)
    return out
