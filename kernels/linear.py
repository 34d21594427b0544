"""Linear layers by C: packed bfloat16, int8 or 4-bit weights times rows of bfloat16, as kernels/c/linear*.c have them.

A weight is read once and as one stream for any number of rows, and a row's result depends on that row alone: an
output's products are summed in the order of the inputs, whatever rows come with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .memory import prefer_huge_pages
from .native import library

Linear = Callable[[Tensor], Tensor]  # [rows, inputs] -> [rows, outputs]
Kind = Literal["bf16", "int8", "int4"]
GROUP = 32  # inputs that share a scale of a 4-bit weight
INT8_GROUP = 64  # the same of an int8 weight; there may be a smaller one at the end
_PANEL = 64  # outputs side by side
_AMX = 4  # the level of matrix tiles
_TILE = 16  # their columns, and rows of pairs of inputs


class _Linear(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "level", "threads", "has_minima")),
    )


def best_level(kind: Kind) -> int:
    """What this processor has for such products: 0 plain C, 1 AVX2, 2 AVX-512 (integers: AVX2 with VNNI), 3 AVX-512
    with bfloat16 or byte products, 4 matrix tiles (not for 4-bit weights). Raises OSError where there is no library."""
    if (native := library()) is None:
        raise OSError("no C kernels")
    find = {"bf16": native.baton_bf16_level, "int8": native.baton_int8_level, "int4": native.baton_int_level}[kind]
    return int(find())


class NativeLinear:
    """One layer. It runs on as many threads as torch has when it is made."""

    def __init__(
        self,
        kind: Kind,
        packed: Tensor,
        shape: tuple[int, int],
        scales: Tensor | None,
        bias: Tensor | None,
        has_minima: bool,
        level: int | None,
    ) -> None:
        """`level`: at most `best_level`, which None stands for."""
        best = best_level(kind)
        self.kind, (self.outputs, self.inputs) = kind, shape
        wide = None if bias is None else bias.float().contiguous()
        self._keep = (packed, scales, wide)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in self._keep)
        use = best if level is None else min(level, best)
        self._layer = _Linear(*pointers, *shape, use, torch.get_num_threads(), has_minima)
        self.where = ctypes.addressof(self._layer)  # of what C knows of it
        self._call = getattr(library(), f"baton_{kind}_linear")
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._call.restype = ctypes.c_int

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs], bfloat16. Raises MemoryError."""
        rows = rows.contiguous()
        if rows.dtype != torch.bfloat16 or rows.shape[1:] != (self.inputs,):
            raise ValueError(f"rows {list(rows.shape)} of {rows.dtype} for {self.inputs} inputs of bfloat16")
        out = rows.new_empty(rows.shape[0], self.outputs)
        if self._call(self.where, rows.data_ptr(), rows.shape[0], out.data_ptr()):
            raise MemoryError(f"no memory for {rows.shape[0]} quantised rows of {self.inputs} inputs")
        return out


def bf16_linear(weight: Tensor, bias: Tensor | None, level: int | None = None) -> NativeLinear:
    """The layer of a bfloat16 weight [outputs, inputs], inputs even in number. Raises OSError without the library."""
    level = best_level("bf16") if level is None else min(level, best_level("bf16"))
    packed = _tiles(weight) if level == _AMX else _panels(weight, 2)
    return NativeLinear("bf16", packed, _shape(weight), None, bias, False, level)


def int8_linear(codes: Tensor, scales: Tensor, bias: Tensor | None, level: int | None = None) -> NativeLinear:
    """The layer of scales * codes: int8 [outputs, inputs], float32 [outputs, groups of INT8_GROUP inputs]; rows are
    quantised by the same groups. Raises OSError without the library."""
    level = best_level("int8") if level is None else min(level, best_level("int8"))
    if level == _AMX:
        more = -len(codes) % (2 * _TILE)
        packed = _panels(F.pad(codes, (0, -codes.shape[1] % INT8_GROUP, 0, more)), 4, _TILE)
        factors = _panels(F.pad(scales.float(), (0, 0, 0, more)), 1, _TILE)
    else:
        packed, factors = _panels(codes.view(torch.uint8) ^ 128, 4), _panels(scales.float(), 1)
    return NativeLinear("int8", packed, _shape(codes), factors, bias, False, level)


def int4_linear(
    codes: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None, level: int | None = None
) -> NativeLinear:
    """The layer of scales * codes + minima, or without minima of scales * (codes - 8); rows are quantised by groups.

    `codes` uint8 [outputs, inputs] from 0 to 15, `scales` and `minima` float16 [outputs, inputs / GROUP]. Raises
    OSError without the library.
    """
    outputs, inputs = codes.shape
    halves = codes.view(outputs, inputs // GROUP, 2, GROUP // 2)
    nibbles = halves[:, :, 0] | halves[:, :, 1] << 4
    parts = [_panels(nibbles.reshape(outputs, -1), 4).view(-1, inputs // GROUP, _PANEL * GROUP // 2)]
    for numbers in (scales, minima):
        if numbers is not None:
            bits = numbers.half().contiguous().view(torch.uint8)
            parts.append(_panels(bits, 2).view(-1, inputs // GROUP, 2 * _PANEL))
    width = sum(part.shape[2] for part in parts)
    packed = prefer_huge_pages(torch.empty(parts[0].shape[0], inputs // GROUP, width, dtype=torch.uint8))
    torch.cat(parts, dim=2, out=packed)
    return NativeLinear("int4", packed, _shape(codes), None, bias, minima is not None, level)


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def _panels(weight: Tensor, step: int, width: int = _PANEL) -> Tensor:
    """[panels, steps, width, step]: `step` inputs of each of `width` outputs side by side, filled up with zeros."""
    outputs, inputs = weight.shape
    panels, steps = -(-outputs // width), -(-inputs // step)
    if outputs % width or inputs % step:
        weight = F.pad(weight, (0, steps * step - inputs, 0, panels * width - outputs))
    packed = prefer_huge_pages(torch.empty(panels, steps, width, step, dtype=weight.dtype))
    return packed.copy_(weight.reshape(panels, width, steps, step).permute(0, 2, 1, 3))


def _tiles(weight: Tensor) -> Tensor:
    """[panels, steps, 2 tiles, 16 pairs of inputs, 16 outputs, 2] of c/linear_bf16_amx.c, filled up with zeros."""
    outputs, inputs = weight.shape
    wide = 2 * _TILE
    panels, steps = -(-outputs // wide), -(-inputs // wide)
    weight = F.pad(weight, (0, steps * wide - inputs, 0, panels * wide - outputs))
    packed = prefer_huge_pages(torch.empty(panels, steps, 2, _TILE, _TILE, 2, dtype=weight.dtype))
    return packed.copy_(weight.reshape(panels, 2, _TILE, steps, _TILE, 2).permute(0, 3, 1, 4, 2, 5))
