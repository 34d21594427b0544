"""The frames of a prefill link that are on their way: announced, accepted, gathered and sent, acknowledged.

The link's thread alone uses a window. A parcel's frames are copied out of the pool one at a time, into a buffer of the
carrier that is small enough to stay in the cache until they are sent: after the decode rank has accepted all of them.
The first few are copied while its answer is on the way, where the carrier has room for them; a parcel that is refused
leaves them unsent. When its leg ends meanwhile, what is left of the parcel, copied or not, goes as void frames.

When the carrier fails, the window changes to `inline` and announces again whatever did not get through; the decode rank
says which frame that begins with, and that it has dropped what it had accepted, so nothing is placed twice.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any, Protocol

from ..proto.errors import BatonError, from_wire
from ..proto.failpoints import reach
from .canary import repeat_canary
from .carriers import INLINE, RING, Carrier, CarrierFailed, InlineCarrier, patience_s
from .codec import wire_cell_bytes
from .events import LegKey
from .flights import Filling, FillOwner, Flight
from .frames import Frame, Parcel
from .plan import Box
from .send_leg import LegPart
from .wire import Wire, WireError, field

_log = logging.getLogger(__name__)
_UNANSWERED = 16  # parcels that were sent and not acknowledged, at most


class WindowOwner(FillOwner, Protocol):
    """What a window needs of its sender."""

    def frames_acknowledged(self, part: LegPart, size: int, frames: int) -> None:
        """So many bytes in so many frames are in the decode rank's pool."""
        ...

    def frame_postponed(self, part: LegPart, box: Box) -> None:
        """The decode rank does not expect the leg yet: it will say when, and the frame is announced again."""
        ...


