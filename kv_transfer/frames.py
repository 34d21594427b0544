"""What announces frames, what follows each of them, and the checksum that binds the two; validated before any payload.

Frames of one leg that are ready together travel as a parcel: one message names them all, and after it was accepted they
come one after the other, each of its bytes and a trailer. A frame is small enough to stay in the processor's cache from
the copy out of one pool to the copy into the other, and only exists as bytes while it is on its way.

The trailer says whether the frame is worth anything (the leg may have ended since it was announced, and then the bytes
are `VOID`: of any content, and dropped) and has its checksum: xxh3_64 of the bytes, seeded with a hash of everything
that was announced about them, so that it holds for both.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
import xxhash

from ..kernels.kv_quantize import CODES
from ..kernels.kv_rows import row_width
from .events import LegKey
from .plan import Box, length

MAX_FRAME_BYTES = 64 << 20
MAX_FRAME_TARGET = MAX_FRAME_BYTES // 4  # that frames are cut to
MAX_PARCEL_BYTES = 128 << 20  # of the frames that are announced together, trailers included
MAX_PARCEL_FRAMES = 512
RAW = "raw"  # codec: the pool's own elements
WHOLE, VOID = 0x4B, 0xB4  # states in a trailer; they differ in every bit
TRAILER = struct.Struct("!B7xQ")  # state, checksum (0: without)
TRAILER_BYTES = TRAILER.size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, **CODES}
_ABOUT = struct.Struct("!8Q")  # number of the frame, its ranges, its size


def item_bytes(dtype: str) -> int:
    """Bytes of one element. Raises ValueError for a dtype that KV cannot have."""
    return torch_dtype(dtype).itemsize


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of that name. Raises ValueError for a dtype that KV cannot have."""
    if dtype not in DTYPES:
        raise ValueError(f"KV dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class Frame:
    """The cells that a frame fills, and its bytes without the trailer. Heads are the model's own numbers."""

    box: Box
    bytes: int

    def pack(self) -> list[int]:
        """As plain numbers: layers, tokens, heads (half-open each), bytes."""
        return [*self.box.layers, *self.box.tokens, *self.box.heads, self.bytes]

    @staticmethod
    def unpack(data: Any) -> Frame:
        """The inverse of `pack`, every number checked. Raises ValueError."""
        if type(data) is not list or len(data) != 7 or set(map(type, data)) != {int}:  # bool is no number here
            raise ValueError("not a frame")
        a, b, c, d, e, f, size = data
        if not (0 <= a < b < 1 << 32 and 0 <= c < d < 1 << 32 and 0 <= e < f < 1 << 32 and 0 < size < 1 << 48):
            raise ValueError(f"frame {data}: a range is empty or negative, or the size is no size")
        return Frame(Box((c, d), (a, b), (e, f)), size)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Frames of one leg that are announced together."""

    request: str
    attempt: int
    first_choice: int
    sequence: int  # of the first frame; frames are numbered per link, from 0, and a number is never used again
    dtype: str
    codec: str
    checked: bool  # trailers have checksums
    frames: Sequence[Frame]

    @property
    def leg(self) -> LegKey:
        """The leg that they belong to."""
        return (self.request, self.attempt, self.first_choice)

    @property
    def bytes(self) -> int:
        """Of all frames and their trailers."""
        return sum(frame.bytes for frame in self.frames) + len(self.frames) * TRAILER_BYTES

    def pack(self) -> dict[str, Any]:
        """The fields of a `frames` message."""
        fields = [self.request, self.attempt, self.first_choice, self.sequence, self.dtype, self.codec, self.checked]
        return {"header": fields, "frames": [frame.pack() for frame in self.frames]}

    @staticmethod
    def unpack(message: Any) -> Parcel:
        """The inverse of `pack`: the type and sign of every field checked. Raises ValueError."""
        fields, frames = message.get("header"), message.get("frames")
        if type(fields) is not list or [type(value) for value in fields] != _FIELDS:
            raise ValueError("not the header of a parcel")
        if any(not 0 <= number < 1 << 63 for number in fields[1:4]):
            raise ValueError("header of a parcel: a number is out of range")
        if type(frames) is not list or not 0 < len(frames) <= MAX_PARCEL_FRAMES:
            raise ValueError("a parcel with no list of frames, or with too many")
        request, attempt, choice, sequence, dtype, codec, checked = fields
        unpacked = [Frame.unpack(data) for data in frames]
        parcel = Parcel(request, attempt, choice, sequence, dtype, codec, checked, unpacked)
        if len(frames) > 1 and parcel.bytes > MAX_PARCEL_BYTES:
            raise ValueError(f"a parcel of {parcel.bytes} bytes is too large")
        return parcel

    def seed(self) -> int:
        """A hash of what all its frames have in common; `checksum` wants it."""
        return xxhash.xxh3_64_intdigest(
            msgpack.packb([self.request, self.attempt, self.first_choice, self.dtype, self.codec])
        )


_FIELDS = [str, int, int, int, str, str, bool]


def payload_shape(box: Box, width: int) -> tuple[int, int, int, int, int]:
    """Shape of KV in the order of the wire, with rows of `width` elements."""
    return (length(box.layers), 2, length(box.heads), length(box.tokens), width)


def cell_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of one (token, layer, head) in a pool of that type: the rows of a key and a value."""
    return 2 * row_width(head_dim, torch_dtype(dtype)) * item_bytes(dtype)


def checksum(seed: int, sequence: int, frame: Frame, payload: memoryview) -> int:
    """xxh3_64 over the bytes of frame `sequence` and what was announced of it. seed: of its parcel."""
    box = frame.box
    about = _ABOUT.pack(sequence, *box.layers, *box.tokens, *box.heads, frame.bytes)
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(about, seed))


def trailer(seed: int, sequence: int, frame: Frame, payload: memoryview | None) -> bytes:
    """What follows a frame that is whole (payload None: without a checksum)."""
    return TRAILER.pack(WHOLE, 0 if payload is None else checksum(seed, sequence, frame, payload))


VOID_TRAILER = TRAILER.pack(VOID, 0)
