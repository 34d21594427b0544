"""Safetensors in a Hugging Face directory: one file, or shards with an index; all are checked before any is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..proto.errors import ConfigError
from .params import Quantization
from .quantized import Int4Weight, Int8Weight
from .tensor_store import StoredTensor

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
INTEGERS = {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
_NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KINDS = {**_NUMBERS, **INTEGERS}
_MAX_HEADER = 100_000_000  # bytes; the limit of the format


class SafetensorsStore:
    """The tensors of one directory."""

    def __init__(self, directory: Path, integers: bool) -> None:
        """`integers`: whether there may be tensors of integers.

        Raises ConfigError naming the files when one is missing, cut, damaged, or at odds with the index.
        """
        index = directory / _INDEX
        if index.is_file():
            self.tensors: Mapping[str, StoredTensor] = _from_index(directory, index)
        elif (directory / _SINGLE).is_file():
            self.tensors = _read_header(directory / _SINGLE)
        else:
            others = sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".bin"))
            found = f"; found {', '.join(others)}" if others else ""
            raise ConfigError(f"{directory} holds neither {_SINGLE} nor {_INDEX}{found}")
        for name, tensor in self.tensors.items():
            if tensor.kind in INTEGERS and not integers:
                raise ConfigError(_unsupported(tensor.file, name, tensor.kind, _NUMBERS))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) as stored."""
        tensor = self.tensors[name]
        kind = _KINDS[tensor.kind]
        row = tensor.row_bytes
        data = np.fromfile(tensor.file, np.uint8, (stop - start) * row, offset=tensor.offset + start * row)
        return torch.from_numpy(data).view(kind).view(stop - start, *tensor.shape[1:])

    def quantized_group(self, name: str, wanted: Quantization) -> int:
        """Always 0: these are checkpoints of plain numbers."""
        return 0

    def read_quantized(self, name: str, start: int, stop: int) -> Int8Weight | Int4Weight:
        """Raises LookupError: there are none."""
        raise LookupError(f"{name} is not quantised")


def _from_index(directory: Path, index: Path) -> dict[str, StoredTensor]:
    placed = _weight_map(index)
    files = sorted(set(placed.values()))
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        raise ConfigError(f"{directory}: missing shards {', '.join(missing)}, which {_INDEX} names")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_header(directory / file).items():
            if name in tensors:
                raise ConfigError(f"{directory}: tensor {name} is in both {tensors[name].file.name} and {file}")
            if name not in placed:
                raise ConfigError(f"{directory}: {file} holds {name}, which {_INDEX} does not name (a stale index?)")
            tensors[name] = tensor
    for name, file in placed.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ConfigError(f"{directory}: {_INDEX} places {name} in {file}, which does not hold it")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    try:
        placed = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index} is no readable index: {error!r}") from error
    if not isinstance(placed, dict) or not placed:
        raise ConfigError(f"{index}: weight_map must be a table of tensors and files")
    for file in placed.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{index}: {file!r} is not the name of a file in the same directory")
    return placed


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; its length must be exactly what the header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ConfigError(f"{path}: a header of {length} bytes does not fit in the file's {size} (cut off?)")
        try:
            header = json.loads(file.read(length))
            tensors = {k: _entry(path, 8 + length, k, v) for k, v in header.items() if k != "__metadata__"}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path}: damaged header: {error!r}") from error
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset != end:
            raise ConfigError(f"{path}: {tensor.name} begins at byte {tensor.offset}, not at {end}")
        end += tensor.size
    if end != size:
        raise ConfigError(f"{path}: the header describes {end} bytes, the file has {size} (cut off or overwritten?)")
    return tensors


def _entry(path: Path, base: int, name: str, fields: Mapping[str, Any]) -> StoredTensor:
    shape = tuple(int(extent) for extent in fields["shape"])
    begin, end = (int(offset) for offset in fields["data_offsets"])
    kind = str(fields["dtype"])
    if kind not in _KINDS:
        raise ConfigError(_unsupported(path, name, kind, _KINDS))
    if not shape or min(shape) < 1 or end - begin != int(np.prod(shape)) * _KINDS[kind].itemsize:
        raise ConfigError(f"{path}: tensor {name} of shape {list(shape)} and dtype {kind} has {end - begin} bytes")
    return StoredTensor(name, shape, kind, path, base + begin, end - begin)


def _unsupported(path: Path, name: str, kind: str, known: Iterable[str]) -> str:
    return f"{path}: tensor {name} has unsupported dtype {kind}; supported: {', '.join(known)}"
