"""One link of a decode rank: a thread that reads what a prefill rank sends, judges it, and has it placed.

A frame's header is judged before anything is allocated for it; its payload is read into a scratch buffer, verified,
and only then copied into the pool. A frame that is refused ends its leg; bytes that are not our protocol, and silence
while a leg is open, end the link and all legs that have not come to their end on it.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..proto.errors import BatonError, Cancelled, InternalError, TransferFailed, from_wire
from .carriers import INLINE, Carrier, CarrierFailed, InlineCarrier, Rendezvous, chosen
from .events import Abandoned, FirstTokensArrived, LegKey, RankComplete, ReceiveEvent, ReceiveFailed
from .frames import FrameHeader
from .handshake import HelloOwner, checked_hello
from .params import TransferParams
from .placement import ExpectedLeg, Placement, PlacementOwner
from .plan import Range, length
from .ticket import Ticket
from .wire import Payload, Wire, WireError, field, leg_of

_log = logging.getLogger(__name__)
_MAX_LEGS = 4096
_MAX_ACCEPTED = 64


class ReceiveOwner(PlacementOwner, HelloOwner, Protocol):
    """What a link needs of its receiver."""

    @property
    def params(self) -> TransferParams: ...
    @property
    def on_event(self) -> Callable[[ReceiveEvent], None]: ...

    def leg(self, key: LegKey, nonce: bytes) -> ExpectedLeg:
        """The expected leg, waiting a while for it. Raises TransferFailed."""
        ...

    def known_leg(self, key: LegKey) -> ExpectedLeg | None:
        """The expected leg, if it is there now."""
        ...

    def link_ended(self, link: ReceiveLink) -> None:
        """The link's thread is about to end."""
        ...


