"""The frames of a prefill link that are on their way: announced, accepted, handed to the carrier, acknowledged.

The link's thread alone uses a window. A payload goes to the carrier only after the decode rank accepted its header.
When the carrier fails, the window changes to `inline` and announces again whatever was not acknowledged; the decode
rank first says that it has dropped what it had accepted, so nothing is placed twice.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..proto.errors import BatonError, InternalError, from_wire
from ..proto.failpoints import reach
from ..proto.kv_layout import KVLayout
from .block_store import BlockStore
from .carriers import INLINE, Carrier, CarrierFailed, InlineCarrier, bytes_of, patience_s
from .codec import direct, encode, wire_bytes
from .events import LegKey
from .frames import FrameHeader, offsets, sealed
from .plan import Box
from .send_leg import LegPart
from .shm import ShmSender
from .staging import Staging
from .wire import Wire, WireError, field

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Flight:
    """Frames of one leg that were announced together and not yet acknowledged."""

    part: LegPart
    headers: list[FrameHeader]
    payload: torch.Tensor  # flat bytes, each frame where `offsets` says
    handed_over: bool = False  # to the carrier

    @property
    def key(self) -> int:
        """The sequence number that stands for all of them."""
        return self.headers[0].sequence


class WindowOwner(Protocol):
    """What a window needs of its sender."""

    @property
    def store(self) -> BlockStore: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def rank(self) -> int: ...

    def start_frame(self, part: LegPart) -> bool:
        """Whether the leg still goes on, so that a frame of it may be announced now."""
        ...

    def frame_acknowledged(self, part: LegPart, size: int) -> None:
        """One frame is in the decode rank's pool."""
        ...

    def frame_postponed(self, part: LegPart, box: Box) -> None:
        """The decode rank does not expect the leg yet: it will say when, and the frame is announced again."""
        ...

    def leg_failed(self, key: LegKey, error: BatonError) -> None:
        """One leg cannot go on."""
        ...


