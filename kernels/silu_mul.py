"""The gate of the MLP; on a CPU by C (c/layer.c)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .native import BEST, COMPUTED, DTYPES, function


def silu_mul(gate_up: Tensor, level: int = BEST) -> Tensor:
    """silu(gate) * up [rows, n] of gate_up [rows, 2n]; the sigmoid product is rounded before the second product."""
    rows, half = gate_up.shape[0], gate_up.shape[-1] // 2
    run = function("baton_gate", "ppnnnii")
    if run is None or gate_up.device.type != "cpu" or gate_up.dtype not in COMPUTED or not gate_up.is_contiguous():
        return F.silu(gate_up[..., :half]).mul_(gate_up[..., half:])
    out = torch.empty(rows, half, dtype=gate_up.dtype)
    threads = torch.get_num_threads()
    run(gate_up.data_ptr(), out.data_ptr(), rows, half, DTYPES[gate_up.dtype], threads, level)
    return out
