"""Safetensors whose linear weights are quantised already: compressed-tensors, GPTQ and AWQ, under their plain names.

Eight 4-bit codes share an int32, the first in its lowest bits; AWQ interleaves them. A weight is scale * (code - zero).
GPTQ and AWQ hold [inputs, outputs], compressed-tensors [outputs, inputs]; scales and zeros are for groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..kernels.linear import GROUP, INT8_GROUP
from ..proto.errors import ConfigError
from .checkpoint_format import CheckpointFormat, Layout
from .params import Quantization
from .quantized import Int4Weight, Int8Weight
from .tensor_store import StoredTensor
from .weights_hf import INTEGERS, SafetensorsStore

_MARKS: dict[Layout, str] = {"int8": "weight", "packed": "weight_packed", "gptq": "qweight", "awq": "qweight"}
_SCALES: dict[Layout, str] = {"int8": "weight_scale", "packed": "weight_scale", "gptq": "scales", "awq": "scales"}
_PARTS = ("weight_scale", "weight_zero_point", "weight_shape", "scales", "qzeros", "g_idx")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which of the eight codes of an int32 is the output's


class QuantizedStore:
    """The tensors of one directory; `weight` of a quantised layer stands for all its parts."""

    def __init__(self, directory: Path, form: CheckpointFormat) -> None:
        """Raises ConfigError like SafetensorsStore, and where a layer's parts do not fit together."""
        self._files = SafetensorsStore(directory, integers=True)
        self._form = form
        self._last: tuple[str, Int8Weight | Int4Weight] | None = None
        self._layers = {
            name.removesuffix(_MARKS[form.layout]): tensor
            for name, tensor in self._files.tensors.items()
            if name.endswith(f".{_MARKS[form.layout]}") and tensor.kind in INTEGERS
        }
        if not self._layers:
            raise ConfigError(f"{directory}: quantization_config names {form.layout}, but no layer is stored so")
        parts = {f"{layer}{part}" for layer in self._layers for part in (*_PARTS, _MARKS[form.layout])}
        tensors = {name: tensor for name, tensor in self._files.tensors.items() if name not in parts}
        tensors |= {f"{layer}weight": self._whole_tensor(layer, packed) for layer, packed in self._layers.items()}
        self.tensors: Mapping[str, StoredTensor] = tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop), dequantised to float32 where they are quantised."""
        if self._is_layer(name):
            return self.read_quantized(name, start, stop).dequantize()
        return self._files.read(name, start, stop)

    def quantized_group(self, name: str, wanted: Quantization) -> int:
        """Every quantised layer is computed with as it is."""
        if not self._is_layer(name):
            return 0
        return INT8_GROUP if self._form.layout == "int8" else GROUP

    def read_quantized(self, name: str, start: int, stop: int) -> Int8Weight | Int4Weight:
        """Rows [start, stop) of a quantised layer. Raises ConfigError for groups that are not made of 32 inputs."""
        if self._last is None or self._last[0] != name:
            layer = name.removesuffix("weight")
            self._last = (name, self._int8(layer) if self._form.layout == "int8" else self._int4(layer))
        return self._last[1].rows(slice(start, stop))

    def _is_layer(self, name: str) -> bool:
        return name.removesuffix("weight") in self._layers

    def _whole_tensor(self, layer: str, packed: StoredTensor) -> StoredTensor:
        """The layer's weight as [outputs, inputs]; the bytes are those of its codes."""
        rows, columns = packed.shape
        shapes: dict[Layout, tuple[int, int]] = {
            "int8": (rows, columns),
            "packed": (rows, columns * 8),
            "gptq": (columns, rows * 8),
            "awq": (columns * 8, rows),
        }
        if f"{layer}{_SCALES[self._form.layout]}" not in self._files.tensors:
            raise ConfigError(f"{packed.file}: {packed.name} has no {_SCALES[self._form.layout]} beside it")
        shape = shapes[self._form.layout]
        return StoredTensor(packed.name, shape, packed.kind, packed.file, packed.offset, packed.size)

    def _all(self, name: str) -> Tensor | None:
        tensor = self._files.tensors.get(name)
        return None if tensor is None else self._files.read(name, 0, tensor.shape[0])

    def _need(self, name: str) -> Tensor:
        if (found := self._all(name)) is None:
            raise ConfigError(f"missing tensor {name}")
        return found

    def _int8(self, layer: str) -> Int8Weight:
        codes, scales = self._need(f"{layer}weight"), self._need(f"{layer}weight_scale").float()
        if scales.numel() not in (1, codes.shape[0]):
            raise ConfigError(f"{layer}weight_scale: {list(scales.shape)} for {codes.shape[0]} outputs")
        return Int8Weight(codes, scales.flatten()[:, None].expand(codes.shape[0], -(-codes.shape[1] // INT8_GROUP)))

    def _int4(self, layer: str) -> Int4Weight:
        outputs, inputs = self.tensors[f"{layer}weight"].shape
        codes, scales, zeros = self._compressed(layer) if self._form.layout == "packed" else self._transposed(layer)
        groups = scales.shape[1]
        if inputs % groups or inputs // groups % GROUP or scales.shape[0] != outputs:
            raise ConfigError(
                f"{layer}: scales {list(scales.shape)} for {outputs} outputs and {inputs} inputs; "
                f"groups of a multiple of {GROUP} inputs are supported"
            )
        repeat = inputs // groups // GROUP

        def spread(numbers: Tensor) -> Tensor:
            return numbers.half().repeat_interleave(repeat, 1)

        if zeros is None:
            return Int4Weight(codes, spread(scales), None)
        return Int4Weight(codes, spread(scales), spread(-scales.float() * zeros))

    def _compressed(self, layer: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes [outputs, inputs], scales and zero points [outputs, groups]."""
        codes = _unpack(self._need(f"{layer}weight_packed"), range(8))
        zeros = self._all(f"{layer}weight_zero_point")
        if zeros is not None:
            zeros = _unpack(zeros.t().contiguous(), range(8)).t()
        return codes, self._need(f"{layer}weight_scale"), zeros

    def _transposed(self, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        """The same of GPTQ and AWQ."""
        packed = self._need(f"{layer}qweight")
        order: Sequence[int] = range(8)
        if self._form.layout == "awq":
            order = _AWQ_ORDER
            codes = _unpack(packed, order).t().contiguous()
        else:
            codes = _unpack(packed.t().contiguous(), order)
        zeros = _unpack(self._need(f"{layer}qzeros"), order).t() + self._form.zero_offset
        return codes, self._need(f"{layer}scales").t(), zeros


def _unpack(packed: Tensor, order: Sequence[int]) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, 8 n]; code i of an int32 is that in its bits from 4 * order[i] on."""
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32)
    return ((packed[..., None] >> shifts) & 15).to(torch.uint8).view(packed.shape[0], -1)