class SendWindow:
    """At most `size` announcements whose payload is still to be sent, each of one or more frames of a leg."""

    def __init__(
        self,
        owner: WindowOwner,
        wire: Wire,
        carrier: Carrier,
        checked: bool,
        size: int,
        dtype: str,
        codec: str,
        nonce: bytes,
    ) -> None:
        self._owner = owner
        self._wire = wire
        self._carrier = carrier
        self._checked = checked
        self._dtype, self._codec = dtype, codec  # of the payloads
        self._nonce = nonce  # of the canary
        self._filling = Filling(owner, checked, dtype, codec)
        self._cell_bytes = wire_cell_bytes(owner.layout.head_dim, dtype, codec)
        self._size = size
        self._flights: dict[int, Flight] = {}  # by the number of their first frame
        self._granted: deque[Flight] = deque()  # accepted, and not handed over
        self._next = 0
        self._switching = False
        self._resume_at: int | None = None  # while the canary is on its way over the new carrier: the next frame
        self._unsent = 0  # bytes of the socket's queue when it was last looked at
        self._progress_at = 0.0
        self._begun: set[LegKey] = set()

    @property
    def busy(self) -> bool:
        """Whether any frame is on its way."""
        return bool(self._flights) or self._switching

    @property
    def writing(self) -> bool:
        """Whether a payload on the wire is not whole, so that no message can be written."""
        return bool(self._granted) and self._granted[0].sent > 0 and self.inline

    @property
    def inline(self) -> bool:
        """Whether payloads travel on the wire."""
        return self._carrier.name == INLINE

    @property
    def room(self) -> bool:
        """Whether another parcel may be announced."""
        if self._switching or self.writing or len(self._flights) >= self._size + _UNANSWERED:
            return False
        return sum(not flight.handed_over for flight in self._flights.values()) < self._size

    def check(self, now: float, limit_s: float) -> None:
        """Raises WireError when nothing at all has gone on with the frames on their way for too long.

        A change to inline has twice the time, that of the failed operation included: the decode rank may have to wait
        for the end of it as well.
        """
        unsent, before = self._wire.unsent(), self._unsent  # inline, bytes leave after they were handed over
        self._unsent = unsent
        if unsent < before or (self._granted and self._granted[0].waits):
            self._progress_at = now
        largest = max((frame.bytes for f in self._flights.values() for frame in f.parcel.frames), default=0)
        limit_s += patience_s(self._carrier.name, RING * largest)
        if self.busy and now - self._progress_at > limit_s * (2 if self._switching else 1):
            raise WireError(f"no answer to a frame for {limit_s:g} s")

    def owes(self, part: LegPart) -> bool:
        """Whether a frame of this part has yet to be handed to the carrier."""
        return self._switching or any(f.part is part and not f.handed_over for f in self._flights.values())

    def close(self) -> None:
        """Let the carrier go."""
        self._carrier.close()

    def forget(self, key: LegKey) -> None:
        """The leg is over on this link."""
        self._begun.discard(key)

    def announce(self, part: LegPart, boxes: list[Box], ahead: bool) -> None:
        """Send what the decode rank must know of these frames. ahead: they are computed soon."""
        key = part.leg.key
        try:
            if key not in self._begun:
                self._begun.add(key)
                reach("prefill.first_frame")
            reach("prefill.frame")
            if part.last_taken:
                reach("prefill.last_frame")
        except BatonError as error:
            self._owner.leg_failed(key, error)
            return
        frames = [Frame(box, box.volume * self._cell_bytes) for box in boxes]
        self._launch(part, frames, ahead)

    def step(self) -> bool:
        """Gather and send the next frame of what was accepted; or gather one that will be. False: there is none now.

        Raises WireError.
        """
        try:
            if not self._granted:
                return self._prepare()
        except CarrierFailed as error:
            self._switch(str(error))
            return True
        flight = self._granted[0]
        if flight.waits:
            return False
        try:
            if not flight.sent:
                reach("prefill.mid_frame")
                self._carrier.begin(flight.parcel.bytes)
            self._send_frame(flight)
        except CarrierFailed as error:
            self._switch(str(error))
            return True
        flight.sent += 1
        if flight.handed_over:
            self._granted.popleft()
        self._progress_at = time.monotonic()
        return True

    def on_message(self, message: dict[str, Any]) -> bool:
        """Handle a message about frames; False when it is about something else. Raises WireError."""
        kind = message["kind"]
        if kind == "accept":
            self._accepted(self._flights.get(field(message, "sequence", int)))
        elif kind == "ack":
            flight = self._pop(message)
            if not (flight.handed_over or self._switching):
                raise WireError("a parcel was acknowledged before its payload was sent")
            self._acknowledged(flight, len(flight.parcel.frames))
        elif kind == "refuse":
            flight = self._pop(message)
            reason = from_wire(field(message, "code", str), field(message, "message", str))
            self._owner.leg_failed(flight.part.leg.key, reason)
        elif kind == "later":
            flight = self._pop(message)
            for frame in reversed(flight.parcel.frames):
                self._owner.frame_postponed(flight.part, frame.box)
        elif kind == "carrier_failed":
            self._switch(field(message, "reason", str))
        elif kind == "switched":
            self._prove_again(field(message, "sequence", int))
        elif kind in ("canary_ready", "canary_seen"):
            self._proved_again(kind, field(message, "reason", str))
        else:
            return False
        return True

    def _launch(self, part: LegPart, frames: list[Frame], ahead: bool) -> None:
        """Announce frames under new numbers, unless their leg is over."""
        if not self._owner.start_frame(part):
            return
        if not self._flights:
            self._progress_at = time.monotonic()
        parcel = Parcel(*part.leg.key, self._next, self._dtype, self._codec, self._checked, frames)
        self._flights[self._next] = Flight(part, parcel, parcel.seed(), ahead)
        self._next += len(frames)
        self._wire.send("frames", **parcel.pack())

    def _prepare(self) -> bool:
        """Fill the next frame of the parcel that is answered next, if there is room for it. False: not now."""
        flight = next((flight for flight in self._flights.values() if not flight.accepted), None)
        if flight is None or flight.waits or (at := len(flight.early)) == len(flight.parcel.frames):
            return False
        if (whole := self._carrier.ahead(flight.size(at), at)) is None:
            return False
        self._filling.fill(flight, at, whole)
        flight.early.append(whole)
        return True

    def _send_frame(self, flight: Flight) -> None:
        at = flight.sent
        if at < len(flight.early):
            whole = flight.early[at]
            self._filling.confirm(flight, whole)
        else:
            whole = self._carrier.buffer(flight.size(at))
            self._filling.fill(flight, at, whole)
        self._carrier.send(whole)

    def _accepted(self, flight: Flight | None) -> None:
        if self._switching and flight is not None:
            return  # it will be announced again
        if flight is None or flight.accepted:
            raise WireError("the peer accepted a parcel that was not announced")
        flight.accepted = True
        for other in self._flights.values():
            if not other.accepted:
                other.early.clear()  # their room is now that of this one
        self._granted.append(flight)

    def _pop(self, message: dict[str, Any]) -> Flight:
        """The flight that comes to its end by this message."""
        flight = self._flights.pop(field(message, "sequence", int), None)
        if flight is None:
            raise WireError(f"{message['kind']} of a parcel that was not announced")
        if flight.accepted and not (flight.handed_over or self._switching):
            raise WireError(f"{message['kind']} of a parcel whose payload was not sent")
        self._progress_at = time.monotonic()
        return flight

    def _acknowledged(self, flight: Flight, count: int) -> None:
        size = sum(frame.bytes for frame in flight.parcel.frames[:count])
        self._owner.frames_acknowledged(flight.part, size, count)

    def _switch(self, reason: str) -> None:
        """Ask the decode rank to drop what it accepted and go on inline."""
        if self._carrier.name == INLINE:
            return
        _log.warning("a KV link goes on inline: %s", reason)
        self._carrier.close()
        self._carrier = InlineCarrier(self._wire)
        self._granted.clear()
        self._switching = True
        self._wire.send("switch")

    def _prove_again(self, sequence: int) -> None:
        """The decode rank is done with all frames before this one, and goes on inline once that has been proved."""
        if not self._switching or self._resume_at is not None or not 0 <= sequence <= self._next:
            raise WireError("the peer changed carrier unasked, or after frames that were not announced")
        self._resume_at = sequence
        repeat_canary(self._wire, self._nonce, self._owner.layout.head_dim, self._dtype, self._codec)

    def _proved_again(self, kind: str, reason: str) -> None:
        if self._resume_at is None:
            raise WireError(f"{kind} without a canary")
        if reason:
            raise WireError(f"the canary failed after the change to inline: {reason}")
        if kind == "canary_seen":
            self._announce_again(self._resume_at)

    def _announce_again(self, sequence: int) -> None:
        self._switching, self._resume_at = False, None
        flights, self._flights = self._flights, {}
        for first, flight in flights.items():
            done = min(max(0, sequence - first), len(flight.parcel.frames))
            if done:
                self._acknowledged(flight, done)
            if left := list(flight.parcel.frames[done:]):
                self._launch(flight.part, left, flight.ahead)
