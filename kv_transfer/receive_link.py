"""One link of a decode rank: a thread that reads what a prefill rank sends, judges it, and has it placed.

A frame's header is judged before anything is allocated for it; its payload is read into a scratch buffer, verified,
and only then copied into the pool. A frame that is refused ends its leg; bytes that are not our protocol, and silence
while a leg is open, end the link and all legs that have not come to their end on it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..proto.errors import BatonError, InternalError, TransferFailed, from_wire
from ..proto.failpoints import reach
from .canary import NONCE_BYTES, receive_canary
from .carrier_build import build_carrier
from .carriers import INLINE, Carrier, CarrierFailed, InlineCarrier, TorchCarrier
from .events import Abandoned, FirstTokensArrived, LegKey, RankComplete, ReceiveEvent, ReceiveFailed
from .frames import MAX_PARCEL_FRAMES, FrameHeader, offsets
from .handshake import Agreement, HelloOwner
from .params import TransferParams
from .placement import ExpectedLeg, Placement, PlacementOwner
from .plan import length
from .shm import ShmReceiver
from .staging import Staging
from .ticket import Ticket
from .wire import Payload, Wire, WireError, field, leg_of

_log = logging.getLogger(__name__)
_MAX_LEGS = 4096
_MAX_ACCEPTED = 64
_EARLY_LOOK_S = 0.01


@dataclass(slots=True, eq=False)
class _Parcel:
    """Frames of one leg that were announced together and accepted."""

    headers: list[FrameHeader]
    leg: ExpectedLeg
    payload: torch.Tensor | None  # where it is, or will be once the carrier brought it; None: comes on the wire


@dataclass(slots=True)
class _Early:
    """An open leg that the worker's own order has not announced to this rank yet."""

    deadline: float
    last: tuple[str, dict[str, Any]] | None = None  # the end of the leg, when that came as well


class ReceiveOwner(PlacementOwner, HelloOwner, Protocol):
    """What a link needs of its receiver."""

    @property
    def params(self) -> TransferParams: ...
    @property
    def on_event(self) -> Callable[[ReceiveEvent], None]: ...

    def leg(self, key: LegKey, nonce: bytes) -> ExpectedLeg | None:
        """The expected leg, None when it is not expected yet. Raises TransferFailed when it is no more."""
        ...

    def known_leg(self, key: LegKey) -> ExpectedLeg | None:
        """The expected leg, if it is there now."""
        ...

    def link_ended(self, link: ReceiveLink) -> None:
        """The link's thread is about to end."""
        ...


