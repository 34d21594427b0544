"""Quantising KV for the wire: one byte per value, and one float32 scale per row (the head_dim values of one layer, k or
v, head and token).

    scale = largest magnitude of the row / LARGEST; code = value / scale, rounded to nearest even; value' = code * scale

`int8` is symmetric (codes -127..127) with an error of at most half a scale; `fp8` is e4m3 (4 exponent and 3 mantissa
bits, no infinity), with an error of at most 1/16 of a value, or 2^-10 of a scale where that is more. All is computed in
float32. A row of zeros keeps them. There is no code for a value that is not finite: it is refused, never clamped, and
codes and scales that do not come from `quantize` are refused too. Scales stay within what keeps divisions and products
finite, so a finite value never becomes another kind of number (before it is rounded to a narrower dtype).
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {"int8": 127.0, "fp8": 448.0}

_FLOAT32 = torch.finfo(torch.float32)
_SLAB = 1 << 16  # values whose float32 copies stay in a core's cache
_FP8_NAN = 0x7F  # of either sign: the only codes of e4m3 that are no number
_FP8_IN_FLOAT16 = 256.0  # e4m3's bits, moved to where float16 has them, mean a value that is smaller by this


def quantize(values: Tensor, kind: str, codes: Tensor, scales: Tensor) -> None:
    """Quantise values [R, D] of any float dtype into `codes` [R, D] (of CODES[kind]) and `scales` float32 [R].

    `kind` is int8 or fp8; all tensors are contiguous. Raises ValueError when a value is not finite; what was written
    then means nothing.
    """
    for slab in _slabs(values, codes, scales):
        if not _encode(*slab, kind).all():
            raise ValueError(f"a value is not finite, which {kind} cannot express")


def encode_rows(values: Tensor, kind: str, codes: Tensor, scales: Tensor) -> None:
    """As `quantize`, but a row with a value that is not finite gets zeros and NaN as its scale.

    The rows of `codes` may be apart.
    """
    for part, part_codes, part_scales in _slabs(values, codes, scales):
        if not (finite := _encode(part, part_codes, part_scales, kind)).all():
            part_scales[~finite] = torch.nan
            part_codes.view(torch.uint8)[~finite] = 0


def _encode(values: Tensor, codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Quantise some rows; returns which of them had finite values only."""
    largest = LARGEST[kind]
    wide = values.to(torch.float32)
    torch.amax(wide.abs(), dim=-1, out=scales)
    finite = scales.isfinite()  # a maximum is NaN or infinite when any of its values is
    scales.div_(largest).clamp_(_FLOAT32.tiny, largest_scale(largest))
    scaled = wide / scales.unsqueeze(-1)
    if kind == "int8":
        scaled.round_()
    codes.copy_(scaled.clamp_(-largest, largest))
    return finite


def dequantize(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """The values of `codes` [R, D] and `scales` float32 [R] into `out` [R, D], rounded once to its dtype.

    Raises ValueError for what `quantize` does not write: a scale that is not positive and finite, a code that is no
    number.
    """
    if not ((scales > 0) & scales.isfinite()).all():
        raise ValueError("a scale is not a positive finite number")
    for part, part_codes, part_scales in _slabs(out, codes, scales):
        if codes.dtype == torch.float8_e4m3fn:
            if part_codes.numel() and int((part_codes.view(torch.int8) & _FP8_NAN).max()) == _FP8_NAN:
                raise ValueError("a code is not a number")
            wide, factor = from_fp8(part_codes)
            part_scales = part_scales * factor
        else:
            wide = part_codes.to(torch.float32)
        part.copy_(wide.mul_(part_scales.unsqueeze(-1)))


def from_fp8(codes: Tensor) -> tuple[Tensor, float]:
    """e4m3 codes as float32, and a factor that makes them what they mean.

    By way of float16, which torch converts several times as fast. A code that is no number comes as 480.
    """
    moved = codes.view(torch.int8).to(torch.int16)
    moved = moved.bitwise_left_shift_(7).bitwise_and_(~0x4000)  # the sign was copied into that bit
    return moved.view(torch.float16).to(torch.float32), _FP8_IN_FLOAT16


def _slabs(values: Tensor, codes: Tensor, scales: Tensor) -> zip[tuple[Tensor, Tensor, Tensor]]:
    """The three in step, in parts of about _SLAB values."""
    rows = max(1, _SLAB // values.shape[-1])
    return zip(*(torch.split(tensor, rows) for tensor in (values, codes, scales)), strict=True)


def largest_scale(largest: float) -> float:
    """The float32 below the greatest finite one / `largest`, so that code times scale is finite for every code."""
    quotient = torch.tensor(_FLOAT32.max / largest, dtype=torch.float32)
    return float(torch.nextafter(quotient, torch.zeros(())))
