"""The header of a frame: what a payload is and where it belongs, validated before anything is allocated for it.

Frames of one leg that are ready together travel as one: one message has all their headers, and one payload their bytes,
each frame beginning at a multiple of 64. So a frame can be small enough to stay in the processor's cache from gathering
to checksum and from checksum to placing, while messages are few however much there is to move.

The checksum is xxh3_64 of the payload, seeded with a hash of all other header fields, so that it holds for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgpack
import torch
import xxhash

from .events import LegKey
from .plan import Box, Range, length

MAX_FRAME_BYTES = 64 << 20
MAX_FRAME_TARGET = MAX_FRAME_BYTES // 4  # that frames are cut to: they have up to twice the size aimed at
MAX_PARCEL_BYTES = 128 << 20  # of the frames that are announced together
MAX_PARCEL_FRAMES = 512
FRAME_ALIGN = 64  # where a frame may begin in a payload
RAW = "raw"  # codec: the pool's own elements

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def item_bytes(dtype: str) -> int:
    """Bytes of one element. Raises ValueError for a dtype that KV cannot have."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"KV dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


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
        return [getattr(self, name) for name in _FIELDS]

    @staticmethod
    def unpack(data: Any) -> FrameHeader:
        """The inverse of `pack`, every field's type and sign checked. Raises ValueError."""
        if not isinstance(data, list) or len(data) != len(_FIELDS):
            raise ValueError("not a frame header")
        request, attempt, choice, sequence, layers, tokens, heads, dtype, codec, size, checked, checksum = data
        numbers = (attempt, choice, sequence, size, checksum)
        if not all(type(number) is int and 0 <= number < 1 << 64 for number in numbers):
            raise ValueError("frame header: a number is missing or out of range")
        if type(request) is not str or type(dtype) is not str or type(codec) is not str or type(checked) is not bool:
            raise ValueError("frame header: a field has the wrong type")
        ranges = (_range(layers, "layers"), _range(tokens, "tokens"), _range(heads, "heads"))
        return FrameHeader(request, attempt, choice, sequence, *ranges, dtype, codec, size, checked, checksum)


_FIELDS = tuple(field.name for field in fields(FrameHeader))


def _range(value: Any, name: str) -> Range:
    if not isinstance(value, list) or len(value) != 2 or not all(type(edge) is int for edge in value):
        raise ValueError(f"frame header: {name} is not a range")
    if not 0 <= value[0] < value[1] < 1 << 32:
        raise ValueError(f"frame header: {name} {value} is empty or negative")
    return (value[0], value[1])


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where frames of these sizes begin in the payload that they share, and its size in bytes."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // FRAME_ALIGN) * FRAME_ALIGN
        starts.append(start)
        end = start + size
    return starts, end


def payload_shape(box: Box, head_dim: int) -> tuple[int, int, int, int, int]:
    """Shape of a payload."""
    return (length(box.layers), 2, length(box.heads), length(box.tokens), head_dim)


def cell_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of one (token, layer, head) in elements of that type: a key and a value."""
    return 2 * head_dim * item_bytes(dtype)


def sealed(header: FrameHeader, sequence: int, payload: memoryview | None) -> FrameHeader:
    """The header under a sequence number, with the checksum of its payload (None: without one)."""
    fields: list[Any] = header.pack()
    fields[_FIELDS.index("sequence")] = sequence
    fields[-2:] = [payload is not None, 0]
    if payload is not None:
        fields[-1] = checksum(FrameHeader(*fields), payload)
    return FrameHeader(*fields)


def checksum(header: FrameHeader, payload: memoryview) -> int:
    """xxh3_64 over header and payload; `checked`, `checksum` of the header do not count."""
    about = msgpack.packb(header.pack()[:-2])
    return int(xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(about)))
