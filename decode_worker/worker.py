"""A decode worker's engine thread: commands and transfer events in, steps of the batch, effects carried out.

Each turn: what is late fails, the scheduler says who runs and who is preempted for it, the line is admitted to what is
left, one step runs, its tokens are booked. What arrives while a step runs is booked before the step's results.
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
from ..engine.speculation import Speculator
from ..engine.step import SequenceStep
from ..kv_transfer.ends import IssueTicket, News, news_of
from ..kv_transfer.events import Abandoned, FirstTokensArrived, RankComplete, ReceiveFailed, SendFailed, Sent
from ..kv_transfer.receiver import Receiver
from ..kv_transfer.sender import Sender
from ..kv_transfer.ticket import Ticket
from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, InternalError, from_wire
from ..proto.failpoints import reach
from ..proto.leg import LegKey, key_of, parse_leg, ref_of
from ..proto.step_time import StepTimeFit, decode_features, prefill_features
from ..proto.worker_loop import Commands, Events, SessionEnded, drain_into, seconds_until
from .effects import CancelSend, Copy, Effect, Expect, Forget, Send, Tell, failed
from .legs import Ahead, DecodeLegs

log = logging.getLogger(__name__)


class DecodeEngine:
    """The `Engine` of a decode worker: rank 0. `channel` leads to the other ranks; None: there are none."""

    def __init__(
        self,
        runner: Runner,
        sender: Sender,
        receiver: Receiver,
        channel: LeaderChannel | None,
        issue: IssueTicket,
        legs: DecodeLegs,
        inbox: queue.SimpleQueue[object],
        speculator: Speculator | None = None,
    ) -> None:
        self._runner = runner
        self._sender = sender
        self._receiver = receiver
        self._channel = channel
        self._issue = issue
        self._legs = legs
        self._inbox = inbox
        self._speculator = speculator
        self._ahead: Ahead | None = None
        self._decode = runner.decode  # what is to be proposed next depends on what is said now
        if speculator is not None:
            self._ahead = speculator.lengths
        elif runner.ahead:
            self._ahead = lambda names: dict.fromkeys(names, runner.ahead)
            self._decode = runner.decode_ahead
        self._feed = PrefixFeed(legs.pool)
        self._fit, self._prompt_fit = StepTimeFit(), StepTimeFit()
        self._events: Events = {}
        self._steps: list[SequenceStep] = []  # of the batch, scheduled
        self._chunks: list[SequenceStep] = []  # of prompts, to run beside them

    def handle(self, item: object) -> None:
        """Commands, ended sessions, and reports of the transfer on any rank."""
        now = time.monotonic()
        match item:
            case Commands(session, commands):
                for command in commands:
                    self._perform(self._command(session, command, now))
            case SessionEnded(session):
                self._feed.forget(session)
                self._perform(self._legs.session_ended(session))
            case RankMessage(rank, message) if (news := news_of(rank, message)) is not None:
                self._transfer(rank, news, now)
            case RankComplete() | FirstTokensArrived() | ReceiveFailed() | Abandoned() | Sent() | SendFailed():
                self._transfer(0, item, now)
            case _:
                log.warning("not understood: %r", item)

    def schedule(self) -> bool:
        """What is late fails, the batch gets the blocks that it needs, and the line what is left."""
        now = time.monotonic()
        self._perform(self._legs.expire(now))
        self._steps, told = self._legs.plan(self._ahead)
        self._perform(told)
        self._perform(self._legs.admit(now))
        self._chunks = self._legs.plan_prompts()
        return bool(self._steps or self._chunks)

    def run(self) -> None:
        """One token for each sequence of the batch, or more where proposals stand; and chunks of prompts."""
        reach("decode.step")
        began = time.monotonic()
        if self._speculator is not None:
            self._steps = self._speculator.extend(self._steps)
        steps, chunks = self._steps, self._chunks
        rows = self._runner.prefill([*steps, *chunks], None) if chunks else self._decode(steps)
        ended_at = time.monotonic()
        self._learn(ended_at - began)
        drawn, first = rows[: len(steps)], rows[len(steps) :]
        if self._speculator is not None:
            self._speculator.observe(steps, drawn)
        reach("decode.step_done")
        drain_into(self._inbox, self)
        self._perform(self._legs.computed(steps, drawn, ended_at))
        self._perform(self._legs.prompts_computed(chunks, first, ended_at))

    def wake_in(self) -> float | None:
        """Until the next deadline of a reservation, or of blocks that are held."""
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
        if self._speculator is not None:
            load.spec_drafts = self._speculator.drafts
            load.spec_draft_tokens = self._speculator.draft_tokens
            load.spec_accepted_tokens = self._speculator.accepted_tokens
        if (law := self._fit.law) is not None:
            load.step_time.CopyFrom(pb.StepTime(a=law.a, b=law.b, c=law.c))
        if (law := self._prompt_fit.law) is not None:
            load.prefill_time.CopyFrom(pb.StepTime(a=law.a, b=law.b, c=law.c))
        return load

    def _learn(self, seconds: float) -> None:
        """How long the step took: what chunks added is what the law of steps without them does not explain."""
        batch = decode_features([step.end for step in self._steps])
        if not self._chunks:
            self._fit.observe(batch, seconds)
            return
        if self._steps:
            if (law := self._fit.law) is None:
                return
            seconds -= law.seconds(batch)
        _, tokens, squares = prefill_features([(step.start, step.end) for step in self._chunks])
        self._prompt_fit.observe((0.0, tokens, squares), seconds)

    def fail_all(self, error: BatonError) -> None:
        """Only the routers are told: the ranks may be out of reach."""
        for effect in self._legs.fail_all(error):
            if isinstance(effect, Tell):
                self._events.setdefault(effect.session, []).append(effect.event)

    def _command(self, session: int, command: pb.RouterCommand, now: float) -> list[Effect]:
        match command.WhichOneof("command"):
            case "reserve":
                return self._submit(session, command.reserve.leg, command.reserve.compute, now)
            case "hold":
                return self._legs.hold(key_of(command.hold.leg), command.hold.choice)
            case "handover":
                return self._hand_over(session, command.handover)
            case "release":
                return self._legs.release(key_of(command.release.leg))
            case "give":
                return self._give(command.give)
            case "cancel" if command.cancel.choices:
                return self._legs.end_choices(key_of(command.cancel.leg), command.cancel.choices)
            case "cancel":
                return self._legs.cancel(key_of(command.cancel.leg))
            case "withdraw":
                gone = command.withdraw
                return self._legs.withdrawn(key_of(gone.leg), from_wire(gone.code, gone.message))
            case "watch_prefixes":
                self._feed.watch(session)
                return []
            case other:
                log.warning("a decode worker takes no %s", other)
                return []

    def _submit(self, session: int, message: pb.Leg, compute: bool, now: float) -> list[Effect]:
        try:
            leg = parse_leg(message, self._runner.vocab_size, self._runner.max_model_len, now)
            self._runner.guide.expect(leg.sampling.grammar)
            return self._legs.submit(session, leg, now, compute)
        except BatonError as error:
            return [Tell(session, failed(key_of(message), error))]
        except Exception as error:
            log.exception("a reservation could not be taken in")
            return [Tell(session, failed(key_of(message), InternalError(str(error))))]

    def _hand_over(self, session: int, message: pb.Handover) -> list[Effect]:
        try:
            leg = parse_leg(message.leg, self._runner.vocab_size, self._runner.max_model_len, time.monotonic())
        except BatonError as error:
            return [Tell(session, failed(key_of(message.leg), error))]
        return self._legs.hand_over(session, leg, message.ticket, key_of(message.held))

    def _give(self, message: pb.Give) -> list[Effect]:
        try:
            wanted = Ticket.unpack(message.ticket).prompt_tokens
        except BatonError as error:
            log.warning("the prefix of %s is not given: %s", key_of(message.leg), error)
            return []
        return self._legs.give(key_of(message.leg), message.ticket, wanted)

    def _transfer(self, rank: int, news: News, now: float) -> None:
        """What either end of the transfer reports on a rank."""
        match news:
            case RankComplete(key, _, size, frames):
                self._arrived(key, rank, size, frames, now)
            case FirstTokensArrived(key, payload):
                self._perform(self._legs.first_tokens(key, payload, now))
            case ReceiveFailed(key, _, error):
                self._perform(self._legs.receive_failed(key, error))
            case Abandoned(key):
                self._perform(self._legs.abandoned(key))
            case Sent():
                self._perform(self._legs.sent(rank, news))
            case SendFailed(key, error):
                log.info("%s does not reach its target: %s", key, error)
                self._perform(self._legs.send_failed(key, error))

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
                    if event.HasField("committed"):
                        reach("decode.committed")
                case Expect():
                    self._expect(effect)
                case Forget(key):
                    self._broadcast({"kind": "forget", "leg": key})
                    self._receiver.forget(key)
                case Copy(pairs):
                    self._broadcast({"kind": "copy", "pairs": pairs})
                    self._runner.kv.copy_blocks(pairs)
                case Send():
                    fields = {"ticket": effect.ticket, "blocks": effect.blocks, "tokens": effect.tokens}
                    self._broadcast({"kind": "send", "leg": effect.leg, **fields})
                    send_all(self._sender, self._runner.layout.layers, effect)
                case CancelSend(key):
                    self._broadcast({"kind": "cancel_send", "leg": key})
                    self._sender.cancel(key)

    def _expect(self, order: Expect) -> None:
        ticket = self._issue(order.leg, order.cached, order.tokens)
        fields = {"nonce": ticket.nonce, "blocks": order.blocks, "cached": order.cached, "tokens": order.tokens}
        try:
            self._receiver.expect(order.leg, ticket.nonce, order.blocks, (order.cached, order.tokens))
            reach("decode.reserved")
        except (ValueError, BatonError) as error:  # a key that was used before
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


def send_all(sender: Sender, layers: int, order: Send) -> None:
    """On each rank: send what is in the pool. Only rank 0 says the first tokens."""
    sender.open(order.leg, order.ticket, order.blocks, order.tokens)
    sender.computed(order.leg, (0, order.tokens), (0, layers))
    sender.finish(order.leg, order.first_tokens)
