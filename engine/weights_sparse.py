"""Safetensors with 2:4 sparse weights in compressed-tensors' `sparse-24-bitmask`, under their plain names.

Of every four inputs of a weight at most two are kept: NAME.compressed [outputs, inputs / 2] holds the kept values in
order, bit c % 8 of byte [r, c // 8] of NAME.bitmask says whether weight [r, c] is one of them, NAME.shape is the whole
shape. What comes out of here is dense, with the zeros in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..proto.errors import ConfigError
from .params import Quantization
from .quantized import Int4Weight, Int8Weight
from .tensor_store import StoredTensor
from .weights_hf import SafetensorsStore

_VALUES, _MASK, _SHAPE = ".compressed", ".bitmask", ".shape"


class SparseStore:
    """The tensors of one directory."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError like SafetensorsStore, and where a weight's parts do not fit together."""
        self._files = SafetensorsStore(directory, integers=True)
        stored = self._files.tensors
        self._sparse = {name.removesuffix(_VALUES) + ".weight" for name in stored if name.endswith(_VALUES)}
        if not self._sparse:
            raise ConfigError(f"{directory}: sparsity_config names sparse-24-bitmask, but no weight is stored so")
        parts = {name.removesuffix(".weight") + part for name in self._sparse for part in (_VALUES, _MASK, _SHAPE)}
        tensors = {name: tensor for name, tensor in stored.items() if name not in parts}
        self.tensors: Mapping[str, StoredTensor] = tensors | {name: self._whole(name) for name in self._sparse}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop), dense. Raises ConfigError where the mask does not keep half of each row."""
        if name not in self._sparse:
            return self._files.read(name, start, stop)
        layer = name.removesuffix(".weight")
        values = self._files.read(layer + _VALUES, start, stop)
        mask = self._files.read(layer + _MASK, start, stop)
        kept = (mask[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten(1)
        if not bool((kept.view(len(kept), -1, 4).sum(2) == 2).all()):
            raise ConfigError(f"{layer}{_MASK}: not two of every four inputs are kept")
        return values.new_zeros(kept.shape).masked_scatter_(kept, values)

    def quantized_group(self, name: str, wanted: Quantization) -> int:
        """Always 0: these are plain numbers."""
        return 0

    def read_quantized(self, name: str, start: int, stop: int) -> Int8Weight | Int4Weight:
        """Raises LookupError: there are none."""
        raise LookupError(f"{name} is not quantised")

    def _whole(self, name: str) -> StoredTensor:
        """The weight as [outputs, inputs]; the bytes are those of its values."""
        layer = name.removesuffix(".weight")
        values, mask = self._files.tensors[layer + _VALUES], self._files.tensors.get(layer + _MASK)
        rows, half = values.shape[0], values.shape[-1]
        if mask is None or len(values.shape) != 2 or (mask.kind, mask.shape) != ("U8", (rows, half // 4)) or half % 4:
            found = "none" if mask is None else f"{mask.kind} {list(mask.shape)}"
            raise ConfigError(
                f"{values.file}: {values.name} {list(values.shape)} needs {layer}{_MASK} U8 {[rows, half // 4]} beside "
                f"it; found {found}"
            )
        return StoredTensor(values.name, (rows, 2 * half), values.kind, values.file, values.offset, values.size)