class ReceiveLink:
    """A link and its thread; only `start`, `stop` and `join` are for others."""

    def __init__(self, owner: ReceiveOwner, wire: Wire, agreement: Agreement) -> None:
        self._owner = owner
        self._params = owner.params
        self._wire = wire
        self._agreement = agreement
        self._thread = threading.Thread(target=self._run, name="kv-receive", daemon=True)
        self._carrier: Carrier = InlineCarrier(self._wire)
        self._carrier_broken = False  # until the prefill rank says `switch`
        self._source = agreement.source  # the prefill rank
        self._heads = agreement.heads  # that it sends to us
        self._placement = Placement(
            owner, agreement.source, agreement.heads, agreement.checked, agreement.dtype, owner.params.wire
        )
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._canaries = 0  # how many came
        self._proved = False  # the last one was right
        self._early: dict[LegKey, _Early] = {}  # open on this link, and not expected here yet
        self._tickets: dict[LegKey, Ticket] = {}  # of legs that are open on this link
        self._accepted: deque[_Parcel] = deque()  # whose payloads come next
        self._sequence = 0
        self._staging = Staging(torch.device("cpu"))

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
            self._shake_hands()
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

    def _shake_hands(self) -> None:
        """Answer the hello, and build the carrier. Raises WireError."""
        agreed = self._agreement.carrier
        self._wire.send("welcome", carrier=agreed, checksum=self._agreement.checked, canary=self._nonce)
        self._wire.limit_s = self._params.frame_timeout_s
        self._carrier, reason = build_carrier(agreed, self._wire, 1, self._params)
        self._staging = Staging(self._carrier.device)
        if reason := self._agreement.reason or reason:
            _log.warning("the link from prefill rank %d stays inline: %s", self._source, reason)

    def _on_canary(self, message: dict[str, Any]) -> None:
        """Take the synthetic block in, or say what is wrong with it. Raises WireError when no other may come."""
        name = field(message, "carrier", str)
        self._canaries += 1
        if self._tickets or self._canaries > 2 or name not in (self._carrier.name, INLINE):
            raise WireError(f"an unexpected canary over {name!r}")
        if name != self._carrier.name:
            self._use_inline()
        what = (self._owner.layout.head_dim, self._agreement.dtype, self._params.wire)
        reason = receive_canary(self._wire, self._carrier, message, self._nonce, *what)
        self._proved = not reason
        if reason and name == INLINE:
            raise WireError(f"the canary over inline failed: {reason}")
        if reason:
            _log.warning("the link from prefill rank %d cannot use %s: %s", self._source, name, reason)

    def _turn(self) -> None:
        """Handle the next message. Raises WireError when none comes while one is due."""
        if self._ahead and not self._wire.readable(0):
            self._receive(self._accepted.popleft())
            return
        limit = self._params.frame_timeout_s
        if not (self._tickets or self._accepted or self._carrier_broken):
            limit += self._params.idle_close_s
        elif self._carrier_broken:
            limit *= 0.75  # the prefill rank's own carrier gives up after half
        if self._early:
            self._look_again()
            limit = _EARLY_LOOK_S
        if not self._wire.readable(limit):
            if self._early:
                return
            raise WireError(f"nothing from the peer for {limit:g} s")
        message = self._wire.receive()
        if isinstance(message, Payload):
            self._on_payload(message.size)
            return
        kind = message["kind"]
        if kind not in ("frame", "beat"):  # what came before it comes first
            while self._ahead:
                self._receive(self._accepted.popleft())
        if kind == "frame":
            self._on_frame(message)
        elif kind == "ring":
            self._on_ring(field(message, "bytes", int))
        elif kind == "beat":
            self._wire.send("beat")
        elif kind == "switch":
            self._on_switch()
        elif kind == "canary":
            self._on_canary(message)
        elif kind in ("open", "done", "cancel", "abandon", "fail"):
            self._on_leg(kind, leg_of(message), message)
        else:
            raise WireError(f"unexpected {kind} message")

    def _on_leg(self, kind: str, key: LegKey, message: dict[str, Any]) -> None:
        try:
            if kind == "open":
                self._open(key, field(message, "ticket", bytes))
            elif key in self._tickets and (leg := self._expected(key)) is None:
                self._early[key].last = (kind, message)
            elif key not in self._tickets or leg is None:
                return
            elif kind == "done":
                self._done(leg, message.get("first_tokens"))
            else:
                self._withdraw(kind, key, message)
        except TransferFailed as error:
            self._refuse_leg(key, error)

    def _refuse_leg(self, key: LegKey, error: BatonError) -> None:
        self._wire.send("leg_refused", leg=key, code=error.code, message=error.message)
        self._end(key, "fail", ReceiveFailed(key, self._owner.rank, _bare(error)))

    def _expected(self, key: LegKey) -> ExpectedLeg | None:
        """The leg, or None while the worker's order has not come to this rank: then it is looked for again."""
        leg = self._owner.leg(key, self._tickets[key].nonce)
        if leg is None and key not in self._early:
            self._early[key] = _Early(time.monotonic() + self._params.frame_timeout_s / 2)
        return leg

    def _look_again(self) -> None:
        """Go on with the legs that are expected by now; refuse those that came too early for too long."""
        for key, early in list(self._early.items()):
            try:
                if key in self._tickets and self._expected(key) is None:
                    if time.monotonic() > early.deadline:
                        raise TransferFailed(f"leg {key} is not expected here")
                    continue
            except TransferFailed as error:
                del self._early[key]
                self._refuse_leg(key, error)
                continue
            del self._early[key]
            self._wire.send("expected", leg=key)
            if early.last is not None:
                self._on_leg(early.last[0], key, early.last[1])

    def _open(self, key: LegKey, data: bytes) -> None:
        if len(self._tickets) >= _MAX_LEGS or not self._proved:
            raise WireError("too many legs on one link" if self._proved else "a leg came before the canary")
        owner = self._owner
        ticket = owner.tickets.redeem(data, owner.worker_id, owner.incarnation, (self._source, owner.rank))
        if ticket.leg != key:
            raise TransferFailed(f"the ticket is for leg {ticket.leg}, not {key}")
        self._tickets[key] = ticket

    def _done(self, leg: ExpectedLeg, first_tokens: Any) -> None:
        owner, key = self._owner, leg.key
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
        if kind == "abandon":
            self._end(key, "abandon", Abandoned(key))
            return
        error: BatonError = TransferFailed("prefill cancelled the transfer")  # not Cancelled: no client left
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

    @property
    def _ahead(self) -> bool:
        """Whether payloads are due that come beside the wire, so that it can be read on before they are placed."""
        return bool(self._accepted) and self._carrier.name != INLINE

    def _on_frame(self, message: dict[str, Any]) -> None:
        headers = self._headers(message)
        first = headers[0]
        if self._carrier_broken:
            return  # they will be announced again
        if len(self._accepted) >= _MAX_ACCEPTED:
            raise WireError("too many frames at once")
        try:
            if first.leg not in self._tickets:
                raise TransferFailed(f"leg {first.leg} is not open on this link")
            if (leg := self._expected(first.leg)) is None:
                self._wire.send("later", sequence=first.sequence)
                return
            for header in headers:
                self._placement.judge(header, leg)
        except TransferFailed as error:
            self._refuse(first, error)
            return
        try:
            self._accept(_Parcel(headers, leg, None), message)
        except CarrierFailed as error:
            self._give_up_carrier(error)

    def _headers(self, message: dict[str, Any]) -> list[FrameHeader]:
        """Of the frames that a message announces. Raises WireError for anything that our peer would not send."""
        more = message.get("more", [])
        if not isinstance(more, list) or len(more) >= MAX_PARCEL_FRAMES:
            raise WireError("a frame message with no list of further headers")
        try:
            headers = [FrameHeader.unpack(data) for data in (message.get("header"), *more)]
        except ValueError as error:
            raise WireError(str(error)) from error
        for header in headers:
            if header.sequence != self._sequence:
                raise WireError(f"frame {header.sequence} came when {self._sequence} was due")
            self._sequence += 1
            if header.leg != headers[0].leg:
                raise WireError("frames of several legs in one message")
        if more and offsets([header.bytes for header in headers])[1] > self._carrier.largest:
            raise WireError("the frames of one message are too large together")
        return headers

    def _accept(self, parcel: _Parcel, message: dict[str, Any]) -> None:
        """Let the payload come. Raises CarrierFailed, and WireError for a payload in no place."""
        first = parcel.headers[0]
        size = offsets([header.bytes for header in parcel.headers])[1]
        if isinstance(self._carrier, ShmReceiver):
            parcel.payload = self._carrier.view(field(message, "at", int), size)
        else:
            if self._carrier.name != INLINE:
                parcel.payload = self._staging.lend(size)
                if isinstance(self._carrier, TorchCarrier):
                    self._carrier.expect(parcel.payload)
            self._wire.send("accept", sequence=first.sequence)
        self._accepted.append(parcel)

    def _on_payload(self, size: int) -> None:
        due = offsets([header.bytes for header in self._accepted[0].headers])[1] if self._accepted else -1
        if size != due or self._carrier.name != INLINE:
            raise WireError(f"a payload of {size} bytes that was not announced")
        self._receive(self._accepted.popleft())

    def _receive(self, parcel: _Parcel) -> None:
        """Verify and place what was accepted. After a bad frame nothing more of its parcel is placed."""
        first, failure, covered = parcel.headers[0], None, False
        try:
            reach("decode.mid_frame")
            for header, payload in self._payloads(parcel):
                try:
                    if failure is None:
                        covered |= self._placement.place(header, parcel.leg, payload)
                except BatonError as error:
                    failure = error
        except BatonError as error:
            failure = error
        except CarrierFailed as error:
            self._give_up_carrier(error)
            return
        if failure is not None:
            self._refuse(first, failure)
            return
        leg = parcel.leg
        if covered:
            self._owner.on_event(RankComplete(leg.key, self._owner.rank, leg.handoff.bytes, leg.handoff.frames))
        self._wire.send("ack", sequence=first.sequence)

    def _payloads(self, parcel: _Parcel) -> Iterator[tuple[FrameHeader, torch.Tensor]]:
        """Each frame's bytes, valid until the next is asked for. Raises CarrierFailed or WireError."""
        sizes = [header.bytes for header in parcel.headers]
        starts, total = offsets(sizes)
        whole = parcel.payload
        if whole is not None and not isinstance(self._carrier, ShmReceiver):
            self._carrier.receive(whole)
        for header, start, end, size in zip(parcel.headers, starts, [*starts[1:], total], sizes, strict=True):
            if whole is None:
                buffer = self._staging.lend(end - start)
                self._carrier.receive(buffer)
                yield header, buffer[:size]
                self._staging.give(buffer)
            else:
                yield header, whole[start : start + size]
        if whole is not None:
            self._staging.give(whole)

    def _on_ring(self, size: int) -> None:
        """The prefill rank has a larger ring."""
        if self._carrier_broken:
            return
        if not isinstance(self._carrier, ShmReceiver):
            raise WireError("a ring came, and the carrier is another")
        try:
            self._carrier.renew(size)
        except CarrierFailed as error:
            self._give_up_carrier(error)

    def _give_up_carrier(self, error: CarrierFailed) -> None:
        """Go on inline, once the prefill rank has heard of it; what was accepted will be announced again."""
        _log.warning("the link from prefill rank %d goes on inline: %s", self._source, error)
        self._use_inline()
        self._carrier_broken = True
        self._wire.send("carrier_failed", reason=str(error))

    def _use_inline(self) -> None:
        self._carrier.close()  # its peer then fails at once too
        self._carrier = InlineCarrier(self._wire)
        self._staging = Staging(self._carrier.device)  # the old carrier may still write to its buffers
        self._accepted.clear()

    def _refuse(self, header: FrameHeader, error: BatonError) -> None:
        self._wire.send("refuse", sequence=header.sequence, code=error.code, message=error.message)
        self._end(header.leg, "fail", ReceiveFailed(header.leg, self._owner.rank, _bare(error)))

    def _on_switch(self) -> None:
        """The prefill rank asks to go on inline: drop what was accepted, it will be announced again."""
        self._use_inline()
        self._carrier_broken = False
        self._wire.send("switched")


def _bare(error: BatonError) -> BatonError:
    """Without the frames that raised it: whoever keeps the error would keep the link's buffers as well."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error
