"""Linear layers whose weights are int8 or 4-bit codes, times rows of floats: a tile of codes is read once for all rows.

Codes become floats without loss, a group's products are summed, and that sum is scaled: no rounded weight is ever
made. Inputs are summed in order, in a number of stretches that depends on the layer alone, and with `batch_invariant`
one tile size serves any number of rows: then the bits of a row do not depend on the others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear import GROUP, INT8_GROUP
from .launch import check_rows, sizes

_FEW = 16  # rows of the smallest tile
_BLOCKS = 256  # of outputs and inputs that are worth a program each: about two for each of a GPU's processors
_STRETCH = 512  # inputs that a stretch has at least


@triton.jit
def _linear(
    x,
    codes,
    scales,
    minima,
    bias,
    out,
    rows,
    outputs,
    stretch,
    stride_x,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """out [rows, outputs], or where SPLIT parts [stretches, rows, outputs] in float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    is_row, is_output = row < rows, output < outputs
    source = x + row.to(tl.int64)[:, None] * stride_x
    groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    dtype = x.dtype.element_ty
    for group in range(part * stretch, tl.minimum((part + 1) * stretch, groups)):
        scale = tl.load(scales + group * outputs + output, mask=is_output, other=0.0).to(tl.float32)
        if BITS == 8:
            k = group * GROUP + tl.arange(0, GROUP)
            is_input = k < INPUTS
            a = tl.load(source + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            w = tl.load(
                codes + output.to(tl.int64)[:, None] * INPUTS + k[None, :],
                mask=is_output[:, None] & is_input[None, :],
                other=0,
            )
            dot = tl.dot(a, tl.trans(w.to(tl.float32).to(dtype)), input_precision="ieee")
            sums += dot * scale[None, :]
        else:
            byte = tl.arange(0, GROUP // 2)
            at = group * GROUP + byte  # the low four bits belong to the group's first half of inputs
            a = tl.load(source + at[None, :], mask=is_row[:, None], other=0.0)
            b = tl.load(source + (at + GROUP // 2)[None, :], mask=is_row[:, None], other=0.0)
            w = tl.load(
                codes + (group * outputs + output).to(tl.int64)[:, None] * (GROUP // 2) + byte[None, :],
                mask=is_output[:, None],
                other=0,
            )
            low, high = (w & 15).to(tl.float32), (w >> 4).to(tl.float32)
            if minima is None:
                low, high = low - 8.0, high - 8.0
            dot = tl.dot(a, tl.trans(low.to(dtype)), input_precision="ieee")
            dot = tl.dot(b, tl.trans(high.to(dtype)), dot, input_precision="ieee")
            sums += dot * scale[None, :]
            if minima is not None:
                least = tl.load(minima + group * outputs + output, mask=is_output, other=0.0).to(tl.float32)
                mass = tl.sum(a.to(tl.float32) + b.to(tl.float32), 1)
                sums += mass[:, None] * least[None, :]
    inside = is_row[:, None] & is_output[None, :]
    if SPLIT:
        target = out + ((part * rows + row).to(tl.int64) * outputs)[:, None] + output[None, :]
        tl.store(target, sums, mask=inside)
    else:
        if bias is not None:
            sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
        tl.store(out + (row.to(tl.int64) * outputs)[:, None] + output[None, :], sums.to(dtype), mask=inside)


@triton.jit
def _add_up(parts, bias, out, stretches, size, outputs, BLOCK: tl.constexpr):
    """The sum of all stretches' parts, in order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(stretches):
        total += tl.load(parts + at, mask=inside, other=0.0)
        parts += size
    if bias is not None:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def pack_int4(codes: Tensor) -> Tensor:
    """Codes from 0 to 15, uint8 [outputs, inputs], as bytes [groups, outputs, GROUP / 2]: what a program reads together
    lies together. Byte i has a group's input i in its low four bits, and input i + GROUP / 2 in the others."""
    halves = codes.view(codes.shape[0], -1, 2, GROUP // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(0, 1).contiguous()


def int8_linear(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, batch_invariant: bool = True
) -> Tensor:
    """x [T, inputs] times scales * codes, plus bias [outputs]: [T, outputs] of the dtype of `x`.

    codes int8 [outputs, inputs], scales float32 [groups of INT8_GROUP inputs, outputs]; contiguous. x float16, bfloat16
    or float32 of contiguous rows. Raises ValueError.
    """
    if codes.dtype != torch.int8 or codes.dim() != 2 or not codes.is_contiguous():
        raise ValueError(f"codes {list(codes.shape)} of {codes.dtype}: must be contiguous int8 [outputs, inputs]")
    return _launch(x, codes, codes.shape, scales, None, bias, batch_invariant, 8)


def int4_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    minima: Tensor | None,
    bias: Tensor | None = None,
    batch_invariant: bool = True,
) -> Tensor:
    """x [T, inputs] times scales * codes + minima, or without minima scales * (codes - 8), plus bias [outputs].

    `packed` from `pack_int4`; scales and minima float16 [inputs / GROUP, outputs]; contiguous. Otherwise as
    `int8_linear`.
    """
    if packed.dtype != torch.uint8 or packed.dim() != 3 or not packed.is_contiguous():
        raise ValueError(f"packed {list(packed.shape)} of {packed.dtype}: must be what pack_int4 returns")
    shape = (packed.shape[1], packed.shape[0] * GROUP)
    return _launch(x, packed, shape, scales, minima, bias, batch_invariant, 4)


def _launch(
    x: Tensor,
    codes: Tensor,
    shape: tuple[int, ...],
    scales: Tensor,
    minima: Tensor | None,
    bias: Tensor | None,
    batch_invariant: bool,
    bits: int,
) -> Tensor:
    check_rows("x", x)
    (outputs, inputs), group = shape, INT8_GROUP if bits == 8 else GROUP
    groups = triton.cdiv(inputs, group)
    if x.dim() != 2 or x.shape[1] != inputs:
        raise ValueError(f"x {list(x.shape)} for {inputs} inputs")
    for name, tensor in (("scales", scales), ("minima", minima)):
        if tensor is not None and (tuple(tensor.shape) != (groups, outputs) or not tensor.is_contiguous()):
            raise ValueError(f"{name} {list(tensor.shape)} of strides {tensor.stride()}: must be [{groups}, {outputs}]")
    rows = x.shape[0]
    few = batch_invariant or rows <= _FEW or x.dtype == torch.float32
    options: dict[str, Any] = sizes("linear", f"int{bits}_{'few' if few else 'many'}")
    blocks = triton.cdiv(outputs, options["OUTPUTS"])
    stretches = max(1, min(_BLOCKS // blocks, inputs // _STRETCH))
    stretch = triton.cdiv(groups, stretches)
    stretches = triton.cdiv(groups, stretch)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    target = out
    if stretches > 1:
        target = torch.empty((stretches, rows, outputs), dtype=torch.float32, device=x.device)
    _linear[(triton.cdiv(rows, options["ROWS"]), blocks, stretches)](
        *(x, codes, scales, minima, bias, target, rows, outputs, stretch, x.stride(0)),
        INPUTS=inputs,
        GROUP=group,
        BITS=bits,
        SPLIT=stretches > 1,
        **options,
    )
    if stretches > 1:
        block = 1024
        _add_up[(triton.cdiv(out.numel(), block),)](
            target, bias, out, stretches, out.numel(), outputs, BLOCK=block, num_warps=4
        )
    return out
