"""The gate of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [rows, n] of gate_up [rows, 2n]; the sigmoid product is rounded before the second product."""
    half = gate_up.shape[-1] // 2
    return F.silu(gate_up[..., :half]).mul_(gate_up[..., half:])
