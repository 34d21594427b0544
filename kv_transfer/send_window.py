"""The frames of a prefill link that are on their way: announced, accepted, handed to the carrier, acknowledged.

The link's thread alone uses a window. A payload goes to the carrier only after the decode rank accepted its header.
When the carrier fails, the window changes to `inline` and announces again whatever was not acknowledged; the decode
rank first says that it has dropped what it had accepted, so nothing is placed twice.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ..proto.errors import BatonError, InternalError, from_wire
from ..proto.failpoints import reach
from ..proto.kv_layout import KVLayout
from .block_store import BlockStore
from .carriers import INLINE, Carrier, CarrierFailed, InlineCarrier, bytes_of
from .events import LegKey
from .frames import RAW, FrameHeader, checksum
from .plan import Box
from .send_leg import LegPart
from .wire import Wire, WireError, field

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Flight:
    """A frame that was announced and not yet acknowledged."""

    part: LegPart
    header: FrameHeader
    payload: torch.Tensor  # flat bytes
    handed_over: bool = False  # to the carrier


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

    def leg_failed(self, key: LegKey, error: BatonError) -> None:
        """One leg cannot go on."""
        ...


class SendWindow:
    """At most `size` frames between announcement and acknowledgement."""

    def __init__(self, owner: WindowOwner, wire: Wire, carrier: Carrier, checked: bool, size: int) -> None:
        self._owner = owner
        self._wire = wire
        self._carrier = carrier
        self._checked = checked
        self._size = size
        self._flights: dict[int, _Flight] = {}
        self._next = 0
        self._switching = False
        self._progress_at = 0.0
        self._begun: set[LegKey] = set()

    @property
    def busy(self) -> bool:
        """Whether any frame is on its way."""
        return bool(self._flights) or self._switching

    @property
    def room(self) -> bool:
        """Whether another frame may be announced."""
        return len(self._flights) < self._size and not self._switching

    def check(self, now: float, limit_s: float) -> None:
        """Raises WireError when the oldest frame waits for too long."""
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

    def announce(self, part: LegPart, box: Box) -> None:
        """Gather one frame and send its header. A fault of the pool ends the leg, not the link."""
        key = part.leg.key
        try:
            if key not in self._begun:
                self._begun.add(key)
                reach("prefill.first_frame")
            reach("prefill.frame")
            flight = self._gathered(part, box)
        except (BatonError, RuntimeError, ValueError, IndexError) as error:
            failure = error if isinstance(error, BatonError) else InternalError(f"gathering {box}: {error}")
            self._owner.leg_failed(key, failure)
            return
        if self._owner.start_frame(part):
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
            self._owner.frame_acknowledged(flight.part, flight.header.bytes)
        elif kind == "refuse":
            flight = self._pop(message)
            reason = from_wire(field(message, "code", str), field(message, "message", str))
            self._owner.leg_failed(flight.part.leg.key, reason)
        elif kind == "carrier_failed":
            self._switch(field(message, "reason", str))
        elif kind == "switched":
            self._announce_again()
        else:
            return False
        return True

    def _gathered(self, part: LegPart, box: Box) -> _Flight:
        layout, first_head = self._owner.layout, self._owner.layout.head_ranges[self._owner.rank][0]
        local = (box.heads[0] - first_head, box.heads[1] - first_head)
        gathered = self._owner.store.gather(part.leg.blocks, box.layers, local, box.tokens)
        payload = gathered.reshape(-1).view(torch.uint8).to(self._carrier.device)
        header = FrameHeader(
            *part.leg.key,
            sequence=0,
            layers=box.layers,
            tokens=box.tokens,
            heads=box.heads,
            dtype=layout.dtype,
            codec=RAW,
            bytes=payload.numel(),
            checked=self._checked,
            checksum=0,
        )
        return _Flight(part, header, payload)

    def _launch(self, flight: _Flight) -> None:
        if not self._flights:
            self._progress_at = time.monotonic()
        header = replace(flight.header, sequence=self._next)
        if self._checked:
            header = replace(header, checksum=checksum(header, bytes_of(flight.payload.cpu())))
        self._next += 1
        flight.header = header
        self._flights[header.sequence] = flight
        self._wire.send("frame", header=header.pack())

    def _accepted(self, flight: _Flight | None) -> None:
        if flight is None or flight.handed_over:
            raise WireError("the peer accepted a frame that was not announced")
        if self._switching:
            return  # it will be announced again
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
        self._switching = True
        self._progress_at = time.monotonic()
        self._wire.send("switch")

    def _announce_again(self) -> None:
        if not self._switching:
            raise WireError("the peer changed carrier unasked")
        self._switching = False
        flights, self._flights = list(self._flights.values()), {}  # what was placed has been acknowledged by now
        for flight in flights:
            if self._owner.start_frame(flight.part):
                flight.payload = flight.payload.to(self._carrier.device)
                flight.handed_over = False
                self._launch(flight)
