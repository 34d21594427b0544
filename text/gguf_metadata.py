"""Reads the head of a GGUF file: its key/value pairs and where its tensors lie.

`gguf.GGUFReader` makes one numpy object per string, which takes seconds for a vocabulary; this takes a fraction of one.
Every count and length in the file is checked against what is left of the file before anything is made from it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..proto.errors import ConfigError

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file. `shape` is in the file's order (fastest dimension first); `offset` counts from the
    start of the file; `kind` is the ggml type number."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """The head of a GGUF file."""

    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]


def read(path: Path) -> dict[str, Any]:
    """The key/value pairs: numbers, booleans, strings and lists of them. Raises ConfigError for a damaged file."""
    return read_header(path).metadata


def read_header(path: Path) -> Header:
    """Key/value pairs and tensor entries. Raises ConfigError, naming the file and the place, for a damaged one."""
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).header()
        except (ValueError, struct.error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no readable GGUF file: {error}") from error


class _Cursor:
    """A position in the file that never moves past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self) -> Header:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._scalar(_U32)
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported (2 and 3 are)")
        tensor_count = self._count("tensors", 24)
        pair_count = self._count("key/value pairs", 13)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            if key in metadata:
                raise ValueError(f"key {key!r} appears twice")
            metadata[key] = self._value(self._scalar(_U32))
        entries = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-self._at // alignment) * alignment
        tensors = tuple(TensorEntry(name, shape, kind, start + offset) for name, shape, kind, offset in entries)
        for tensor in tensors:
            if tensor.offset > self._size:
                raise ValueError(f"tensor {tensor.name!r} begins at {tensor.offset}, past the end at {self._size}")
        return Header(metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._scalar(_U32)
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._scalar(_U64) for _ in range(dimensions))
        kind = self._scalar(_U32)
        return name, shape, kind, self._scalar(_U64)

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"value type {kind} at byte {self._at} is unknown")
        item = self._scalar(_U32)
        if item == _STRING:
            return self._strings(self._count("array items", 8))
        if item not in _SCALARS:
            raise ValueError(f"array item type {item} at byte {self._at} is not supported")
        scalar = _SCALARS[item]
        count = self._count("array items", scalar.size)
        return list(struct.unpack(f"<{count}{scalar.format[-1]}", self._take(count * scalar.size)))

    def _strings(self, count: int) -> list[str]:
        """`count` strings, with everything in local variables: vocabularies have hundreds of thousands."""
        data, size, at, unpack = self._data, self._size, self._at, _U64.unpack_from
        strings = []
        for _ in range(count):
            length: int = unpack(data, at)[0]
            at += 8
            if length > size - at:
                raise ValueError(f"a string of {length} bytes at byte {at} passes the end at {size}")
            strings.append(data[at : at + length].decode())
            at += length
        self._at = at
        return strings

    def _string(self) -> str:
        return self._take(self._scalar(_U64)).decode()

    def _count(self, what: str, least_bytes: int) -> int:
        count: int = self._scalar(_U64)
        if count > (self._size - self._at) // least_bytes:
            raise ValueError(f"{count} {what} at byte {self._at} cannot fit in the {self._size} bytes of the file")
        return count

    def _scalar(self, kind: struct.Struct) -> Any:
        return kind.unpack(self._take(kind.size))[0]

    def _take(self, size: int) -> bytes:
        if size > self._size - self._at:
            raise ValueError(f"{size} bytes at byte {self._at} pass the end at {self._size}")
        self._at += size
        return self._data[self._at - size : self._at]
