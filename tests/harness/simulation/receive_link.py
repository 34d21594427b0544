"""The decode end of KV links without sockets and threads: what `receiver` and `receive_link` do with each message.

What is kept about a leg is the product's (`ReceiveLeg`, `TicketBook`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.kv_transfer.events import Abandoned, FirstTokensArrived, LegKey, RankComplete, ReceiveFailed
from baton.kv_transfer.handoff import ReceiveLeg
from baton.kv_transfer.plan import Box, Range, length, shares
from baton.kv_transfer.ticket import Ticket
from baton.proto.errors import BatonError, TransferFailed, from_wire

from .language import LAYERS, Store
from .send_link import CELL_BYTES, FRAME_S, Message, checksum
from .world import Wire

if TYPE_CHECKING:
    from .worker import Process


@dataclass(slots=True, eq=False)
class Expected:
    """A reservation as a rank's receiver keeps it."""

    nonce: bytes
    blocks: tuple[int, ...]
    handoff: ReceiveLeg


class Receiver:
    """In place of `kv_transfer.receiver.Receiver`: what one decode rank expects, and its links."""

    ignores_attempts = False  # set by the tests' broken variants only

    def __init__(self, process: Process, rank: int, store: Store, on_event: Any) -> None:
        self.process = process
        self.rank = rank
        self.store = store
        self.on_event = on_event
        self.legs: dict[LegKey, Expected] = {}
        self.links: list[ReceiveLink] = []
        self._forgotten: set[LegKey] = set()

    def expect(
        self, leg: LegKey, nonce: bytes, blocks: Sequence[int], tokens: Range, *, wants_first_tokens: bool = True
    ) -> None:
        """Place frames of this leg from now on."""
        if leg in self.legs or leg in self._forgotten:
            raise ValueError(f"leg {leg} was expected before")
        box = Box(tokens, (0, LAYERS), self.process.layout.head_ranges[self.rank])
        self.legs[leg] = Expected(nonce, tuple(blocks), ReceiveLeg(box, wants_first_tokens and self.rank == 0))
        self._changed()

    def forget(self, leg: LegKey) -> None:
        """Nothing is written to the leg's blocks after this."""
        expected = self.legs.pop(leg, None)
        self._forgotten.add(leg)
        if expected is not None:
            expected.handoff.end("forget")
        self._changed()

    def known(self, leg: LegKey) -> Expected | None:
        """None: not expected (any more, or yet)."""
        if self.ignores_attempts:
            return next((found for key, found in self.legs.items() if key[::2] == leg[::2]), None)
        return self.legs.get(leg)

    def may_come(self, leg: LegKey) -> bool:
        """Whether the worker may still order us to expect it."""
        return leg not in self._forgotten

    def _changed(self) -> None:
        for link in list(self.links):
            link.look_again()


