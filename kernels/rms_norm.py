"""RMS normalisation over the last dimension."""

from __future__ import annotations

from torch import Tensor


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rows [..., n] / sqrt(mean(rows^2) + eps) * weight [n], in the dtype of `rows`.

    As in Transformers, the quotient is computed in float32 and rounded before the product with the weight.
    """
    wide = rows.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return wide.mul(scale).to(rows.dtype).mul_(weight)
