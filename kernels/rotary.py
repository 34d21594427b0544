"""Rotary positions: the angles of a step, and the rotation of query and key heads (two halves of a head)."""

from __future__ import annotations

import torch
from torch import Tensor


def angles(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D/2] of positions int64 [T] x frequencies [D/2], times `factor`, rounded to `dtype`."""
    angle = positions.float()[:, None, None] * frequencies
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [T, H, D] by cos, sin [T, 1, D/2]: dimension i turns with i + D/2. A new tensor."""
    half = heads.shape[-1] // 2
    left, right = heads[..., :half], heads[..., half:]
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    torch.mul(left, cos, out=out[..., :half]).sub_(right * sin)
    torch.mul(right, cos, out=out[..., half:]).add_(left * sin)
    return out
