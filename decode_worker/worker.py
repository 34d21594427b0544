"""A decode worker's engine thread: commands and transfer events in, steps of the batch, effects carried out.

Each turn: what is late fails, the scheduler says who runs and who is preempted for it, the line is admitted to what is
left, one step runs, its tokens are booked. What arrives while a step runs is booked before the step's results.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence

from ..engine.channel import LeaderChannel
from ..engine.rank_start import RankMessage
from ..engine.runner import Runner
from ..engine.step import SequenceStep
from ..kv_transfer.events import Abandoned, FirstTokensArrived, RankComplete, ReceiveFailed
from ..kv_transfer.receiver import Receiver
from ..kv_transfer.ticket import Ticket
from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, InternalError, from_wire
from ..proto.failpoints import reach
from ..proto.leg import LegKey, key_of, parse_leg, ref_of
from ..proto.worker_loop import Commands, Events, SessionEnded, drain_into, seconds_until
from .effects import Copy, Effect, Expect, Forget, Tell, failed
from .legs import DecodeLegs

log = logging.getLogger(__name__)

IssueTicket = Callable[[LegKey, int, int], Ticket]  # leg, cached tokens, tokens


class DecodeEngine:
    """The `Engine` of a decode worker: rank 0. `channel` leads to the other ranks; None: there are none."""

    def __init__(
        self,
        runner: Runner,
        receiver: Receiver,
        channel: LeaderChannel | None,
        issue: IssueTicket,
        legs: DecodeLegs,
        inbox: queue.SimpleQueue[object],
    ) -> None:
        self._runner = runner
        self._receiver = receiver
        self._channel = channel
        self._issue = issue
        self._legs = legs
        self._inbox = inbox
        self._events: Events = {}
        self._steps: list[SequenceStep] = []  # scheduled

    def handle(self, item: object) -> None:
        """Commands, ended sessions, and reports of the transfer on any rank."""
        now = time.monotonic()
        match item:
            case Commands(session, commands):
                for command in commands:
                    self._perform(self._command(session, command, now))
            case SessionEnded(session):
                self._perform(self._legs.session_ended(session))
            case RankComplete(key, rank, size, frames):
                self._arrived(key, rank, size, frames, now)
            case FirstTokensArrived(key, payload):
                self._perform(self._legs.first_tokens(key, payload, now))
            case ReceiveFailed(key, _, error):
                self._perform(self._legs.receive_failed(key, error))
            case Abandoned(key):
                self._perform(self._legs.abandoned(key))
            case RankMessage(rank, {"kind": "complete", "leg": (request, attempt, choice), **fields}):
                self._arrived((request, attempt, choice), rank, fields["bytes"], fields["frames"], now)
            case RankMessage(_, {"kind": "receive_failed", "leg": (request, attempt, choice), **fields}):
                error = from_wire(fields["code"], fields["message"])
                self._perform(self._legs.receive_failed((request, attempt, choice), error))
            case RankMessage(_, {"kind": "abandoned", "leg": (request, attempt, choice)}):
                self._perform(self._legs.abandoned((request, attempt, choice)))
            case _:
                log.warning("not understood: %r", item)

    def schedule(self) -> bool:
        """What is late fails, the batch gets the blocks that it needs, and the line what is left."""
        now = time.monotonic()
        self._perform(self._legs.expire(now))
        self._steps, told = self._legs.plan()
        self._perform(told)
        self._perform(self._legs.admit(now))
        return bool(self._steps)

    def run(self) -> None:
        """One token for each sequence of the batch."""
        reach("decode.step")
        drawn = self._runner.decode(self._steps)
        drain_into(self._inbox, self)
        self._perform(self._legs.computed(self._steps, drawn))

    def wake_in(self) -> float | None:
        """Until the next deadline of a reservation."""
        return seconds_until(self._legs.intake.next_deadline())

    def take_events(self) -> Events:
        """Events since the last call, by session."""
        events, self._events = self._events, {}
        return events

    def load(self) -> pb.Load:
        """The worker in numbers."""
        return self._legs.load()

    def fail_all(self, error: BatonError) -> None:
        """Only the routers are told: the ranks may be out of reach."""
        for effect in self._legs.fail_all(error):
            if isinstance(effect, Tell):
                self._events.setdefault(effect.session, []).append(effect.event)

    def _command(self, session: int, command: pb.RouterCommand, now: float) -> list[Effect]:
        match command.WhichOneof("command"):
            case "reserve":
                return self._submit(session, command.reserve.leg, now)
            case "cancel" if command.cancel.choices:
                return self._legs.end_choices(key_of(command.cancel.leg), command.cancel.choices)
            case "cancel":
                return self._legs.cancel(key_of(command.cancel.leg))
            case other:
                log.warning("a decode worker takes no %s", other)
                return []

    def _submit(self, session: int, message: pb.Leg, now: float) -> list[Effect]:
        try:
            leg = parse_leg(message, self._runner.vocab_size, self._runner.max_model_len, now)
            return self._legs.submit(session, leg, now)
        except BatonError as error:
            return [Tell(session, failed(key_of(message), error))]
        except Exception as error:
            log.exception("a reservation could not be taken in")
            return [Tell(session, failed(key_of(message), InternalError(str(error))))]

    def _arrived(self, key: LegKey, rank: int, size: int, frames: int, now: float) -> None:
        if self._pass_gate(key):
            self._perform(self._legs.arrived(key, rank, size, frames, now))

    def _pass_gate(self, key: LegKey) -> bool:
        """Tests hold or break the worker here; an error is that of the leg."""
        try:
            reach("decode.admit")
        except BatonError as error:
            self._perform(self._legs.receive_failed(key, error))
            return False
        return True

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Tell(session, event):
                    self._events.setdefault(session, []).append(event)
                case Expect():
                    self._expect(effect)
                case Forget(key):
                    self._broadcast({"kind": "forget", "leg": key})
                    self._receiver.forget(key)
                case Copy(pairs):
                    self._broadcast({"kind": "copy", "pairs": pairs})
                    self._runner.kv.copy_blocks(pairs)

    def _expect(self, order: Expect) -> None:
        ticket = self._issue(order.leg, order.cached, order.tokens)
        fields = {"nonce": ticket.nonce, "blocks": order.blocks, "cached": order.cached, "tokens": order.tokens}
        try:
            self._receiver.expect(order.leg, ticket.nonce, order.blocks, (order.cached, order.tokens))
        except ValueError as error:  # a key that was used before
            self._perform(self._legs.fail(order.leg, InternalError(str(error))))
            return
        self._broadcast({"kind": "expect", "leg": order.leg, **fields})
        event = pb.Ticket(
            leg=ref_of(order.leg), ticket=ticket.pack(), cached_tokens=order.cached, waited_s=order.waited_s
        )
        self._events.setdefault(order.session, []).append(pb.WorkerEvent(ticket=event))

    def _broadcast(self, message: dict[str, object]) -> None:
        if self._channel is not None:
            self._channel.broadcast(message)
