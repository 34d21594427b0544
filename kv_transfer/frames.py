"""The header of a frame: what a payload is and where it belongs, validated before anything is allocated for it.

The checksum is xxh3_64 of the payload, seeded with a hash of all other header fields, so that it holds for both.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

import msgpack
import torch
import xxhash

from .events import LegKey
from .plan import Box, Range, length

MAX_FRAME_BYTES = 64 << 20
RAW = "raw"  # codec: the pool's own elements

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def item_bytes(dtype: str) -> int:
    """Bytes of one element. Raises ValueError for a dtype that KV cannot have."""
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"KV dtype {dtype!r} is not one of {', '.join(_ITEM_BYTES)}")
    return _ITEM_BYTES[dtype]


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of that name. Raises ValueError for a dtype that KV cannot have."""
    item_bytes(dtype)
    return _TORCH[dtype]


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """One frame. Ranges are half-open; heads are the model's own numbers. checksum 0 with `checked` false: none."""

    request: str
    attempt: int
    first_choice: int
    sequence: int  # per link, from 0, never repeated
    layers: Range
    tokens: Range
    heads: Range
    dtype: str
    codec: str
    bytes: int
    checked: bool
    checksum: int

    @property
    def leg(self) -> LegKey:
        """The leg that it belongs to."""
        return (self.request, self.attempt, self.first_choice)

    @property
    def box(self) -> Box:
        """The cells that it fills."""
        return Box(self.tokens, self.layers, self.heads)

    def pack(self) -> list[Any]:
        """As a msgpack array in field order."""
        return list(astuple(self))

    @staticmethod
    def unpack(data: Any) -> FrameHeader:
        """The inverse of `pack`, every field's type and sign checked. Raises ValueError."""
        if not isinstance(data, list) or len(data) != len(fields(FrameHeader)):
            raise ValueError("not a frame header")
        request, attempt, choice, sequence, layers, tokens, heads, dtype, codec, size, checked, checksum = data
        numbers = (attempt, choice, sequence, size, checksum)
        if not all(type(number) is int and 0 <= number < 1 << 64 for number in numbers):
            raise ValueError("frame header: a number is missing or out of range")
        if type(request) is not str or type(dtype) is not str or type(codec) is not str or type(checked) is not bool:
            raise ValueError("frame header: a field has the wrong type")
        ranges = (_range(layers, "layers"), _range(tokens, "tokens"), _range(heads, "heads"))
        return FrameHeader(request, attempt, choice, sequence, *ranges, dtype, codec, size, checked, checksum)


def _range(value: Any, name: str) -> Range:
    if not isinstance(value, list) or len(value) != 2 or not all(type(edge) is int for edge in value):
        raise ValueError(f"frame header: {name} is not a range")
    if not 0 <= value[0] < value[1] < 1 << 32:
        raise ValueError(f"frame header: {name} {value} is empty or negative")
    return (value[0], value[1])


def payload_bytes(box: Box, head_dim: int, dtype: str) -> int:
    """Bytes of a raw payload [layers, 2, heads, tokens, head_dim]."""
    return box.volume * cell_bytes(head_dim, dtype)


def payload_shape(box: Box, head_dim: int) -> tuple[int, int, int, int, int]:
    """Shape of a payload."""
    return (length(box.layers), 2, length(box.heads), length(box.tokens), head_dim)


def cell_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of one (token, layer, head): a key and a value."""
    return 2 * head_dim * item_bytes(dtype)


def checksum(header: FrameHeader, payload: memoryview) -> int:
    """xxh3_64 over header and payload; `checked`, `checksum` of the header do not count."""
    about = msgpack.packb(header.pack()[:-2])
    return int(xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(about)))
