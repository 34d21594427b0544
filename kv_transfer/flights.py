"""A parcel on its way, and how its frames come out of the pool into what a carrier lends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..proto.errors import BatonError, InternalError
from ..proto.kv_layout import KVLayout
from .block_store import BlockStore
from .codec import direct, encode
from .events import LegKey
from .frames import TRAILER_BYTES, VOID_TRAILER, Parcel, trailer
from .plan import Box
from .send_leg import LegPart
from .views import Views


@dataclass(slots=True, eq=False)
class Flight:
    """A parcel that was announced."""

    part: LegPart
    parcel: Parcel
    seed: int
    ahead: bool  # announced before it was computed
    accepted: bool = False
    sent: int = 0  # frames that the carrier has
    early: list[torch.Tensor] = field(default_factory=list)  # its first frames, filled before it was accepted
    void: bool = False  # the leg is over: what is left is of no use

    @property
    def handed_over(self) -> bool:
        """Whether the carrier has all of it."""
        return self.sent == len(self.parcel.frames)

    @property
    def waits(self) -> bool:
        """Whether it is still being computed."""
        return self.ahead and self.part.computing

    def size(self, at: int) -> int:
        """Bytes of frame `at` with its trailer."""
        return self.parcel.frames[at].bytes + TRAILER_BYTES


class FillOwner(Protocol):
    """What filling frames needs of the sender."""

    @property
    def store(self) -> BlockStore: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def rank(self) -> int: ...

    def start_frame(self, part: LegPart) -> bool:
        """Whether the leg still goes on, so that a frame of it may be sent now."""
        ...

    def leg_failed(self, key: LegKey, error: BatonError) -> None:
        """One leg cannot go on."""
        ...


class Filling:
    """Payloads of `dtype` and `codec`, with checksums if `checked`. One thread uses it."""

    def __init__(self, owner: FillOwner, checked: bool, dtype: str, codec: str) -> None:
        self._owner = owner
        self._checked = checked
        self._format = (dtype, codec)
        self._direct = direct(owner.store.dtype, dtype, codec)
        self._first_head = owner.layout.head_ranges[owner.rank][0]
        self._views = Views()

    def fill(self, flight: Flight, at: int, whole: torch.Tensor) -> None:
        """Copy frame `at` of the parcel out of the pool, and its trailer behind it."""
        frame = flight.parcel.frames[at]
        size = frame.bytes
        flight.void = flight.void or not self._gathered(flight.part, frame.box, self._views.payload(whole))
        near = whole.device.type == "cpu"
        view = self._views.bytes(whole if near or (self._checked and not flight.void) else whole[size:])
        if flight.void:
            view[-TRAILER_BYTES:] = VOID_TRAILER
        else:
            summed = view[:size] if self._checked else None
            view[-TRAILER_BYTES:] = trailer(flight.seed, flight.parcel.sequence + at, frame, summed)
        if not near:
            whole[size:] = torch.frombuffer(view[-TRAILER_BYTES:], dtype=torch.uint8).to(whole.device)

    def confirm(self, flight: Flight, whole: torch.Tensor) -> None:
        """A frame that was filled early (in CPU memory) is about to be sent: void, if the leg has ended since."""
        if flight.void or not self._owner.start_frame(flight.part):
            flight.void = True
            self._views.bytes(whole)[-TRAILER_BYTES:] = VOID_TRAILER

    def _gathered(self, part: LegPart, box: Box, payload: torch.Tensor) -> bool:
        """Copy a frame out of the pool; whether that is worth sending. A fault of the pool ends the leg."""
        if not part.alive:
            return False
        heads = (box.heads[0] - self._first_head, box.heads[1] - self._first_head)
        try:
            if self._direct:
                self._owner.store.gather(part.leg.blocks, box.layers, heads, box.tokens, payload)
            else:
                kv = self._owner.store.gather(part.leg.blocks, box.layers, heads, box.tokens)
                encode(kv, payload, *self._format)
        except (BatonError, RuntimeError, ValueError, IndexError) as error:
            failure = error if isinstance(error, BatonError) else InternalError(f"gathering {box}: {error}")
            self._owner.leg_failed(part.leg.key, failure)
            return False
        return self._owner.start_frame(part)  # if not, its blocks may have had another content already
