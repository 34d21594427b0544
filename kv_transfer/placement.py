"""Judging parcels and placing frames on a decode rank: what may be accepted, and the checked write into the pool."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..proto.errors import InternalError, TransferFailed
from ..proto.failpoints import reach
from ..proto.kv_layout import KVLayout
from .block_store import BlockStore
from .codec import decode, direct, wire_cell_bytes
from .events import LegKey
from .frames import MAX_FRAME_BYTES, TRAILER, TRAILER_BYTES, VOID, WHOLE, Parcel, checksum
from .handoff import ReceiveLeg
from .plan import Range
from .views import Views


@dataclass(slots=True, eq=False)
class ExpectedLeg:
    """A reservation as the receiver keeps it. `lock` guards `handoff` and every write to the blocks."""

    key: LegKey
    nonce: bytes
    blocks: tuple[int, ...]
    handoff: ReceiveLeg
    lock: threading.Lock = field(default_factory=threading.Lock)


class PlacementOwner(Protocol):
    """What placing needs of the receiver."""

    @property
    def store(self) -> BlockStore: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def rank(self) -> int: ...


class Placement:
    """Frames from one prefill rank, which sends `heads` (ranges of the model's heads) to this decode rank."""

    def __init__(
        self, owner: PlacementOwner, source: int, heads: tuple[Range, ...], checked: bool, dtype: str, codec: str
    ) -> None:
        self._owner = owner
        self._source = source
        self._heads = heads
        self._checked = checked
        self._format = (dtype, codec)  # of the payloads
        self._cell_bytes = wire_cell_bytes(owner.layout.head_dim, dtype, codec)
        self._direct = direct(owner.store.dtype, dtype, codec)
        self._first_head = owner.layout.head_ranges[owner.rank][0]
        self._views = Views()

    def judge(self, parcel: Parcel, leg: ExpectedLeg) -> None:
        """Whether the parcel may be received. Raises TransferFailed with the reason."""
        if (parcel.dtype, parcel.codec) != self._format:
            raise TransferFailed(f"frames of {parcel.dtype}/{parcel.codec}, expected {'/'.join(self._format)}")
        if self._checked and not parcel.checked:
            raise TransferFailed("frames without checksums")
        for frame in parcel.frames:
            box, due = frame.box, frame.box.volume * self._cell_bytes
            if not any(low <= box.heads[0] and box.heads[1] <= high for low, high in self._heads):
                raise TransferFailed(f"kv heads {list(box.heads)} do not come from prefill rank {self._source}")
            if frame.bytes != due or due > MAX_FRAME_BYTES:
                raise TransferFailed(f"frame of {frame.bytes} bytes, its ranges hold {due} (limit {MAX_FRAME_BYTES})")
        with leg.lock:
            problem = next((found for frame in parcel.frames if (found := leg.handoff.problem(frame.box))), "")
        if problem:
            raise TransferFailed(f"frame of leg {leg.key} refused: {problem}")

    def place(self, parcel: Parcel, seed: int, index: int, leg: ExpectedLeg, whole: torch.Tensor) -> bool:
        """Verify and write frame `index` of a parcel (flat uint8, with its trailer); a void one is dropped.

        True: that completed the leg's KV. seed: of the parcel. Raises TransferFailed when it is corrupt or no longer
        wanted, InternalError when the pool cannot take it.
        """
        frame = parcel.frames[index]
        if reach("decode.payload"):
            whole = whole.clone()  # where it lies it may not be ours to write to
            whole[0] ^= 1
        read = whole if parcel.checked or whole.device.type == "cpu" else whole[frame.bytes :]
        there = self._views.bytes(read)
        state, due = TRAILER.unpack_from(there, len(there) - TRAILER_BYTES)
        if state == VOID:
            return False
        sequence = parcel.sequence + index
        if state != WHOLE or (parcel.checked and checksum(seed, sequence, frame, there[: frame.bytes]) != due):
            raise TransferFailed(f"frame {sequence} of leg {leg.key} from prefill rank {self._source} is corrupt")
        reach("decode.frame")
        store, box = self._owner.store, frame.box
        heads = (box.heads[0] - self._first_head, box.heads[1] - self._first_head)
        payload = self._views.payload(whole)
        if not self._direct:
            try:
                near = payload.to(store.device)
                payload = decode(near, box, self._owner.layout.head_dim, parcel.dtype, parcel.codec, store.dtype)
            except ValueError as error:
                raise TransferFailed(f"frame {sequence} of leg {leg.key} cannot be decoded: {error}") from error
        with leg.lock:
            if problem := leg.handoff.problem(box):
                raise TransferFailed(f"frame of leg {leg.key} refused: {problem}")
            try:
                store.scatter(leg.blocks, box.layers, heads, box.tokens, payload)
            except (RuntimeError, ValueError, IndexError) as error:
                raise InternalError(f"placing {box}: {error}") from error
            return leg.handoff.placed(box, self._source, frame.bytes)
