"""The legs that are open on one link of a decode rank: by which ticket, whether they are expected yet, how they end.

A leg may be opened before the worker's own order for it has come to this rank (followers hear of a reservation later
than the prefill worker). It is then looked for again from time to time, and holds up nobody else on its link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..proto.errors import BatonError, TransferFailed, from_wire
from ..proto.worker_loop import let_others_run
from .events import Abandoned, FirstTokensArrived, LegKey, RankComplete, ReceiveEvent, ReceiveFailed
from .handshake import HelloOwner
from .params import TransferParams
from .placement import ExpectedLeg, PlacementOwner
from .plan import Range, length
from .ticket import Ticket
from .wire import Wire, WireError, field

EARLY_LOOK_S = 0.01
ENDING_S = 0.01  # the end of a leg is waited for awake, so long at most: prefill's last matrices, and the draw
_MAX_LEGS = 4096


class LegsOwner(PlacementOwner, HelloOwner, Protocol):
    """What legs need of their receiver."""

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


@dataclass(slots=True)
class _Early:
    """An open leg that the worker's own order has not announced to this rank yet."""

    deadline: float
    last: tuple[str, dict[str, Any]] | None = None  # the end of the leg, when that came as well


class ReceiveLegs:
    """Of the link on which prefill rank `source` sends `heads`. The link's thread alone uses it."""

    def __init__(self, owner: LegsOwner, wire: Wire, source: int, heads: tuple[Range, ...]) -> None:
        self._owner = owner
        self._wire = wire
        self._source = source
        self._heads = heads
        self._early: dict[LegKey, _Early] = {}
        self._tickets: dict[LegKey, Ticket] = {}
        self.ending = False  # a leg has all KV since this was last looked at: its end is about to come

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def waiting(self) -> bool:
        """Whether any leg is open and not expected yet, so that `look_again` should be called soon."""
        return bool(self._early)

    def on_message(self, kind: str, key: LegKey, message: dict[str, Any]) -> None:
        """`open`, `done`, `cancel`, `abandon` or `fail`. Raises WireError."""
        try:
            if kind == "open":
                self._open(key, field(message, "ticket", bytes))
            elif key in self._tickets and (leg := self._find(key)) is None:
                self._early[key].last = (kind, message)
            elif key not in self._tickets or leg is None:
                return
            elif kind == "done":
                self._done(leg, message.get("first_tokens"))
            else:
                self._withdraw(kind, key, message)
        except TransferFailed as error:
            self._refuse(key, error)

    def expected(self, key: LegKey) -> ExpectedLeg | None:
        """The leg, None while it is too early. Raises TransferFailed when it is not open here, or expected no more."""
        if key not in self._tickets:
            raise TransferFailed(f"leg {key} is not open on this link")
        return self._find(key)

    def look_again(self) -> None:
        """Go on with the legs that are expected by now; refuse those that came too early for too long."""
        for key, early in list(self._early.items()):
            try:
                if key in self._tickets and self._find(key) is None:
                    if time.monotonic() > early.deadline:
                        raise TransferFailed(f"leg {key} is not expected here")
                    continue
            except TransferFailed as error:
                del self._early[key]
                self._refuse(key, error)
                continue
            del self._early[key]
            self._wire.send("expected", leg=key)
            if early.last is not None:
                self.on_message(early.last[0], key, early.last[1])

    def fail(self, key: LegKey, error: BatonError) -> None:
        """The leg cannot go on."""
        self._end(key, "fail", ReceiveFailed(key, self._owner.rank, _bare(error)))

    def fail_all(self, error: BatonError) -> None:
        """The link is over."""
        for key in list(self._tickets):
            self.fail(key, error)

    def covered(self, leg: ExpectedLeg) -> None:
        """All KV of the leg is here, and its end is not."""
        self.ending = True
        self._complete(leg)

    def _complete(self, leg: ExpectedLeg) -> None:
        self._owner.on_event(RankComplete(leg.key, self._owner.rank, leg.handoff.bytes, leg.handoff.frames))

    def _refuse(self, key: LegKey, error: BatonError) -> None:
        self._wire.send("leg_refused", leg=key, code=error.code, message=error.message)
        self.fail(key, error)

    def _find(self, key: LegKey) -> ExpectedLeg | None:
        leg = self._owner.leg(key, self._tickets[key].nonce)
        if leg is None and key not in self._early:
            self._early[key] = _Early(time.monotonic() + self._owner.params.frame_timeout_s / 2)
        return leg

    def _open(self, key: LegKey, data: bytes) -> None:
        if len(self._tickets) >= _MAX_LEGS:
            raise WireError("too many legs on one link")
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
            self._complete(leg)
        if arrived:
            owner.on_event(FirstTokensArrived(key, first_tokens))
            let_others_run()  # the worker's thread: the prefill rank does not wait for the answer
        self._wire.send("done", leg=key)

    def _withdraw(self, kind: str, key: LegKey, message: dict[str, Any]) -> None:
        """The prefill rank sends no more of this leg."""
        if kind == "abandon":
            self._end(key, "abandon", Abandoned(key))
            return
        error: BatonError = TransferFailed("prefill cancelled the transfer")  # not Cancelled: no client left
        if kind == "fail":
            error = from_wire(field(message, "code", str), field(message, "message", str))
        self.fail(key, error)

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


def _bare(error: BatonError) -> BatonError:
    """Without the frames that raised it: whoever keeps the error would keep the link's buffers as well."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error
