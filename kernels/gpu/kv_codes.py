"""KV in one byte per value, inside kernels: what kernels/kv_quantize.py does in torch, with the same bits.

e4m3 is read and written by integer operations, so it needs no hardware conversion (compute capability 8.0 has none).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_quantize import LARGEST, largest_scale

KINDS = {torch.int8: "int8", torch.uint8: "fp8"}  # of a pool's elements; others are plain floats
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_INT8_LIMIT = tl.constexpr(largest_scale(LARGEST["int8"]))
_FP8_LIMIT = tl.constexpr(largest_scale(LARGEST["fp8"]))
FACTORS = {"none": 1.0, "int8": 1.0, "fp8": 256.0}  # what `widen` divides its values by


@triton.jit
def widen(codes, KIND: tl.constexpr, dtype: tl.constexpr):
    """Stored KV as `dtype`: plain floats converted, int8 codes as they are, e4m3 codes divided by 256."""
    if KIND == "fp8":
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # e4m3's fields where float16 has them
        return half.to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
    if codes.dtype == dtype:
        return codes
    return codes.to(tl.float32).to(dtype)


@triton.jit
def peak(values):
    """The largest magnitude in each row of float32 values [R, D], as its bits: NaN is the largest of all.

    As integers magnitudes keep their order; a maximum of floats would lose NaN.
    """
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scale_of(top, KIND: tl.constexpr):
    """The scales of rows whose largest magnitudes have the bits `top`; where that is not finite, it is the scale."""
    highest = top.to(tl.float32, bitcast=True)
    if KIND == "int8":
        scale = tl.minimum(tl.maximum(tl.div_rn(highest, 127.0), _TINY), _INT8_LIMIT)
    else:
        scale = tl.minimum(tl.maximum(tl.div_rn(highest, 448.0), _TINY), _FP8_LIMIT)
    return tl.where(top < 0x7F800000, scale, highest)


@triton.jit
def codes_of(values, scale, KIND: tl.constexpr):
    """float32 values [R, D] as codes [R, D] (int8, or e4m3 as uint8) for scales [R]; nothing where a scale is none."""
    scaled = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    if KIND == "int8":
        # Adding 1.5 * 2^23 rounds to an integer, halves to even, and leaves it in the low bits.
        codes = ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        size = tl.minimum(tl.abs(scaled), 448.0)
        raw = size.to(tl.int32, bitcast=True)
        normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - (120 << 3)  # 3 bits of mantissa; exponent of bias 7
        small = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)  # in units of 2^-9 below 2^-6
        code = tl.where(size < 0.015625, small, normal)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def encode(values, KIND: tl.constexpr):
    """float32 values [R, D] as codes [R, D] and scales [R].

    Where a row has a value that is not finite, its scale is not finite either, and its codes mean nothing.
    """
    scale = scale_of(peak(values), KIND)
    return codes_of(values, scale, KIND), scale


def kind_of(keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor] | None) -> str:
    """none, int8 or fp8: how the pools [blocks, H, block_size, D] hold their values.

    Pools of codes (int8; e4m3 as uint8) need `scales` of keys and of values, float32 [blocks, H, block_size],
    contiguous. Raises ValueError.
    """
    if keys.shape != values.shape or keys.dtype != values.dtype or keys.stride() != values.stride():
        raise ValueError(f"keys {list(keys.shape)} {keys.dtype} and values {list(values.shape)} {values.dtype} differ")
    size, dim = keys.shape[2:]
    if keys.stride()[1:] != (size * dim, dim, 1):
        raise ValueError(f"pools of strides {keys.stride()}: each block must be contiguous")
    kind = KINDS.get(keys.dtype, "none")
    if (kind == "none") != (scales is None):
        raise ValueError(f"pools of {keys.dtype} {'without' if scales is None else 'with'} scales")
    for scale in scales or ():
        if scale.shape != keys.shape[:3] or scale.dtype != torch.float32 or not scale.is_contiguous():
            raise ValueError(f"scales {list(scale.shape)} of {scale.dtype} for pools {list(keys.shape)}")
    return kind
