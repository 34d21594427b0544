"""Linear layers on a CPU: our own C where it is the fastest, else plain, prepacked, or prepacked in row tiles.

The C kernels (kernels/linear.py) take every number of rows and give a row the same bits whatever comes with it; they
read weights at the core's bandwidth and reach oneDNN's rate or more at many rows. Quantised weights are theirs alone.

oneDNN chooses how to block the inner dimension by the number of rows, so a row's bits may depend on how many rows
come with it. `TiledLinear` calls it with a few fixed row counts only, and only with those that were measured, on this
machine and for this shape, to give the bits of the 32-row call; other numbers of rows are padded and cut.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.linear import Linear, best_level, bf16_linear, int4_linear, int8_linear
from ..kernels.native import library
from .quantized import Int4Weight, Int8Weight, Weight

ROW_COUNTS = (1, 8, 16, 32, 64, 128, 256, 512)  # rows of one call
_REFERENCE = 32
_PROBE_CALLS = 32  # of the smaller row count, at least, for each comparison
_PACK_FOR = (1, _REFERENCE, ROW_COUNTS[-1])  # row counts that oneDNN's packed layout may be optimised for
_CALL_BYTES = 8 << 20  # of one call's output: beyond, more rows gain nothing and oneDNN takes scratch for them
PROBE_BYTES = 4 * _CALL_BYTES  # taken while packings are compared, beside three times the weight
_FILLED = 0.75  # a call is padded when more than this share of its rows is used


class Packing:
    """How weights are packed, found out once per shape: ranks of a worker and both pools then do the same."""

    def __init__(self, batch_invariant: bool) -> None:
        self._invariant = batch_invariant
        self._found: dict[tuple[int, int, bool], tuple[int, tuple[int, ...]]] = {}

    def pads(self, dtype: torch.dtype) -> bool:
        """Whether layers of that dtype on a CPU run best with `padded_rows`."""
        return self._invariant and dtype == torch.bfloat16 and not _native_is_best()

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """The layer for `weight` [outputs, inputs] and `bias` [outputs], in the weight's dtype and on its device.

        A quantised weight takes and gives bfloat16; without the C library it is a bfloat16 weight from here on.
        """
        if library() is None and not isinstance(weight, Tensor):
            weight = weight.dequantize().bfloat16()
        if isinstance(weight, Int8Weight):
            return int8_linear(weight.codes, weight.scales, bias)
        if isinstance(weight, Int4Weight):
            return int4_linear(weight.codes, weight.scales, weight.minima, bias)
        if _is_native(weight):
            return bf16_linear(weight, bias)
        if not _packs(weight):
            return self._plain(weight, bias)
        if not self._invariant:
            return PackedLinear(weight, bias, _REFERENCE)
        key = (weight.shape[0], weight.shape[1], bias is not None)
        if key not in self._found:
            self._found[key] = _find_packing(weight.shape[0], weight.shape[1], None if bias is None else bias * 0)
        pack_for, counts = self._found[key]
        return TiledLinear(PackedLinear(weight, bias, pack_for), counts)

    def head(self, weight: Weight) -> Linear:
        """Like `linear`, for a weight that is too large to try out packings, and that few rows need at a time."""
        if isinstance(weight, Tensor) and _packs(weight) and self._invariant and not _is_native(weight):
            return TiledLinear(PackedLinear(weight, None, _REFERENCE), (_REFERENCE,))
        return self.linear(weight, None)

    def _plain(self, weight: Tensor, bias: Tensor | None) -> Linear:
        plain = PlainLinear(weight, bias)
        reduced = weight.dtype == torch.bfloat16
        return TiledLinear(plain, (_REFERENCE,)) if reduced and self._invariant else plain


def _native_is_best() -> bool:
    """Whether our own kernels take bfloat16: they are here, and use this processor's vectors or matrix tiles."""
    return library() is not None and best_level("bf16") > 0


def _is_native(weight: Tensor) -> bool:
    pairs = weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    return pairs and _native_is_best()


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN has packed bfloat16 products here (AVX-512 or better)."""
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.bfloat16 and supported


class PlainLinear:
    """The weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.outputs = weight.shape[0]
        self._weight, self._bias = weight, bias

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""
        return F.linear(rows, self._weight, self._bias)


