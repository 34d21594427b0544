"""Weights in fewer bits, as the C kernels take them: int8 with a scale for 64 inputs, 4 bits with one for 32.

`w8a8`: symmetric, the largest magnitude of a group becomes 127; rows are quantised in the same groups. One scale for a
whole output and a whole token is coarser than a small model bears (docs/performance.md).
`int4`: a group's codes run from its least to its greatest weight, as GGUF's Q4_1 has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.linear import GROUP, INT8_GROUP
from .params import Quantization

# Errors of the head are errors of the logits, so it has more bits than the layers before it.
HEAD_SCHEMES: dict[Quantization, Quantization] = {"none": "none", "w8a8": "none", "int4": "w8a8"}
# Those of queries, keys and values are errors of what attention looks at: w8a8 loses the most there, for a sixth of its
# weights. What a checkpoint has in int8 stays so.
QKV_SCHEMES: dict[Quantization, Quantization] = {"none": "none", "w8a8": "none", "int4": "int4"}
BYTES = {"w8a8": 1 + 4 / INT8_GROUP, "int4": 0.5 + 4 / GROUP}  # of one weight
_CHUNK_BYTES = 4 << 20  # of float32, while a weight is quantised
_ZERO_CODE = 8  # of a 4-bit weight without minima


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """scales * codes, a scale for each INT8_GROUP inputs."""

    codes: Tensor  # int8 [outputs, inputs]
    scales: Tensor  # float32 [outputs, groups]; the last group may be smaller

    def dequantize(self) -> Tensor:
        """float32 [outputs, inputs]."""
        return self.codes * _spread(self.scales, INT8_GROUP, self.codes.shape[1])

    def columns(self, start: int, stop: int) -> Int8Weight:
        """The inputs [start, stop): whole groups."""
        groups = slice(start // INT8_GROUP, -(-stop // INT8_GROUP))
        return Int8Weight(self.codes[:, start:stop].contiguous(), self.scales[:, groups])

    def rows(self, order: Tensor | slice) -> Int8Weight:
        """The outputs `order`."""
        return Int8Weight(self.codes[order], self.scales[order])


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """scales * codes + minima, or scales * (codes - 8) where there are no minima; each for GROUP inputs."""

    codes: Tensor  # uint8 [outputs, inputs], 0 to 15
    scales: Tensor  # float16 [outputs, inputs / GROUP]
    minima: Tensor | None  # the same

    def dequantize(self) -> Tensor:
        """float32 [outputs, inputs]."""
        codes = self.codes.view(*self.scales.shape, GROUP).float()
        if self.minima is None:
            parts = (codes - _ZERO_CODE) * self.scales.float()[..., None]
        else:
            parts = codes * self.scales.float()[..., None] + self.minima.float()[..., None]
        return parts.view(self.codes.shape)

    def rows(self, order: Tensor | slice) -> Int4Weight:
        """The outputs `order`."""
        return Int4Weight(self.codes[order], self.scales[order], None if self.minima is None else self.minima[order])

    def columns(self, start: int, stop: int) -> Int4Weight:
        """The inputs [start, stop): whole groups."""
        groups = slice(start // GROUP, stop // GROUP)
        minima = None if self.minima is None else self.minima[:, groups]
        return Int4Weight(self.codes[:, start:stop].contiguous(), self.scales[:, groups], minima)


Weight = Tensor | Int8Weight | Int4Weight


def quantize(weight: Tensor, scheme: Quantization) -> Weight:
    """`weight` [outputs, inputs] in that scheme. int4 needs whole groups of inputs: other weights become w8a8."""
    if scheme == "none":
        return weight
    rows = max(1, _CHUNK_BYTES // (4 * weight.shape[1]))
    parts = torch.split(weight, rows)
    if scheme == "int4" and weight.shape[1] % GROUP == 0:
        return join([_int4(part.float()) for part in parts])
    return join([_int8(part.float()) for part in parts])


def join(parts: Sequence[Weight]) -> Weight:
    """The outputs of all parts, in order. Parts of different kinds become the one with more bits."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    if all(isinstance(part, Int4Weight) for part in parts):
        return _join_int4([part for part in parts if isinstance(part, Int4Weight)])
    whole = [part if isinstance(part, Int8Weight) else _int8(full(part)) for part in parts]
    return Int8Weight(torch.cat([part.codes for part in whole]), torch.cat([part.scales for part in whole]))


def full(weight: Weight) -> Tensor:
    """Its values, float32 unless it is a tensor already."""
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def _join_int4(parts: Sequence[Int4Weight]) -> Int4Weight:
    """Where one part has minima all get them; minus eight scales is exact."""
    minima = None
    if any(part.minima is not None for part in parts):
        minima = torch.cat([-_ZERO_CODE * part.scales if part.minima is None else part.minima for part in parts])
    return Int4Weight(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]), minima)


def _spread(numbers: Tensor, group: int, inputs: int) -> Tensor:
    """[outputs, groups] -> [outputs, inputs]."""
    return numbers.repeat_interleave(group, 1)[:, :inputs]


def _int8(weight: Tensor) -> Int8Weight:
    inputs = weight.shape[1]
    padded = F.pad(weight, (0, -inputs % INT8_GROUP)).view(weight.shape[0], -1, INT8_GROUP)
    scales = padded.abs().amax(-1) / 127
    codes = weight / _spread(scales.clamp_min(torch.finfo(torch.float32).tiny), INT8_GROUP, inputs)
    return Int8Weight(codes.round_().to(torch.int8), scales)


def _int4(weight: Tensor) -> Int4Weight:
    """Codes are chosen for the scales and minima as they are stored, so that rounding these costs nothing twice."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    least, most = groups.aminmax(dim=-1)
    minima = least.half()
    scales = ((most - minima.float()) / 15).half()
    steps = (groups - minima.float()[..., None]) / scales.float().clamp_min(1e-12)[..., None]
    codes = steps.round_().clamp_(0, 15).to(torch.uint8)
    return Int4Weight(codes.view(weight.shape), scales, minima)