class ReceiveLink:
    """In place of `kv_transfer.receive_link.ReceiveLink`: end 1 of a wire."""

    def __init__(self, owner: Receiver) -> None:
        self.wire: Wire | None = None
        self._owner = owner
        self._process = owner.process
        self._source = -1
        self._heads: tuple[Range, ...] = ()
        self._tickets: dict[LegKey, Ticket] = {}
        self._accepted: deque[tuple[int, LegKey, Expected, Box, int]] = deque()
        self._broken = False  # its carrier, until the prefill rank says `switch`
        self._over = False
        self._early: dict[LegKey, tuple[float, Message | None]] = {}  # not expected yet: until when, and its end
        owner.links.append(self)

    def on_message(self, message: Message) -> None:
        """From the prefill rank."""
        if not self._over and self._process.alive:
            getattr(self, f"_on_{message[0]}")(*message[1:])

    def look_again(self) -> None:
        """Go on with the legs that are expected by now; refuse those that came too early for too long."""
        if self._over or not self._process.alive:
            return
        for key, (deadline, last) in list(self._early.items()):
            try:
                if key in self._tickets and self._leg(key) is None:
                    if self._process.world.now >= deadline - 1e-9:
                        raise TransferFailed(f"leg {key} is not expected here")
                    continue
            except TransferFailed as error:
                del self._early[key]
                self._refuse_leg(key, error)
                continue
            del self._early[key]
            self._say("expected", key)
            if last is not None:
                self.on_message(last)

    def on_closed(self, reason: str) -> None:
        """The prefill rank is gone."""
        self._end_all(TransferFailed(f"link from prefill rank {self._source}: {reason}"))

    def on_silence(self) -> bool:
        """A link with open legs that hears nothing ends."""
        if not self._tickets:
            return False
        self._close(TransferFailed("nothing from the prefill rank"))
        return True

    def _close(self, error: BatonError) -> None:
        if self.wire is not None:
            self.wire.close(1)
        self._end_all(error)

    def _end_all(self, error: BatonError) -> None:
        if self._over or not self._process.alive:
            return
        self._over = True
        self._owner.links.remove(self)
        for key in list(self._tickets):
            self._end(key, "fail", ReceiveFailed(key, self._owner.rank, error))

    def _say(self, *message: Any) -> None:
        if self.wire is not None:
            self.wire.send(0, message)

    def _end(self, key: LegKey, event: str, news: Any) -> None:
        ticket, leg = self._tickets.pop(key, None), self._owner.known(key)
        if ticket is not None and leg is not None and leg.nonce == ticket.nonce and leg.handoff.end(event):
            self._owner.on_event(news)

    def _leg(self, key: LegKey) -> Expected | None:
        """The leg; None when the worker's order has not come to this rank yet. Raises TransferFailed."""
        leg = self._owner.known(key)
        if leg is None:
            if not self._owner.may_come(key):
                raise TransferFailed(f"leg {key} is not expected here any more")
            if key not in self._early:
                self._early[key] = self._process.world.now + FRAME_S / 2, None
                self._process.world.at(FRAME_S / 2, self.look_again)
            return None
        if leg.nonce != self._tickets[key].nonce and not self._owner.ignores_attempts:
            raise TransferFailed(f"the ticket for leg {key} is not the one of its reservation")
        return leg

    # ---- what the prefill rank says --------------------------------------------------------------------------------

    def _on_hello(self, ticket: bytes, rank: int, incarnation: str, theirs: tuple[Range, ...]) -> None:
        process = self._process
        try:
            process.tickets.verify(ticket, process.worker_id, process.incarnation)
            if incarnation != process.incarnation:
                raise TransferFailed("another incarnation was meant")
        except TransferFailed as error:
            self._say("refused", error)
            self._close(error)
            return
        plan = shares(theirs, process.layout.head_ranges, process.layout.kv_heads)
        self._source, self._heads = rank, plan.get((rank, self._owner.rank), ())
        self._say("welcome")

    def _on_open(self, key: LegKey, fields: dict[str, Any]) -> None:
        process, ranks = self._process, (self._source, self._owner.rank)
        try:
            ticket = process.tickets.redeem(fields["ticket"], process.worker_id, process.incarnation, ranks)
            if ticket.leg != key:
                raise TransferFailed(f"the ticket is for leg {ticket.leg}, not {key}")
        except TransferFailed as error:
            self._refuse_leg(key, error)
            return
        self._tickets[key] = ticket

    def _refuse_leg(self, key: LegKey, error: BatonError) -> None:
        self._say("leg_refused", key, error)
        self._end(key, "fail", ReceiveFailed(key, self._owner.rank, error))

    def _on_done(self, key: LegKey, first_tokens: bytes | None) -> None:
        if key not in self._tickets:
            return
        rank = self._owner.rank
        due_first = (self._source, rank) == (0, 0)
        try:
            leg = self._leg(key)
            if leg is None:
                self._early[key] = self._early[key][0], ("done", key, first_tokens)
                return
            if not leg.handoff.open and leg.handoff.state != "complete":
                raise TransferFailed(f"leg {key} is {leg.handoff.state}")
            problem, covered = leg.handoff.source_done(self._source, sum(length(span) for span in self._heads))
            if problem:
                raise TransferFailed(problem)
        except TransferFailed as error:
            self._refuse_leg(key, error)
            return
        arrived = due_first and leg.handoff.first_tokens()
        del self._tickets[key]
        if covered:
            self._owner.on_event(RankComplete(key, rank, leg.handoff.bytes, leg.handoff.frames))
        if arrived and first_tokens is not None:
            self._owner.on_event(FirstTokensArrived(key, first_tokens))
        self._say("done_ack", key)

    def _on_abandon(self, key: LegKey, fields: dict[str, Any]) -> None:
        self._withdraw("abandon", key, fields)

    def _on_cancel(self, key: LegKey, fields: dict[str, Any]) -> None:
        self._withdraw("cancel", key, fields)

    def _on_fail(self, key: LegKey, fields: dict[str, Any]) -> None:
        self._withdraw("fail", key, fields)

    def _withdraw(self, kind: str, key: LegKey, fields: dict[str, Any]) -> None:
        if key not in self._tickets:
            return
        try:
            if self._leg(key) is None:
                self._early[key] = self._early[key][0], (kind, key, fields)
                return
        except TransferFailed as error:
            self._refuse_leg(key, error)
            return
        if kind == "abandon":
            self._end(key, "abandon", Abandoned(key))
            return
        reason: BatonError = TransferFailed("prefill cancelled the transfer")
        if kind == "fail":
            reason = from_wire(fields["code"], fields["message"])
        self._end(key, "fail", ReceiveFailed(key, self._owner.rank, reason))

    def _on_frame(self, sequence: int, key: LegKey, box: Box, due: int) -> None:
        if self._broken:
            return  # it will be announced again
        try:
            if key not in self._tickets:
                raise TransferFailed(f"leg {key} is not open on this link")
            if (leg := self._leg(key)) is None:
                self._say("later", sequence)
                return
            if problem := leg.handoff.problem(box):
                raise TransferFailed(problem)
        except TransferFailed as error:
            self._refuse(sequence, key, error)
            return
        self._say("accept", sequence)
        self._accepted.append((sequence, key, leg, box, due))

    def _refuse(self, sequence: int, key: LegKey, error: BatonError) -> None:
        self._say("refuse", sequence, error)
        self._end(key, "fail", ReceiveFailed(key, self._owner.rank, error))

    def _on_payload(self, payload: list[list[int]]) -> None:
        if self._broken:
            return  # sent before the prefill rank heard of it
        sequence, key, leg, box, due = self._accepted.popleft()
        if self._process.carrier_breaks():
            self._broken = True
            self._say("carrier_failed")
            return
        problem = leg.handoff.problem(box) or ("corrupt" if checksum(payload) != due else "")
        if problem:
            self._refuse(sequence, key, TransferFailed(f"frame {sequence} of {key}: {problem}"))
            return
        self._process.check_place(self._owner, key, leg.blocks, box)
        low = self._process.layout.head_ranges[self._owner.rank][0]
        heads = (box.heads[0] - low, box.heads[1] - low)
        self._owner.store.scatter(leg.blocks, box.layers, heads, box.tokens, payload)
        if leg.handoff.placed(box, self._source, box.volume * CELL_BYTES):
            self._owner.on_event(RankComplete(key, self._owner.rank, leg.handoff.bytes, leg.handoff.frames))
        self._say("ack", sequence)

    def _on_switch(self) -> None:
        """Drop what was accepted; it will be announced again."""
        self._broken = False
        self._accepted.clear()
        self._say("switched")