class SendWindow:
    """At most `size` announcements that are not acknowledged, each of one or more frames of a leg."""

    def __init__(
        self, owner: WindowOwner, wire: Wire, carrier: Carrier, checked: bool, size: int, dtype: str, codec: str
    ) -> None:
        self._owner = owner
        self._wire = wire
        self._carrier = carrier
        self._checked = checked
        self._dtype, self._codec = dtype, codec  # of the payloads
        self._size = size
        self._flights: dict[int, _Flight] = {}
        self._next = 0
        self._switching = False
        self._parked: list[_Flight] = []  # gathered while the carrier was changed, not announced yet
        self._staging = Staging(carrier.device)
        self._unsent = 0  # bytes of the socket's queue when it was last looked at
        self._progress_at = 0.0
        self._begun: set[LegKey] = set()

    @property
    def busy(self) -> bool:
        """Whether any frame is on its way."""
        return bool(self._flights) or self._switching

    @property
    def largest(self) -> int:
        """Bytes of the largest payload that can be announced."""
        return self._carrier.largest

    @property
    def in_place(self) -> bool:
        """Whether the peer reads payloads where they were gathered, so that an announcement is all that is sent."""
        return isinstance(self._carrier, ShmSender)

    @property
    def room(self) -> bool:
        """Whether another frame may be announced."""
        return len(self._flights) < self._size and not self._switching

    def check(self, now: float, limit_s: float) -> None:
        """Raises WireError when nothing at all has gone on with the frames on their way for too long."""
        unsent, before = self._wire.unsent(), self._unsent  # inline, bytes leave after they were handed over
        self._unsent = unsent
        if unsent < before:
            self._progress_at = now
        limit_s += patience_s(self._carrier.name, sum(flight.payload.numel() for flight in self._flights.values()))
        if self.busy and now - self._progress_at > limit_s * (2 if self._switching else 1):
            raise WireError(f"no answer to a frame for {limit_s:g} s")

    def owes(self, part: LegPart) -> bool:
        """Whether a payload of this part has yet to be handed to the carrier."""
        return self._switching or any(f.part is part and not f.handed_over for f in self._flights.values())

    def close(self) -> None:
        """Let the carrier go."""
        self._carrier.close()

    def forget(self, key: LegKey) -> None:
        """The leg is over on this link."""
        self._begun.discard(key)

    def announce(self, part: LegPart, boxes: list[Box]) -> None:
        """Gather frames and send their headers. A fault of the pool ends the leg, not the link."""
        key = part.leg.key
        try:
            if key not in self._begun:
                self._begun.add(key)
                reach("prefill.first_frame")
            reach("prefill.frame")
            if part.last_taken:
                reach("prefill.last_frame")
            flight = self._gathered(part, boxes)
        except (BatonError, RuntimeError, ValueError, IndexError) as error:
            failure = error if isinstance(error, BatonError) else InternalError(f"gathering {boxes[0]}: {error}")
            self._owner.leg_failed(key, failure)
            return
        if not self._owner.start_frame(part):
            self._give(flight.payload)
        elif self._switching:
            self._parked.append(flight)
        else:
            self._launch(flight)

    def on_message(self, message: dict[str, Any]) -> bool:
        """Handle a message about frames; False when it is about something else. Raises WireError."""
        kind = message["kind"]
        if kind == "accept":
            self._accepted(self._flights.get(field(message, "sequence", int)))
        elif kind == "ack":
            flight = self._pop(message)
            if not (flight.handed_over or self._switching):
                raise WireError("a frame was acknowledged before its payload was sent")
            self._give(flight.payload)
            for header in flight.headers:
                self._owner.frame_acknowledged(flight.part, header.bytes)
        elif kind == "refuse":
            flight = self._pop(message)
            self._give(flight.payload)
            reason = from_wire(field(message, "code", str), field(message, "message", str))
            self._owner.leg_failed(flight.part.leg.key, reason)
        elif kind == "later":
            flight = self._pop(message)
            self._give(flight.payload)
            for header in reversed(flight.headers):
                self._owner.frame_postponed(flight.part, header.box)
        elif kind == "carrier_failed":
            self._switch(field(message, "reason", str))
        elif kind == "switched":
            self._announce_again()
        else:
            return False
        return True

    def _gathered(self, part: LegPart, boxes: list[Box]) -> _Flight:
        """The frames of these boxes, each copied out of the pool once and summed while it is in the cache."""
        head_dim = self._owner.layout.head_dim
        sizes = [wire_bytes(box, head_dim, self._dtype, self._codec) for box in boxes]
        starts, total = offsets(sizes)
        payload = self._lend(total)
        headers = []
        try:
            for number, (box, start, size) in enumerate(zip(boxes, starts, sizes, strict=True)):
                frame = payload[start : start + size]
                self._gather(part, box, frame)
                ranges = (box.layers, box.tokens, box.heads)
                header = FrameHeader(*part.leg.key, 0, *ranges, self._dtype, self._codec, size, False, 0)
                headers.append(self._sealed(header, number, frame))
        except BaseException:
            self._give(payload)
            raise
        return _Flight(part, headers, payload)

    def _gather(self, part: LegPart, box: Box, frame: torch.Tensor) -> None:
        store, first_head = self._owner.store, self._owner.layout.head_ranges[self._owner.rank][0]
        where = (part.leg.blocks, box.layers, (box.heads[0] - first_head, box.heads[1] - first_head), box.tokens)
        if direct(store.dtype, self._dtype, self._codec):
            store.gather(*where, frame)
        else:
            encode(store.gather(*where), frame, self._dtype, self._codec)

    def _lend(self, size: int) -> torch.Tensor:
        """A buffer for a payload, in place where the carrier has one."""
        if isinstance(self._carrier, ShmSender):
            try:
                return self._carrier.lend(size)
            except CarrierFailed as error:
                self._switch(str(error))
        return self._staging.lend(size)

    def _give(self, payload: torch.Tensor) -> None:
        self._staging.give(payload)
        if isinstance(self._carrier, ShmSender):
            self._carrier.give(payload)

    def _launch(self, flight: _Flight) -> None:
        if not self._flights:
            self._progress_at = time.monotonic()
        self._next += len(flight.headers)
        self._flights[flight.key] = flight
        first, *more = [header.pack() for header in flight.headers]
        fields: dict[str, Any] = {"more": more} if more else {}
        if isinstance(self._carrier, ShmSender):
            reach("prefill.mid_frame")
            fields["at"] = self._carrier.where(flight.payload)
            flight.handed_over = True
        self._wire.send("frame", header=first, **fields)

    def _accepted(self, flight: _Flight | None) -> None:
        if self._switching and flight is not None:
            return  # it will be announced again
        if flight is None or flight.handed_over:
            raise WireError("the peer accepted a frame that was not announced")
        reach("prefill.mid_frame")
        try:
            self._carrier.send(flight.payload)
        except CarrierFailed as error:
            self._switch(str(error))
            return
        flight.handed_over = True
        self._progress_at = time.monotonic()

    def _pop(self, message: dict[str, Any]) -> _Flight:
        flight = self._flights.pop(field(message, "sequence", int), None)
        if flight is None:
            raise WireError(f"{message['kind']} of a frame that was not announced")
        self._progress_at = time.monotonic()
        return flight

    def _switch(self, reason: str) -> None:
        """Ask the decode rank to drop what it accepted and go on inline."""
        if self._carrier.name == INLINE:
            return
        _log.warning("a KV link goes on inline: %s", reason)
        self._carrier.close()
        self._carrier = InlineCarrier(self._wire)
        self._staging = Staging(self._carrier.device)  # the old carrier may still read its payloads
        self._switching = True
        self._progress_at = time.monotonic()
        self._wire.send("switch")

    def _announce_again(self) -> None:
        if not self._switching:
            raise WireError("the peer changed carrier unasked")
        self._switching = False
        flights = [*self._flights.values(), *self._parked]  # what was placed has been acknowledged by now
        self._flights, self._parked = {}, []
        for flight in flights:
            if self._owner.start_frame(flight.part):
                flight.payload = flight.payload.to(self._carrier.device)
                flight.handed_over = False
                self._renumber(flight)
                self._launch(flight)

    def _renumber(self, flight: _Flight) -> None:
        """Frames that are announced again are new frames; sums hold for the number too."""
        starts, _ = offsets([header.bytes for header in flight.headers])
        for number, (header, start) in enumerate(zip(flight.headers, starts, strict=True)):
            frame = flight.payload[start : start + header.bytes]
            flight.headers[number] = self._sealed(header, number, frame)

    def _sealed(self, header: FrameHeader, number: int, frame: torch.Tensor) -> FrameHeader:
        """The header of the frame that is announced `number` frames from now."""
        return sealed(header, self._next + number, bytes_of(frame.cpu()) if self._checked else None)
