"""A prefill worker's engine thread: commands and transfer events in, steps of the model, effects carried out.

Each turn: what is late fails, queued prompts get blocks, one step runs, its results are booked. A command that arrives
while a step runs is booked before the step's results, so a cancel drops the result of the chunk in flight.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence

from ..engine.channel import LeaderChannel
from ..engine.prefix_feed import PrefixFeed
from ..engine.rank_start import RankMessage
from ..engine.runner import Runner
from ..engine.step import SequenceStep
from ..kv_transfer.ends import IssueTicket, News, news_of
from ..kv_transfer.events import Abandoned, RankComplete, ReceiveFailed, SendFailed, Sent
from ..kv_transfer.receiver import Receiver
from ..kv_transfer.sender import Sender
from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, InternalError
from ..proto.failpoints import reach
from ..proto.leg import LegKey, key_of, parse_leg, ref_of
from ..proto.step_time import StepTimeFit, prefill_features
from ..proto.worker_loop import Commands, Events, SessionEnded, drain_into, let_others_run, seconds_until
from .effects import (
    AbandonTransfer,
    CancelTransfer,
    Effect,
    ExpectPrefix,
    FinishTransfer,
    ForgetPrefix,
    OpenTransfer,
    Tell,
    failed,
)
from .legs import PrefillLegs

log = logging.getLogger(__name__)


class PrefillEngine:
    """The `Engine` of a prefill worker: rank 0. `channel` leads to the other ranks; None: there are none."""

    def __init__(
        self,
        runner: Runner,
        sender: Sender,
        receiver: Receiver,
        channel: LeaderChannel | None,
        issue: IssueTicket,
        legs: PrefillLegs,
        inbox: queue.SimpleQueue[object],
    ) -> None:
        self._runner = runner
        self._sender = sender
        self._receiver = receiver
        self._channel = channel
        self._issue = issue
        self._legs = legs
        self._inbox = inbox
        self._feed = PrefixFeed(legs.pool)
        self._fit = StepTimeFit()
        self._events: Events = {}
        self._steps: list[SequenceStep] = []  # scheduled

    def handle(self, item: object) -> None:
        """Commands, ended sessions, and reports of the transfer on any rank."""
        match item:
            case Commands(session, commands):
                for command in commands:
                    self._perform(self._command(session, command))
            case SessionEnded(session):
                self._feed.forget(session)
                self._perform(self._legs.session_ended(session))
            case RankMessage(rank, message) if (news := news_of(rank, message)) is not None:
                self._transfer(rank, news)
            case Sent() | SendFailed() | RankComplete() | ReceiveFailed() | Abandoned():
                self._transfer(0, item)
            case _:
                log.warning("not understood: %r", item)

    def schedule(self) -> bool:
        """What is late fails, queued prompts get blocks, and the next chunks are chosen."""
        now = time.monotonic()
        self._perform(self._legs.expire(now))
        self._perform(self._legs.admit(now))
        self._steps = self._legs.plan()
        return bool(self._steps)

    def run(self) -> None:
        """Compute the chunks; each group of layers is pushed on as soon as it is computed."""
        steps = self._steps
        if not self._pass_gate("prefill.chunk", steps):
            return
        began = time.monotonic()
        drawn = self._runner.prefill(steps, lambda low, high: push_layers(self._sender, steps, low, high))
        ended_at = time.monotonic()
        self._pass_gate("prefill.chunk_done", steps)
        if ended := [step for step in steps if step.draw is not None]:
            self._pass_gate("prefill.after_prefill", ended)
        drain_into(self._inbox, self)
        self._perform(self._legs.computed(steps, drawn, ended_at))  # decode waits for it: first of all
        self._fit.observe(prefill_features([(step.start, step.end) for step in steps]), ended_at - began)

    def wake_in(self) -> float | None:
        """Until the next deadline of a leg that is not computed."""
        return seconds_until(self._legs.next_deadline())

    def take_events(self) -> Events:
        """Events since the last call, by session."""
        for session, event in self._feed.take():
            self._events.setdefault(session, []).append(event)
        events, self._events = self._events, {}
        return events

    def load(self) -> pb.Load:
        """The worker in numbers."""
        load = self._legs.load()
        if (law := self._fit.law) is not None:
            load.step_time.CopyFrom(pb.StepTime(a=law.a, b=law.b, c=law.c))
        return load

    def fail_all(self, error: BatonError) -> None:
        """Only the routers are told: the ranks may be out of reach."""
        for effect in self._legs.fail_all(error):
            if isinstance(effect, Tell):
                self._events.setdefault(effect.session, []).append(effect.event)

    def _command(self, session: int, command: pb.RouterCommand) -> list[Effect]:
        match command.WhichOneof("command"):
            case "prefill":
                return self._submit(session, command.prefill)
            case "handover":
                return self._hand_over(session, command.handover)
            case "cancel":
                return self._legs.cancel(key_of(command.cancel.leg))
            case "release":
                reach("prefill.released")
                return self._legs.release(key_of(command.release.leg))
            case "watch_prefixes":
                self._feed.watch(session)
                return []
            case other:
                log.warning("a prefill worker takes no %s", other)
                return []

    def _submit(self, session: int, message: pb.Prefill) -> list[Effect]:
        try:
            now = time.monotonic()
            leg = parse_leg(message.leg, self._runner.vocab_size, self._runner.max_model_len, now)
            reach("prefill.queued")
            self._runner.guide.expect(leg.sampling.grammar)
            return self._legs.submit(session, leg, message.ticket, now)
        except BatonError as error:
            return [Tell(session, failed(key_of(message.leg), error))]
        except Exception as error:
            log.exception("a prompt could not be taken in")
            return [Tell(session, failed(key_of(message.leg), InternalError(str(error))))]

    def _hand_over(self, session: int, message: pb.Handover) -> list[Effect]:
        try:
            leg = parse_leg(message.leg, self._runner.vocab_size, self._runner.max_model_len, time.monotonic())
        except BatonError as error:
            return [Tell(session, failed(key_of(message.leg), error))]
        return self._legs.handover(session, leg, message.ticket, key_of(message.held))

    def _transfer(self, rank: int, news: News) -> None:
        """What either end of the transfer reports on a rank."""
        match news:
            case Sent():
                if rank == 0:
                    reach("prefill.sent")
                self._perform(self._legs.sent(rank, news))
            case SendFailed(key, error):
                self._perform(self._legs.send_failed(key, error))
            case RankComplete(key):
                self._perform(self._legs.arrived(key, rank))
            case ReceiveFailed(key, _, error):
                self._no_prefix(key, error)
            case Abandoned(key):
                self._no_prefix(key, None)

    def _no_prefix(self, key: LegKey, error: BatonError | None) -> None:
        log.info("the prefix of %s is computed here: %s", key, error or "it is not sent")
        self._perform(self._legs.receive_failed(key))

    def _pass_gate(self, point: str, steps: Sequence[SequenceStep]) -> bool:
        """Tests hold or break the worker here; an error is that of the legs in this step."""
        try:
            reach(point)
        except BatonError as error:
            for step in steps:
                self._perform(self._legs.fail((step.request_id, step.attempt, step.first_choice), error))
            return False
        return True

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Tell(session, event):
                    self._events.setdefault(session, []).append(event)
                case OpenTransfer(key, ticket, blocks, tokens, cached):
                    fields = {"ticket": ticket, "blocks": blocks, "tokens": tokens, "cached": cached}
                    self._broadcast({"kind": "open", "leg": key, **fields})
                    open_transfer(self._sender, self._runner.layout.layers, effect)
                case FinishTransfer(key, first_tokens):
                    self._finish(key, first_tokens)
                case AbandonTransfer(key):
                    self._broadcast({"kind": "abandon", "leg": key})
                    self._sender.abandon(key)
                case CancelTransfer(key):
                    self._broadcast({"kind": "cancel", "leg": key})
                    self._sender.cancel(key)

                case ExpectPrefix():
                    self._expect(effect)
                case ForgetPrefix(key):
                    self._broadcast({"kind": "forget", "leg": key})
                    self._receiver.forget(key)

    def _expect(self, order: ExpectPrefix) -> None:
        ticket = self._issue(order.leg, order.start, order.stop)
        fields = {"nonce": ticket.nonce, "blocks": order.blocks, "start": order.start, "stop": order.stop}
        try:
            expect_prefix(self._receiver, ticket.nonce, order)
        except ValueError as error:  # a key that was used before
            self._no_prefix(order.leg, InternalError(str(error)))
            return
        self._broadcast({"kind": "expect", "leg": order.leg, **fields})
        want = pb.Want(leg=ref_of(order.leg), ticket=ticket.pack(), start=order.start, stop=order.stop)
        self._events.setdefault(order.session, []).append(pb.WorkerEvent(want=want))

    def _finish(self, key: LegKey, first_tokens: bytes) -> None:
        try:
            reach("prefill.done")
        except BatonError as error:
            self._perform(self._legs.fail(key, error))
        else:
            self._sender.finish(key, first_tokens)
            let_others_run()  # the decode worker waits for it

    def _broadcast(self, message: dict[str, object]) -> None:
        if self._channel is not None:
            self._channel.broadcast(message)


def open_transfer(sender: Sender, layers: int, order: OpenTransfer) -> None:
    """On each rank: begin to send, with what is in the pool already."""
    sender.open(order.leg, order.ticket, order.blocks, order.tokens)
    if order.cached:
        sender.computed(order.leg, (0, order.cached), (0, layers))


def push_layers(sender: Sender, steps: Sequence[SequenceStep], low: int, high: int) -> None:
    """On each rank: the KV of layers [low, high) of these chunks is in the pool."""
    for step in steps:
        sender.computed((step.request_id, step.attempt, step.first_choice), (step.start, step.end), (low, high))


def expect_prefix(receiver: Receiver, nonce: bytes, order: ExpectPrefix) -> None:
    """On each rank: place what comes of the prefix. Raises ValueError for a leg that was expected before."""
    receiver.expect(order.leg, nonce, order.blocks, (order.start, order.stop), wants_first_tokens=False)