class PackedLinear:
    """A bfloat16 weight in the layout that oneDNN prefers for `pack_for` rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, pack_for: int) -> None:
        self.outputs = weight.shape[0]
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, pack_for)

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return result


class TiledLinear:
    """A layer that is only called with row counts that agree bit for bit."""

    def __init__(self, layer: PackedLinear | PlainLinear, counts: tuple[int, ...]) -> None:
        """`counts` ascending."""
        self._layer = layer
        self.counts = counts

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]; a row's result depends on that row alone."""
        total = rows.shape[0]
        if total in self.counts:
            return self._layer(rows)
        out = rows.new_empty(total, self._layer.outputs)
        start = 0
        for count in cover(total, self.counts):
            piece = rows[start : start + count]
            used = piece.shape[0]
            if used < count:
                piece = F.pad(piece, (0, 0, 0, count - used))
            out[start : start + used] = self._layer(piece)[:used]
            start += used
        return out


def cover(rows: int, counts: tuple[int, ...]) -> list[int]:
    """Row counts, out of the ascending `counts`, whose sum is at least `rows`: few calls and little padding."""
    pieces: list[int] = []
    while rows > 0:
        enough = next((count for count in counts if count >= rows), None)
        if enough is not None and (rows > _FILLED * enough or enough == counts[0] or enough <= _REFERENCE):
            return [*pieces, enough]
        pieces.append(max((count for count in counts if count <= rows), default=counts[0]))
        rows -= pieces[-1]
    return pieces


def padded_rows(rows: int) -> int:
    """Rows of a step whose linears all run without padding of their own."""
    return sum(cover(rows, ROW_COUNTS))


def _find_packing(outputs: int, inputs: int, bias: Tensor | None) -> tuple[int, tuple[int, ...]]:
    """The layout with the most row counts that agree, and these counts. The 32-row call is always among them."""
    weight, rows = _cancelling(outputs, inputs)
    most = max(_REFERENCE, _CALL_BYTES // (outputs * weight.itemsize))
    candidates = tuple(count for count in ROW_COUNTS if count <= most)
    best: tuple[int, tuple[int, ...]] = (_REFERENCE, ())
    for pack_for in _PACK_FOR:
        packed = PackedLinear(weight, bias, pack_for)
        counts = tuple(count for count in candidates if count == _REFERENCE or _agrees(packed, rows, count))
        if len(counts) > len(best[1]):
            best = (pack_for, counts)
        if counts == candidates:
            break
    return best


def _cancelling(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """A weight and rows whose products cancel in pairs and span many magnitudes.

    What is left is the rounding of the sums alone, so another order of summation shows in nearly every element; with
    ordinary numbers it would be rounded away in all but a few.
    """
    generator = torch.Generator().manual_seed(0)
    half = inputs // 2
    places = torch.randperm(inputs, generator=generator)[: 2 * half]
    weight = torch.zeros(min(outputs, 512), inputs, dtype=torch.bfloat16)
    rows = torch.zeros(ROW_COUNTS[-1], inputs, dtype=torch.bfloat16)
    columns = torch.randn(len(weight), half, generator=generator, dtype=torch.bfloat16)
    magnitudes = 2.0 ** torch.randint(-8, 9, (half,), generator=generator)
    values = (torch.randn(len(rows), half, generator=generator) * magnitudes).bfloat16()
    for part, sign in ((places[:half], 1), (places[half:], -1)):
        weight[:, part] = columns
        rows[:, part] = sign * values
    return weight.repeat(-(-outputs // len(weight)), 1)[:outputs], rows


def _agrees(packed: PackedLinear, rows: Tensor, count: int) -> bool:
    """Whether calls with `count` rows give the bits of calls with 32. Compared piece by piece: outputs may be wide."""
    narrow, wide = sorted((count, _REFERENCE))
    for start in range(0, min(len(rows), max(wide, _PROBE_CALLS * narrow)), wide):
        together = packed(rows[start : start + wide])
        for at in range(start, start + wide, narrow):
            if not torch.equal(packed(rows[at : at + narrow]), together[at - start : at - start + narrow]):
                return False
    return True
