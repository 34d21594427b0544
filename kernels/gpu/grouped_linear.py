"""Linear layers of many experts in one launch: every row is multiplied by the weights of its own expert.

Pairs of a row and an expert are put in the order of experts; tiles of rows never cross from one to the next, and a
program finds its expert by bisection (ragged.py), so no count has to come back to the host. Inputs are summed in order
in tiles of one size: the bits of a row do not depend on what else its expert is given.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import sizes
from .paged_decode import check_int32
from .ragged import find_group


@triton.jit
def _grouped(
    x,
    weight,
    order,
    offsets,
    out,
    experts,
    outputs,
    stride_x,
    INPUTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = find_group(offsets, experts, tile, ROWS)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    first = begin + (tile - begin // ROWS - expert) * ROWS
    if first >= end:
        return
    at = first + tl.arange(0, ROWS)
    there = at < end
    pair = tl.load(order + at, mask=there, other=0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    depth = tl.arange(0, DEPTH)
    source = x + (pair // PER_ROW * stride_x)[:, None]
    matrix = weight + expert.to(tl.int64) * outputs * INPUTS + output.to(tl.int64)[:, None] * INPUTS
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, INPUTS, DEPTH):
        k = start + depth
        a = tl.load(source + k[None, :], mask=there[:, None] & (k < INPUTS)[None, :], other=0.0)
        w = tl.load(matrix + k[None, :], mask=is_output[:, None] & (k < INPUTS)[None, :], other=0.0)
        sums = tl.dot(a, tl.trans(w), sums, input_precision="ieee")
    target = out + (pair * outputs)[:, None] + output[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=there[:, None] & is_output[None, :])


@triton.jit
def _combine(parts, shares, out, columns, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(PER_ROW):
        share = tl.load(shares + row * PER_ROW + choice).to(tl.float32)
        part = tl.load(parts + (row * PER_ROW + choice) * columns + column, mask=inside, other=0.0)
        total += share * part.to(tl.float32)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=inside)


def route(experts_of: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """What `grouped_linear` needs of experts_of (int64 [T, per row]): pairs in the order of their experts (int64
    [T * per row]; pair = row * per row + choice), and where each expert's pairs start and end (int32 [experts + 1])."""
    flat = experts_of.reshape(-1)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat + 1, torch.ones_like(flat))
    return flat.argsort(stable=True), counts.cumsum(0).to(torch.int32)


def grouped_linear(x: Tensor, weight: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """Each pair's row times its expert's weight: [pairs, outputs] of the dtype of `x`, pairs in their own order.

    x [T, inputs] of contiguous rows, with T a divisor of the number of pairs (row = pair // (pairs / T)); weight
    [experts, outputs, inputs], contiguous, of its dtype; order and offsets from `route`. Raises ValueError.
    """
    experts, outputs, inputs = weight.shape
    pairs, rows = order.shape[0], x.shape[0]
    if x.dim() != 2 or x.shape[1] != inputs or x.stride(1) != 1 or x.dtype != weight.dtype:
        raise ValueError(f"x {list(x.shape)} of {x.dtype} for {inputs} inputs of {weight.dtype}")
    if not weight.is_contiguous() or order.dtype != torch.int64 or (rows and pairs % rows):
        raise ValueError(f"{pairs} pairs of {order.dtype} for {rows} rows; weight of strides {weight.stride()}")
    check_int32("offsets", offsets, experts + 1)
    out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    if pairs:
        options = sizes("grouped_linear", "float32" if x.dtype == torch.float32 else "half")
        grid = (pairs // options["ROWS"] + experts, triton.cdiv(outputs, options["OUTPUTS"]))
        tensors = (x, weight, order, offsets, out)
        _grouped[grid](*tensors, experts, outputs, x.stride(0), INPUTS=inputs, PER_ROW=pairs // rows, **options)
    return out


def combine(parts: Tensor, shares: Tensor) -> Tensor:
    """The sum of parts [T, per row, n], in the order of choices, times shares [T, per row]: [T, n]; all contiguous."""
    rows, per_row, columns = parts.shape
    if tuple(shares.shape) != (rows, per_row) or not (shares.is_contiguous() and parts.is_contiguous()):
        raise ValueError(f"shares {list(shares.shape)} for parts {list(parts.shape)}: must be contiguous")
    out = torch.empty((rows, columns), dtype=parts.dtype, device=parts.device)
    if out.numel():
        block = 1024
        grid = (rows, triton.cdiv(columns, block))
        _combine[grid](parts, shares, out, columns, PER_ROW=per_row, BLOCK=block, num_warps=4)
    return out