class ReceiveLink:
    """A link and its thread; only `start`, `stop` and `join` are for others."""

    def __init__(self, owner: ReceiveOwner, connection: socket.socket) -> None:
        self._owner = owner
        self._params = owner.params
        self._wire = Wire(connection, owner.params.connect_timeout_s)
        self._thread = threading.Thread(target=self._run, name="kv-receive", daemon=True)
        self._carrier: Carrier = InlineCarrier(self._wire)
        self._carrier_broken = False  # until the prefill rank says `switch`
        self._source = -1  # the prefill rank
        self._heads: tuple[Range, ...] = ()  # that it sends to us
        self._placement = Placement(owner, -1, (), True)
        self._tickets: dict[LegKey, Ticket] = {}  # of legs that are open on this link
        self._accepted: deque[tuple[FrameHeader, ExpectedLeg]] = deque()  # whose payloads come next, inline
        self._sequence = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """End the link soon."""
        self._wire.interrupt()

    def join(self, limit_s: float) -> None:
        """Wait for the thread."""
        self._thread.join(limit_s)

    def _run(self) -> None:
        reason: BatonError = TransferFailed("the link was closed")
        try:
            if self._shake_hands():
                while True:
                    self._turn()
        except WireError as error:
            reason = TransferFailed(f"link from prefill rank {self._source}: {error}")
        except Exception as error:
            _log.exception("a KV link failed")
            reason = InternalError(f"link from prefill rank {self._source}: {error}")
        _log.info("a KV link ended: %s", reason)
        for key in list(self._tickets):
            self._end(key, "fail", ReceiveFailed(key, self._owner.rank, reason))
        self._carrier.close()
        self._wire.close()
        self._owner.link_ended(self)

    def _shake_hands(self) -> bool:
        """Whether the link may serve. Raises WireError."""
        if not self._wire.readable(self._params.connect_timeout_s):
            raise WireError("no handshake")
        hello = self._wire.receive()
        if not isinstance(hello, dict) or hello["kind"] != "hello":
            raise WireError("no handshake")
        try:
            self._source, self._heads = checked_hello(hello, self._owner)
        except BatonError as error:
            self._wire.send("refused", code=error.code, message=error.message)
            return False
        wanted = field(hello, "carrier", str)
        agreed = wanted if wanted == chosen(self._params.transport) else INLINE
        checked = self._params.checksum or field(hello, "checksum", bool)
        self._placement = Placement(self._owner, self._source, self._heads, checked)
        self._wire.send("welcome", carrier=agreed, checksum=checked)
        self._wire.limit_s = self._params.frame_timeout_s
        if agreed != INLINE:
            limit_s = self._params.frame_timeout_s / 2
            built, reason = Rendezvous(self._wire, agreed, 1, self._params.host, limit_s).run()
            if built is None:
                _log.warning("the link from prefill rank %d stays inline: %s", self._source, reason)
            else:
                self._carrier = built
        return True

    def _turn(self) -> None:
        """Handle the next message. Raises WireError when none comes while one is due."""
        limit = self._params.frame_timeout_s
        if not (self._tickets or self._accepted or self._carrier_broken):
            limit += self._params.idle_close_s
        elif self._carrier_broken:
            limit *= 0.75  # the prefill rank's own carrier gives up after half
        if not self._wire.readable(limit):
            raise WireError(f"nothing from the peer for {limit:g} s")
        message = self._wire.receive()
        if isinstance(message, Payload):
            self._on_payload(message.size)
            return
        kind = message["kind"]
        if kind == "frame":
            self._on_frame(message)
        elif kind == "beat":
            self._wire.send("beat")
        elif kind == "switch":
            self._on_switch()
        elif kind in ("open", "done", "cancel", "abandon", "fail"):
            self._on_leg(kind, leg_of(message), message)
        else:
            raise WireError(f"unexpected {kind} message")

    def _on_leg(self, kind: str, key: LegKey, message: dict[str, Any]) -> None:
        try:
            if kind == "open":
                self._open(key, field(message, "ticket", bytes))
            elif key not in self._tickets:
                return
            elif kind == "done":
                self._done(key, message.get("first_tokens"))
            else:
                self._withdraw(kind, key, message)
        except TransferFailed as error:
            self._wire.send("leg_refused", leg=key, code=error.code, message=error.message)
            self._end(key, "fail", ReceiveFailed(key, self._owner.rank, error))

    def _open(self, key: LegKey, data: bytes) -> None:
        if len(self._tickets) >= _MAX_LEGS:
            raise WireError("too many legs on one link")
        owner = self._owner
        ticket = owner.tickets.redeem(data, owner.worker_id, owner.incarnation, (self._source, owner.rank))
        if ticket.leg != key:
            raise TransferFailed(f"the ticket is for leg {ticket.leg}, not {key}")
        self._tickets[key] = ticket

    def _done(self, key: LegKey, first_tokens: Any) -> None:
        owner = self._owner
        leg = owner.leg(key, self._tickets[key].nonce)
        due_first = (self._source, owner.rank) == (0, 0)
        if (type(first_tokens) is bytes) != due_first:
            raise TransferFailed("the end of the leg came with the wrong first tokens")
        with leg.lock:
            if not leg.handoff.open and leg.handoff.state != "complete":
                raise TransferFailed(f"leg {key} is {leg.handoff.state}")
            problem, covered = leg.handoff.source_done(self._source, sum(length(span) for span in self._heads))
            arrived = not problem and due_first and leg.handoff.first_tokens()
        if problem:
            raise TransferFailed(problem)
        del self._tickets[key]
        if covered:
            owner.on_event(RankComplete(key, owner.rank, leg.handoff.bytes, leg.handoff.frames))
        if arrived:
            owner.on_event(FirstTokensArrived(key, first_tokens))
        self._wire.send("done", leg=key)

    def _withdraw(self, kind: str, key: LegKey, message: dict[str, Any]) -> None:
        """The prefill rank sends no more of this leg."""
        self._owner.leg(key, self._tickets[key].nonce)
        if kind == "abandon":
            self._end(key, "abandon", Abandoned(key))
            return
        error: BatonError = Cancelled("prefill cancelled the transfer")
        if kind == "fail":
            error = from_wire(field(message, "code", str), field(message, "message", str))
        self._end(key, "fail", ReceiveFailed(key, self._owner.rank, error))

    def _end(self, key: LegKey, event: str, news: ReceiveEvent) -> None:
        """Bring a leg that this link serves to its end, and tell the worker if it had not ended before."""
        ticket = self._tickets.pop(key, None)
        leg = self._owner.known_leg(key)
        if ticket is None or leg is None or leg.nonce != ticket.nonce:
            return
        with leg.lock:
            changed = leg.handoff.end(event)
        if changed:
            self._owner.on_event(news)

    def _on_frame(self, message: dict[str, Any]) -> None:
        try:
            header = FrameHeader.unpack(message.get("header"))
        except ValueError as error:
            raise WireError(str(error)) from error
        if header.sequence != self._sequence:
            raise WireError(f"frame {header.sequence} came when {self._sequence} was due")
        self._sequence += 1
        if self._carrier_broken:
            return  # it will be announced again
        if len(self._accepted) >= _MAX_ACCEPTED:
            raise WireError("too many frames at once")
        try:
            if header.leg not in self._tickets:
                raise TransferFailed(f"leg {header.leg} is not open on this link")
            leg = self._owner.leg(header.leg, self._tickets[header.leg].nonce)
            self._placement.judge(header, leg)
        except TransferFailed as error:
            self._refuse(header, error)
            return
        self._wire.send("accept", sequence=header.sequence)
        if self._carrier.name == INLINE:
            self._accepted.append((header, leg))
        else:
            self._receive(header, leg)

    def _on_payload(self, size: int) -> None:
        if not self._accepted or size != self._accepted[0][0].bytes:
            raise WireError(f"a payload of {size} bytes that was not announced")
        self._receive(*self._accepted.popleft())

    def _receive(self, header: FrameHeader, leg: ExpectedLeg) -> None:
        if self._scratch.numel() < header.bytes or self._scratch.device != self._carrier.device:
            self._scratch = torch.empty(header.bytes, dtype=torch.uint8, device=self._carrier.device)
        payload = self._scratch[: header.bytes]
        try:
            self._carrier.receive(payload)
            covered = self._placement.place(header, leg, payload)
        except CarrierFailed as error:
            _log.warning("the link from prefill rank %d goes on inline: %s", self._source, error)
            self._carrier.close()  # its peer then fails at once too
            self._carrier = InlineCarrier(self._wire)
            self._carrier_broken = True
            self._wire.send("carrier_failed", reason=str(error))
            return
        except BatonError as error:
            self._refuse(header, error)
            return
        if covered:
            self._owner.on_event(RankComplete(leg.key, self._owner.rank, leg.handoff.bytes, leg.handoff.frames))
        self._wire.send("ack", sequence=header.sequence)

    def _refuse(self, header: FrameHeader, error: BatonError) -> None:
        self._wire.send("refuse", sequence=header.sequence, code=error.code, message=error.message)
        self._end(header.leg, "fail", ReceiveFailed(header.leg, self._owner.rank, error))

    def _on_switch(self) -> None:
        """The prefill rank asks to go on inline: drop what was accepted, it will be announced again."""
        self._carrier.close()
        self._carrier = InlineCarrier(self._wire)
        self._carrier_broken = False
        self._accepted.clear()
        self._wire.send("switched")
