"""All legs of a decode worker and who holds which blocks: a sans-I/O book, events in, effects out.

It joins the intake (reservations) to the scheduler (the batch) over one block pool:

    waiting --blocks--> reserved --all KV + first tokens--> a sequence per choice in the batch --finished--> gone
    (whose KV comes from a prefill worker, or is computed here: prompts.py)

                                              a sequence --Hold, at the step boundary--> held --> see outgoing.py

A leg that is gone holds nothing, and whatever still arrives for it changes nothing. Each choice of a leg ends once:
finished, preempted, held, or with its leg (failed, cancelled, session ended).

While a leg is reserved, its prefill worker may be given the cached blocks that it lacks; a leg that then receives and
sends is freed, or joins the batch, only after both have been ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ..engine.block_pool import BlockPool
from ..engine.step import Draw, SampledToken, SequenceStep
from ..kv_transfer.events import Sent
from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, TransferFailed
from ..proto.leg import Leg, LegKey, ref_of
from . import scheduler as batch
from .effects import CancelSend, Copy, Effect, Expect, Forget, Send, Tell, failed, token_message
from .intake import Intake, Reservation, refuse_what_never_fits
from .outgoing import Outgoing
from .prompts import Prompts
from .scheduler import DecodeScheduler, SequenceId

# For how many tokens of each sequence there should be room, beyond the one that its step draws in any case.
Ahead = Callable[[Sequence[SequenceId]], Mapping[SequenceId, int]]


@dataclass(slots=True)
class _Running:
    """One choice in the batch."""

    leg: Leg
    session: int
    choice: int
    generated: list[int]  # all output of the choice, over all its legs
    table: list[int]


class DecodeLegs:
    """Times are the caller's monotonic clock. Every method that can change something returns the effects of it."""

    def __init__(
        self,
        pool: BlockPool,
        intake: Intake,
        scheduler: DecodeScheduler,
        prompts: Prompts,
        max_sequences: int,
        max_model_len: int,
    ) -> None:
        self.pool = pool
        self.intake = intake
        self.scheduler = scheduler
        self.prompts = prompts
        self.outgoing = Outgoing(pool, intake.ranks, intake.commit_timeout_s)
        self.steps = 0
        self.preemptions = 0
        self._max_sequences = max_sequences
        self._max_model_len = max_model_len
        self._running: dict[SequenceId, _Running] = {}
        self._leaving: dict[SequenceId, None] = {}  # to be held at the next step boundary, in this order
        self._stalled = False  # a sequence waits for a block
        self._told: list[Effect] = []  # of the plan in the making

    def __repr__(self) -> str:
        running = [f"{key} {choice}" for key, choice in self._running]
        return f"DecodeLegs({self.intake!r}, running={running}, {self.outgoing!r})"

    def load(self) -> pb.Load:
        """The worker in numbers."""
        return pb.Load(
            running=len(self._running),
            waiting=len(self.intake.waiting),
            waiting_tokens=self.prompts.tokens_left,
            used_blocks=self.pool.used,
            cached_blocks=self.pool.cached,
            total_blocks=self.pool.total,
            steps=self.steps,
            preemptions=self.preemptions,
            prefix_hit_tokens=self.pool.prefix_hit_tokens,
            prefix_query_tokens=self.pool.prefix_query_tokens,
            computed_prompt_tokens=self.prompts.computed_tokens,
            held_legs=len(self.intake.reserved) + len(self.outgoing),
        )

    # ---- from routers ----------------------------------------------------------------------------------------------

    def submit(self, session: int, leg: Leg, now: float, compute: bool = False) -> list[Effect]:
        """A reservation; compute: its prompt is computed here. Raises InvalidRequest when it could never run here. A
        known key is ignored."""
        refuse_what_never_fits(leg, self.pool, self._max_sequences, self._max_model_len)
        if not self._sequences(leg.key):
            self.intake.submit(session, leg, now, compute)
        return []

    def cancel(self, key: LegKey) -> list[Effect]:
        """Forget the leg whatever its phase."""
        self.intake.waiting.pop(key, None)
        for name in self._sequences(key):
            self._leave(name)
        effects = self.outgoing.cancel(key)
        reservation = self.intake.take(key)
        if reservation is None:
            return effects
        self.prompts.forget(key)
        self.pool.release(reservation.blocks)
        return [*effects, *_stop_receiving(reservation), *_stop_giving(reservation)]

    def end_choices(self, key: LegKey, choices: Collection[int]) -> list[Effect]:
        """These choices leave the batch, or wherever they are held, and give back their blocks; the leg is over with
        its last one."""
        for name in self._sequences(key):
            if name[1] in choices:
                self._leave(name)
        return self.outgoing.cancel(key, choices) if choices else []

    def hold(self, key: LegKey, choice: int) -> list[Effect]:
        """At the next step boundary the choice leaves the batch and keeps its blocks; one that has ended does not."""
        self._leaving[key, choice] = None
        return []

    def hand_over(self, session: int, leg: Leg, ticket: bytes, held: LegKey) -> list[Effect]:
        """A choice that is held goes on as `leg` at another decode worker."""
        return self.outgoing.hand_over(session, leg, ticket, held)

    def release(self, key: LegKey) -> list[Effect]:
        """The router needs the blocks of a choice that was handed over no more."""
        return self.outgoing.release(key)

    def give(self, key: LegKey, ticket: bytes, stop: int) -> list[Effect]:
        """Send the first `stop` tokens of a reservation to its prefill worker, if they are here; once."""
        reservation = self.intake.reserved.get(key)
        if reservation is None or reservation.giving or stop > reservation.cached:
            return []
        reservation.giving = True
        return [Send(key, ticket, tuple(reservation.blocks[: reservation.need.table]), stop, b"")]

    def session_ended(self, session: int) -> list[Effect]:
        """Drop every leg of a router that is gone."""
        return [effect for key, owner in self._owners().items() if owner == session for effect in self.cancel(key)]

    def fail(self, key: LegKey, error: BatonError) -> list[Effect]:
        """End the leg, and tell its router why."""
        session = self._owners().get(key)
        return [*self.cancel(key), Tell(session, failed(key, error))] if session is not None else []

    def fail_all(self, error: BatonError) -> list[Effect]:
        """Every leg fails."""
        return [effect for key in self._owners() for effect in self.fail(key, error)]

    # ---- from the transfer -----------------------------------------------------------------------------------------

    def arrived(self, key: LegKey, rank: int, size: int, frames: int, now: float) -> list[Effect]:
        """A rank holds all KV of a leg: `size` bytes came in `frames` frames."""
        return self._commit(self.intake.arrived(key, rank, size, frames, now), now)

    def first_tokens(self, key: LegKey, payload: bytes, now: float) -> list[Effect]:
        """What prefill sampled; anything else fails the leg."""
        try:
            first = pb.FirstTokens.FromString(payload)
        except DecodeError as error:
            return self.receive_failed(key, TransferFailed(f"first tokens: {error}"))
        reservation = self.intake.reserved.get(key)
        if reservation is None:
            return []
        if sorted(token.choice for token in first.tokens) != sorted(reservation.leg.choices):
            return self.receive_failed(key, TransferFailed("the first tokens are not those of the leg's choices"))
        return self._commit(self.intake.first_tokens(key, first, now), now)

    def receive_failed(self, key: LegKey, error: BatonError) -> list[Effect]:
        """The KV of a reservation will not come."""
        return self.fail(key, error) if key in self.intake.reserved else []

    def withdrawn(self, key: LegKey, error: BatonError) -> list[Effect]:
        """The router heard that the KV does not come: too late for a leg that has all of it."""
        waiting = key in self.intake.waiting or key in self.intake.reserved
        return self.fail(key, error) if waiting else []

    def abandoned(self, key: LegKey) -> list[Effect]:
        """The first tokens ended every choice: prefill needs us no more, and has told the router."""
        return self.cancel(key) if key in self.intake.reserved else []

    def sent(self, rank: int, report: Sent) -> list[Effect]:
        """One rank's part of what goes out was acknowledged."""
        return self.outgoing.sent(rank, report)

    def send_failed(self, key: LegKey, error: BatonError) -> list[Effect]:
        """What goes out does not reach its target; a prefill worker that wanted it computes."""
        return self.outgoing.send_failed(key, error)

    # ---- clock and admission ---------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Effect]:
        """Fail reservations whose time is up, and free what was held for nobody."""
        late = [effect for key, error in self.intake.overdue(now) for effect in self.fail(key, error)]
        return late + self.outgoing.expire(now)

    def next_deadline(self) -> float | None:
        """When `expire` will have something to do."""
        moments = (self.intake.next_deadline(), self.outgoing.next_deadline())
        return min((moment for moment in moments if moment is not None), default=None)

    def admit(self, now: float) -> list[Effect]:
        """Give blocks to the line, after `plan` has served the batch; to nobody while a sequence stalls."""
        effects: list[Effect] = []
        while not self._stalled:
            reservation = self.intake.admit(len(self._running), now)
            if reservation is None:
                break
            if reservation.compute:
                self.prompts.begin(reservation)
                continue
            leg, table = reservation.leg, tuple(reservation.blocks[: reservation.need.table])
            effects.append(
                Expect(reservation.session, leg.key, table, reservation.cached, leg.length, reservation.waited_s)
            )
        return effects

    # ---- the step --------------------------------------------------------------------------------------------------

    def plan(self, ahead: Ahead | None = None) -> tuple[list[SequenceStep], list[Effect]]:
        """What the engine runs next, and who was taken out of the batch before or preempted for it.

        The steps have no proposals yet; their blocks have room for as many as `ahead` says, where blocks are to spare.
        """
        held = [effect for name in self._leaving for effect in self._park(name)]
        self._leaving.clear()
        plan = self.scheduler.plan(self)
        self._stalled = bool(plan.stalled)
        if ahead is not None:
            self.scheduler.look_ahead(self, ahead(plan.run))
        told, self._told = held + self._told, []
        return [self._step_for(self._running[name]) for name in plan.run], told

    def computed(
        self, steps: Sequence[SequenceStep], drawn: Sequence[Sequence[SampledToken]], now: float
    ) -> list[Effect]:
        """A planned step ran; `drawn` has one row for each, of one token or, where proposals stood, more, or none where
        the step is only queued. What follows the end of a sequence is dropped, and sequences that are gone are skipped.
        """
        self.steps += 1
        said: dict[int, pb.Tokens] = {}
        effects: list[Effect] = []
        for step, row in zip(steps, drawn, strict=True):
            if not row:
                continue  # planned again, as it is
            name = ((step.request_id, step.attempt, step.first_choice), row[0].choice)
            running = self._running.get(name)
            if running is None:
                continue
            if row[0].error is not None:
                effects += self.fail(name[0], row[0].error)
                continue
            told = said.setdefault(running.session, pb.Tokens(at=now)).tokens
            for sampled in row:
                self.scheduler.advance([name], 1)
                token = token_message(running.leg, sampled, len(running.generated))
                running.generated.append(sampled.token_id)
                told.append(_step_token(running.leg, token))
                if token.finish_reason:
                    self._leave(name)
                    break
        return [Tell(session, pb.WorkerEvent(tokens=tokens)) for session, tokens in said.items()] + effects

    def plan_prompts(self) -> list[SequenceStep]:
        """After `admit`: the chunks of prompts that run beside the batch in the same step."""
        return self.prompts.plan(self.intake.reserved)

    def prompts_computed(
        self, steps: Sequence[SequenceStep], drawn: Sequence[Sequence[SampledToken]], now: float
    ) -> list[Effect]:
        """These chunks ran; `drawn` has a row for each that draws. A whole prompt's choices join the batch."""
        effects: list[Effect] = []
        for reservation, news in self.prompts.computed(self.intake.reserved, steps, drawn, now):
            key = reservation.leg.key
            if isinstance(news, BatonError):
                effects += self.fail(key, news)
                continue
            effects.append(Tell(reservation.session, news))
            if not news.HasField("first"):
                continue
            first = news.first
            if all(token.finish_reason for token in first.tokens):
                effects += self.cancel(key)
                continue
            for rank in range(self.intake.ranks):
                self.intake.arrived(key, rank, 0, 0, now)
            effects += self._commit(self.intake.first_tokens(key, first, now), now)
        return effects

    # ---- Blocks, for the scheduler ---------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Blocks that can be given away now."""
        return self.pool.free

    def grow(self, sequence: SequenceId) -> None:
        """One more block for this sequence."""
        self._running[sequence].table += self.pool.allocate(1)

    def preempt(self, sequence: SequenceId) -> None:
        """Take back the blocks of a sequence; its router places it again."""
        running = self._running.pop(sequence)
        self._give_back(running, len(running.leg.prompt) + len(running.generated) - 1)
        self.preemptions += 1
        event = pb.Preempted(leg=ref_of(running.leg.key), choice=running.choice)
        self._told.append(Tell(running.session, pb.WorkerEvent(preempted=event)))

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _sequences(self, key: LegKey) -> list[SequenceId]:
        return [name for name in self._running if name[0] == key]

    def _owners(self) -> dict[LegKey, int]:
        return {
            **{key: waiting.session for key, waiting in self.intake.waiting.items()},
            **{key: reservation.session for key, reservation in self.intake.reserved.items()},
            **{name[0]: running.session for name, running in self._running.items()},
            **self.outgoing.owners(),
        }

    def _park(self, name: SequenceId) -> list[Effect]:
        running = self._running.pop(name, None)
        if running is None:
            return []
        self.scheduler.leave(name)
        return self.outgoing.park(running.leg, running.session, running.choice, running.generated, running.table)

    def _leave(self, name: SequenceId) -> None:
        running = self._running.pop(name)
        self._give_back(running, self.scheduler.tokens(name))
        self.scheduler.leave(name)

    def _give_back(self, running: _Running, tokens: int) -> None:
        """Free the blocks; what they hold can be found again until they are given away."""
        written = (running.leg.prompt + running.generated)[:tokens]
        self.pool.publish(running.table, written, running.leg.salt)
        self.pool.release(running.table)

    def _step_for(self, running: _Running) -> SequenceStep:
        leg, generated = running.leg, running.generated
        return SequenceStep(
            *leg.key,
            tokens=[generated[-1]],
            start=len(leg.prompt) + len(generated) - 1,
            blocks=running.table,
            draw=Draw(leg.sampling, (running.choice,), leg.prompt, generated),
        )

    def _commit(self, reservation: Reservation | None, now: float) -> list[Effect]:
        """All KV and the first tokens are here: the leg's choices join the batch, each with its own table."""
        if reservation is None or reservation.first is None:
            return []
        leg, first = reservation.leg, reservation.first
        self.intake.take(leg.key)
        self.pool.publish(reservation.blocks, leg.tokens, leg.salt)
        committed = pb.Committed(
            leg=ref_of(leg.key),
            bytes=reservation.bytes,
            frames=reservation.frames,
            reserved_s=now - reservation.since,
            at=now,
        )
        repeated = pb.Tokens(tokens=[_step_token(leg, token) for token in first.tokens])
        return [
            *_stop_receiving(reservation),
            *_stop_giving(reservation),  # who has the whole prompt needs no part of it
            *self._fork(reservation, [token for token in first.tokens if not token.finish_reason]),
            Tell(reservation.session, pb.WorkerEvent(committed=committed)),
            Tell(reservation.session, pb.WorkerEvent(tokens=repeated)),
        ]

    def _fork(self, reservation: Reservation, going_on: Sequence[pb.Token]) -> list[Effect]:
        """Copy on write: full blocks are shared, each choice but one gets a copy of the last, partly filled one."""
        leg, need, blocks = reservation.leg, reservation.need, reservation.blocks
        own = need.table - need.shared
        pairs: list[tuple[int, int]] = []
        for number, token in enumerate(going_on):
            private = blocks[need.shared + number * own : need.shared + (number + 1) * own]
            if number:
                self.pool.pin(blocks[: need.shared])
                if leg.length % self.pool.block_size:
                    pairs.append((blocks[need.shared], private[0]))
            table = blocks[: need.shared] + private
            name = (leg.key, token.choice)
            self._running[name] = _Running(
                leg, reservation.session, token.choice, [*leg.generated, token.token_id], table
            )
            self.scheduler.join(batch.Sequence(name, leg.length, len(table), leg.last, bool(leg.generated)))
        self.pool.release(blocks[need.shared + len(going_on) * own :])
        if not going_on:
            self.pool.release(blocks[: need.shared])
        return [Copy(tuple(pairs))] if pairs else []


def _stop_receiving(reservation: Reservation) -> list[Effect]:
    return [] if reservation.compute else [Forget(reservation.leg.key)]


def _stop_giving(reservation: Reservation) -> list[Effect]:
    return [CancelSend(reservation.leg.key)] if reservation.giving else []


def _step_token(leg: Leg, token: pb.Token) -> pb.StepToken:
    return pb.StepToken(request_id=leg.key[0], attempt=leg.key[1], token=token)
