"""The prefill end of a KV link without sockets and threads: what `send_link` and `send_window` do, one thing at a time.

What is kept about legs is the product's (`Sender`, `SendingLeg`); here are only the window, the order of messages, and
what breaks. A frame's payload travels as the numbers of its cells, with their hash as checksum.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.kv_transfer.events import LegKey
from baton.kv_transfer.plan import Box
from baton.kv_transfer.send_leg import LegPart
from baton.proto.errors import BatonError, TransferFailed

from .world import Violation, Wire

if TYPE_CHECKING:
    from .worker import Process

FRAME_S = 5.0  # one frame, and the longest silence of a link in use
WINDOW = 2
CELL_BYTES = 8
FRAME_BYTES = 48  # a few cells: most legs need several frames
Message = tuple[Any, ...]


def checksum(payload: Sequence[Sequence[int]]) -> int:
    """Of a frame's cells."""
    return hash(tuple(map(tuple, payload)))


@dataclass(slots=True, eq=False)
class _Flight:
    part: LegPart
    box: Box
    payload: list[list[int]]
    handed_over: bool = False


class SendLink:
    """In place of `kv_transfer.send_link.SendLink`: end 0 of a wire."""

    def __init__(self, owner: Any, address: str, incarnation: str, ticket: bytes) -> None:
        self.key = (address, incarnation)
        self.parts: dict[LegKey, LegPart] = {}
        self._owner = owner
        self._process: Process = owner.process
        self._world = self._process.world
        self._ticket = ticket
        self._wire: Wire | None = None
        self._welcome = False
        self._over = False
        self._outbox: deque[Message] = deque()
        self._ready: deque[LegPart] = deque()
        self._flights: dict[int, _Flight] = {}
        self._sequence = 0
        self._switching = False
        self._poked = False
        self._progress = self.used_at = self._world.now

    @property
    def worker_id(self) -> str:
        """Of the prefill worker."""
        return self._process.worker_id

    @property
    def idle(self) -> bool:
        """Whether no leg needs the link, nor has a frame on its way."""
        return not (self.parts or self._outbox or self._flights)

    # ---- for the sender --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to dial."""
        self._world.at(self._world.rng.random() * 0.005, self._dial)

    def add(self, part: LegPart, ticket: bytes) -> None:
        """Serve one more leg."""
        self.parts[part.leg.key] = part
        self.post("open", leg=part.leg.key, ticket=ticket)

    def post(self, kind: str, **fields: Any) -> None:
        """Queue a control message."""
        self._outbox.append((kind, fields.pop("leg"), fields))
        self._poke()

    def offer(self, part: LegPart) -> None:
        """The part has something to send."""
        if part.ready and part not in self._ready:
            self._ready.append(part)
        self._poke()

    def offer_end(self, part: LegPart) -> None:
        """The part's end is known: said at once, where nothing else is to be said before."""
        busy = self._wire is None or self._over or not self._welcome or self._outbox or self._ready
        if busy or not self._send_done():
            self.offer(part)

    def remove(self, part: LegPart) -> None:
        """Start no more frames of this part."""
        part.drop()
        self.parts.pop(part.leg.key, None)
        self.used_at = self._world.now
        with contextlib.suppress(ValueError):
            self._ready.remove(part)

    def stop(self) -> None:
        """End the link soon."""
        self._world.at(self._process.pause(), self._end, TransferFailed("the link was closed"))

    # ---- the wire --------------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        if self._over or not self._process.alive:
            return
        wire = self._process.cluster.dial_link(self, self.key[0])
        if wire is None:
            self._end(TransferFailed("nobody listens"))
            return
        self._wire = wire
        hello = (self._ticket, self._owner.rank, self.key[1], self._owner.layout.head_ranges)
        wire.send(1, ("hello", *hello))
        self._watch(FRAME_S)

    def on_message(self, message: Message) -> None:
        """From the decode rank."""
        if self._over:
            return
        self._progress = self._world.now
        kind, *rest = message
        getattr(self, f"_on_{kind}")(*rest)
        self._poke()

    def on_closed(self, reason: str) -> None:
        """The decode rank is gone."""
        self._end(TransferFailed(f"link to {self.key[0]}: {reason}"))

    def on_silence(self) -> bool:
        """Heartbeats are answered; a link in use that hears nothing ends."""
        if self.idle:
            return False
        self._end(TransferFailed("nothing from the decode rank"))
        return True

    def _watch(self, delay: float) -> None:
        """The oldest frame, the handshake, or the end of a leg waits for too long."""
        self._world.at(delay, self._clock)

    def _clock(self) -> None:
        if self._over or not self._process.alive:
            return
        ending = any(part.done_sent_at for part in self.parts.values())
        waiting = self._flights or self._switching or ending or not self._welcome
        if waiting and self._world.now - self._progress >= FRAME_S - 1e-6:
            self._end(TransferFailed("no answer to a frame"))
        elif waiting:
            self._watch(max(0.01, self._progress + FRAME_S - self._world.now))

    def _end(self, error: BatonError) -> None:
        if self._over or not self._process.alive:
            return
        self._over = True
        if self._wire is not None:
            self._wire.close(0)
        self._owner.link_ended(self, error)
        self._owner.link_closed(self)
        self._owner.link_closed(self)

    def _poke(self) -> None:
        if not self._poked and not self._over:
            self._poked = True
            self._world.at(self._process.pause(), self._turn)

    def _turn(self) -> None:
        """Do one thing, as the link's thread does."""
        self._poked = False
        if self._over or not self._welcome or not self._process.alive:
            return
        if self._outbox:
            kind, leg, fields = self._outbox.popleft()
            self._say(kind, leg, fields)
        elif not (self._announce() or self._send_done()):
            return
        self._poke()

    def _say(self, *message: Any) -> None:
        if self._wire is not None:
            self._wire.send(1, message)

    def _announce(self) -> bool:
        if not self._ready or len(self._flights) >= WINDOW or self._switching:
            return False
        part = self._ready.popleft()
        if not part.ready:  # held meanwhile
            return True
        box = part.take(CELL_BYTES, FRAME_BYTES)
        if part.ready:
            self._ready.append(part)
        payload = self._process.gather(self._owner, part, box)
        if self._owner.start_frame(part):
            self._launch(_Flight(part, box, payload))
        return True

    def _launch(self, flight: _Flight) -> None:
        if not self._flights:
            self._progress = self._world.now
            self._watch(FRAME_S)
        self._flights[self._sequence] = flight
        self._say("frame", self._sequence, flight.part.leg.key, flight.box, checksum(flight.payload))
        self._sequence += 1

    def _send_done(self) -> bool:
        def owed(part: LegPart) -> bool:
            return self._switching or any(f.part is part and not f.handed_over for f in self._flights.values())

        part = next((part for part in self.parts.values() if part.finished and not owed(part)), None)
        if part is None:
            return False
        part.done_sent_at = self._progress = self._world.now
        self._watch(FRAME_S)
        self._say("done", part.leg.key, part.first_tokens)
        return True

    # ---- what the decode rank says ---------------------------------------------------------------------------------

    def _on_welcome(self) -> None:
        self._welcome = True

    def _on_refused(self, error: BatonError) -> None:
        self._end(error)

    def _on_accept(self, sequence: int) -> None:
        flight = self._flights[sequence]
        if not self._switching:
            flight.handed_over = True
            self._say("payload", self._process.corrupted(flight.payload))

    def _on_ack(self, sequence: int) -> None:
        flight = self._flights.pop(sequence)
        if not (flight.handed_over or self._switching):
            raise Violation("a frame was acknowledged before its payload was sent")
        self._owner.frames_acknowledged(flight.part, flight.box.volume * CELL_BYTES, 1)

    def _on_refuse(self, sequence: int, error: BatonError) -> None:
        self._owner.leg_failed(self._flights.pop(sequence).part.leg.key, error)

    def _on_later(self, sequence: int) -> None:
        flight = self._flights.pop(sequence)
        self._owner.frame_postponed(flight.part, flight.box)

    def _on_expected(self, leg: LegKey) -> None:
        if (part := self.parts.get(leg)) is not None:
            part.held = False
            self.offer(part)

    def _on_carrier_failed(self) -> None:
        self._switching = True
        self._say("switch")

    def _on_switched(self) -> None:
        """Announce again what was not acknowledged."""
        self._switching = False
        flights, self._flights = list(self._flights.values()), {}
        for flight in flights:
            if self._owner.start_frame(flight.part):
                flight.handed_over = False
                self._launch(flight)

    def _on_done_ack(self, leg: LegKey) -> None:
        if (part := self.parts.get(leg)) is not None:
            self._owner.part_acknowledged(part)

    def _on_leg_refused(self, leg: LegKey, error: BatonError) -> None:
        self._owner.leg_failed(leg, error)
