"""Linear layers in e4m3 on both sides: a scale for each row of inputs, found on the way in, and one for each output.

For GPUs whose tensor cores multiply e4m3 (compute capability 9.0 and 10.x). Sums of DEPTH products are added up in
float32: on 9.0 the tensor cores themselves keep fewer bits of a long sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_codes import encode
from .launch import check_rows, sizes

_FEW = 16  # rows of the smallest tile


@triton.jit
def _quantise_rows(x, codes, scales, stride_x, INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < INPUTS
    values = tl.load(x + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    code, scale = encode(values[None, :], "fp8")
    tl.store(codes + row * INPUTS + column[None, :], code, mask=inside[None, :])
    tl.store(scales + row + tl.arange(0, 1), scale)


@triton.jit
def _fp8_linear(
    x,
    x_scales,
    codes,
    scales,
    bias,
    out,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    depth = tl.arange(0, DEPTH)
    is_row, is_output = row < rows, output < outputs
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, INPUTS, DEPTH):
        k = start + depth
        is_input = (k < INPUTS)[None, :]
        a = tl.load(x + row.to(tl.int64)[:, None] * INPUTS + k[None, :], mask=is_row[:, None] & is_input, other=0.0)
        w = tl.load(
            codes + output.to(tl.int64)[:, None] * INPUTS + k[None, :], mask=is_output[:, None] & is_input, other=0.0
        )
        sums += tl.dot(a, tl.trans(w))
    sums *= tl.load(x_scales + row, mask=is_row, other=0.0)[:, None]
    sums *= tl.load(scales + output, mask=is_output, other=0.0)[None, :]
    if bias is not None:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    target = out + (row.to(tl.int64) * outputs)[:, None] + output[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, inputs] of contiguous rows as e4m3 codes (uint8 [T, inputs]) and scales (float32 [T]), by the rule of
    kernels/kv_quantize.py. A value that is not finite shows as a scale that is not."""
    check_rows("x", x)
    rows, inputs = x.shape
    codes = torch.empty((rows, inputs), dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(inputs)
        warps = max(1, min(16, block // 512))
        _quantise_rows[(rows,)](x, codes, scales, x.stride(0), INPUTS=inputs, BLOCK=block, num_warps=warps)
    return codes, scales


def fp8_linear(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, batch_invariant: bool = True
) -> Tensor:
    """x [T, inputs], quantised by rows, times scales * codes, plus bias [outputs]: [T, outputs] of the dtype of `x`.

    codes uint8 [outputs, inputs] (e4m3), scales float32 [outputs], contiguous; inputs a multiple of 16. Raises
    ValueError, also on a GPU without e4m3 products.
    """
    outputs, inputs = codes.shape
    if x.dim() != 2 or x.shape[1] != inputs or inputs % 16:
        raise ValueError(f"x {list(x.shape)} for {inputs} inputs: must be equal, and a multiple of 16")
    if codes.dtype != torch.uint8 or not codes.is_contiguous() or tuple(scales.shape) != (outputs,):
        raise ValueError(f"codes {list(codes.shape)} of {codes.dtype}, scales {list(scales.shape)}: must be uint8")
    rows = x.shape[0]
    options = sizes("fp8_linear", "few" if batch_invariant or rows <= _FEW else "many")
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows:
        own, own_scales = quantise_rows(x)
        grid = (triton.cdiv(rows, options["ROWS"]), triton.cdiv(outputs, options["OUTPUTS"]))
        weights = codes.view(torch.float8_e4m3fn)
        tensors = (own.view(torch.float8_e4m3fn), own_scales, weights, scales, bias, out)
        _fp8_linear[grid](*tensors, rows, outputs, INPUTS=inputs, **options)
    return out
