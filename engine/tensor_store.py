"""What the loader sees of a file format: tensors by their Hugging Face names, read in ranges of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from .params import Quantization
from .quantized import Int4Weight, Int8Weight


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk. `shape` is [rows, columns], or [rows] for a vector, as PyTorch has it."""

    name: str  # in the file
    shape: tuple[int, ...]
    kind: str  # number format in the file, e.g. BF16 or Q4_1
    file: Path
    offset: int  # bytes from the start of the file
    size: int  # bytes in the file

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the file."""
        return self.size // self.shape[0]


class TensorStore(Protocol):
    """An opened checkpoint whose files were found whole."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By Hugging Face name; a tensor that has none keeps the name that it has in the file."""
        ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop), as float32, float16 or bfloat16. Of q and k projections only whole heads."""
        ...

    def quantized_group(self, name: str, wanted: Quantization) -> int:
        """Inputs that share a scale where the tensor is stored in bits that an engine with that quantisation computes
        with as they are; 0 elsewhere."""
        ...

    def read_quantized(self, name: str, start: int, stop: int) -> Int8Weight | Int4Weight:
        """Like `read`, in the bits of the file; of tensors that are stored so."""
        ...
