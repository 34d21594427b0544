"""All legs of a prefill worker and who holds which blocks: a sans-I/O book, events in, effects out.

| phase | holds | left by |
|---|---|---|
| queued | nothing | blocks are free -> computing; cancel, deadline, session end |
| computing | blocks of the whole prompt; a transfer, if it has a ticket | last chunk -> held or gone; cancel, ... |
| held | the same blocks, until they are sent *and* released | release, cancel, transfer failure, session end |

A leg that is gone holds nothing, and whatever still arrives for it changes nothing. A leg without a ticket, or whose
choices all ended with their first token, is gone as soon as it is computed. Blocks are given in the order of arrival
and all at once, so two prompts can never wait for each other; a prompt larger than the pool is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..engine.block_pool import BlockPool
from ..engine.step import Draw, SampledToken, SequenceStep
from ..kv_transfer.events import Sent
from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, DeadlineExceeded, InvalidRequest
from ..proto.kv_layout import block_count
from ..proto.leg import Leg, LegKey, ref_of
from ..proto.sampling import finish_reason
from .effects import AbandonTransfer, CancelTransfer, Effect, FinishTransfer, OpenTransfer, Tell, failed
from .scheduler import Chunk, PrefillScheduler


class Phase(Enum):
    """Where a leg is; a leg that is gone is in no phase."""

    QUEUED = "queued"
    COMPUTING = "computing"
    HELD = "held"


@dataclass(slots=True)
class _Entry:
    leg: Leg
    session: int
    ticket: bytes
    arrived: float
    phase: Phase = Phase.QUEUED
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    admitted: float = 0.0
    computed_at: float = 0.0
    chunks: int = 0
    sending: bool = False  # the transfer may still read the blocks
    released: bool = False
    reports: dict[int, Sent] = field(default_factory=dict)  # by rank


class PrefillLegs:
    """Times are the caller's monotonic clock. Every method that can change something returns the effects of it."""

    def __init__(self, pool: BlockPool, scheduler: PrefillScheduler, ranks: int) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.computed_tokens = 0
        self.steps = 0
        self._ranks = ranks
        self._legs: dict[LegKey, _Entry] = {}
        self._queue: dict[LegKey, _Entry] = {}  # oldest first
        self._blocked: tuple[LegKey, int] | None = None  # queue head and free blocks when they were too few

    def __repr__(self) -> str:
        return "PrefillLegs(" + ", ".join(f"{key}: {entry.phase.value}" for key, entry in self._legs.items()) + ")"

    def phase(self, key: LegKey) -> Phase | None:
        """None: gone, or never seen."""
        entry = self._legs.get(key)
        return entry.phase if entry else None

    def load(self) -> pb.Load:
        """The worker in numbers."""
        queued = sum(entry.leg.length for entry in self._queue.values())
        return pb.Load(
            running=len(self.scheduler),
            waiting=len(self._queue),
            waiting_tokens=queued + self.scheduler.tokens_left,
            used_blocks=self.pool.used,
            cached_blocks=self.pool.cached,
            total_blocks=self.pool.total,
            steps=self.steps,
            prefix_hit_tokens=self.pool.prefix_hit_tokens,
            prefix_query_tokens=self.pool.prefix_query_tokens,
            computed_prompt_tokens=self.computed_tokens,
            held_legs=sum(entry.phase is Phase.HELD for entry in self._legs.values()),
        )

    # ---- from routers ----------------------------------------------------------------------------------------------

    def submit(self, session: int, leg: Leg, ticket: bytes, now: float) -> list[Effect]:
        """A prompt to compute. Raises InvalidRequest when the pool could never hold it. A known key is ignored."""
        need = block_count(leg.length, self.pool.block_size)
        if need > self.pool.total:
            raise InvalidRequest(
                f"the prompt of {leg.length} tokens needs {need} KV blocks of {self.pool.block_size} tokens; the "
                f"prefill worker has {self.pool.total} ({self.pool.total * self.pool.block_size} tokens)",
                field="prompt",
            )
        if leg.key not in self._legs:
            self._legs[leg.key] = self._queue[leg.key] = _Entry(leg, session, ticket, now)
        return []

    def cancel(self, key: LegKey) -> list[Effect]:
        """Forget the leg whatever its phase."""
        entry = self._legs.get(key)
        return self._drop(entry) if entry else []

    def release(self, key: LegKey) -> list[Effect]:
        """The router needs the blocks no more; what is still being sent ends first."""
        entry = self._legs.get(key)
        if entry is None or entry.phase is not Phase.HELD:
            return []
        entry.released = True
        return [] if entry.sending else self._drop(entry)

    def session_ended(self, session: int) -> list[Effect]:
        """Drop every leg of a router that is gone."""
        mine = [entry for entry in self._legs.values() if entry.session == session]
        return [effect for entry in mine for effect in self._drop(entry)]

    def fail(self, key: LegKey, error: BatonError) -> list[Effect]:
        """End the leg, and tell its router why."""
        entry = self._legs.get(key)
        return [*self._drop(entry), Tell(entry.session, failed(key, error))] if entry else []

    def fail_all(self, error: BatonError) -> list[Effect]:
        """Every leg fails."""
        return [effect for key in list(self._legs) for effect in self.fail(key, error)]

    # ---- from the transfer -----------------------------------------------------------------------------------------

    def sent(self, rank: int, report: Sent) -> list[Effect]:
        """One rank's part of a leg was acknowledged."""
        entry = self._legs.get(report.leg)
        if entry is None or not entry.sending:
            return []
        entry.reports[rank] = report
        if len(entry.reports) < self._ranks:
            return []
        entry.sending = False
        effects: list[Effect] = [Tell(entry.session, _sent_event(entry))]
        return effects + (self._drop(entry) if entry.released else [])

    def send_failed(self, key: LegKey, error: BatonError) -> list[Effect]:
        """A leg cannot reach its decode worker. After the release that is of no interest to the router."""
        entry = self._legs.get(key)
        if entry is None or not entry.sending:
            return []
        return self._drop(entry) if entry.released else self.fail(key, error)

    # ---- the step --------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Effect]:
        """Fail what is past its deadline before it is computed."""
        late = [e for e in self._legs.values() if e.phase is not Phase.HELD and e.leg.deadline <= now]
        error = DeadlineExceeded("the deadline passed before the prompt was computed")
        return [effect for entry in late for effect in self.fail(entry.leg.key, error)]

    def next_deadline(self) -> float | None:
        """When `expire` will have something to do."""
        return min((e.leg.deadline for e in self._legs.values() if e.phase is not Phase.HELD), default=None)

    def admit(self, now: float) -> list[Effect]:
        """Give blocks to queued prompts, in order, as long as there are enough."""
        effects: list[Effect] = []
        while self._queue:
            entry = next(iter(self._queue.values()))
            leg, size = entry.leg, self.pool.block_size
            if self._blocked == (leg.key, self.pool.free):
                break  # nothing has changed since the last look
            shared = self.pool.match(leg.tokens[:-1], leg.salt)  # the last token is computed, for its logits
            rest = block_count(leg.length, size) - len(shared)
            if rest > self.pool.free_after_pin(shared):
                self._blocked = (leg.key, self.pool.free)
                break
            self.pool.pin(shared)
            entry.blocks = shared + self.pool.allocate(rest)
            entry.cached = len(shared) * size
            entry.phase, entry.admitted = Phase.COMPUTING, now
            del self._queue[leg.key]
            self.pool.record_lookup(leg.length, entry.cached)
            self.scheduler.add(leg.key, leg.length, entry.cached)
            if entry.ticket:
                entry.sending = True
                effects.append(OpenTransfer(leg.key, entry.ticket, tuple(entry.blocks), leg.length, entry.cached))
        return effects

    def plan(self) -> list[SequenceStep]:
        """What the engine runs next; a prompt's last chunk draws the first token of all its choices."""
        return [self._step_for(self._legs[chunk.key].leg, chunk) for chunk in self.scheduler.plan()]

    def computed(
        self, steps: Sequence[SequenceStep], drawn: Sequence[Sequence[SampledToken]], now: float
    ) -> list[Effect]:
        """A planned step ran. `drawn`: one entry for each step that draws, in order. Gone legs are skipped."""
        self.steps += 1
        self.computed_tokens += sum(len(step.tokens) for step in steps)
        rows = iter(drawn)
        effects: list[Effect] = []
        for step in steps:
            row = next(rows) if step.draw is not None else None
            key = (step.request_id, step.attempt, step.first_choice)
            self.scheduler.computed([Chunk(key, step.start, step.end)])
            entry = self._legs.get(key)
            if entry is None or entry.phase is not Phase.COMPUTING:
                continue
            entry.chunks += 1
            self.pool.publish(entry.blocks, entry.leg.tokens[: step.end], entry.leg.salt)
            if row is not None:
                effects += self._first_tokens(entry, row, now)
        return effects

    def _step_for(self, leg: Leg, chunk: Chunk) -> SequenceStep:
        last = chunk.stop == leg.length
        return SequenceStep(
            *leg.key,
            tokens=leg.tokens[chunk.start : chunk.stop],
            start=chunk.start,
            blocks=self._legs[leg.key].blocks,
            draw=Draw(leg.sampling, leg.choices, leg.prompt, leg.generated) if last else None,
        )

    def _first_tokens(self, entry: _Entry, row: Sequence[SampledToken], now: float) -> list[Effect]:
        leg = entry.leg
        entry.phase, entry.computed_at = Phase.HELD, now
        first = pb.FirstTokens(
            leg=ref_of(leg.key),
            tokens=[_token(leg, sampled) for sampled in row],
            cached_tokens=entry.cached,
            queue_s=entry.admitted - entry.arrived,
            prefill_s=now - entry.admitted,
            chunks=entry.chunks,
        )
        effects: list[Effect] = [Tell(entry.session, pb.WorkerEvent(first=first))]
        ended = all(token.finish_reason for token in first.tokens)
        if entry.sending and not ended:
            return [*effects, FinishTransfer(leg.key, first.SerializeToString())]
        if entry.sending:
            entry.sending = False
            effects.append(AbandonTransfer(leg.key))
        return effects + self._drop(entry)

    def _drop(self, entry: _Entry) -> list[Effect]:
        """The leg is gone: its blocks are free once the effects are done."""
        del self._legs[entry.leg.key]
        self._queue.pop(entry.leg.key, None)
        self.scheduler.remove(entry.leg.key)
        self.pool.release(entry.blocks)
        return [CancelTransfer(entry.leg.key)] if entry.sending else []


def _token(leg: Leg, sampled: SampledToken) -> pb.Token:
    number = len(leg.generated)
    return pb.Token(
        choice=sampled.choice,
        index=number,
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        top_logprobs=[pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in sampled.top],
        finish_reason=finish_reason(leg.sampling, sampled.token_id, number + 1),
    )


def _sent_event(entry: _Entry) -> pb.WorkerEvent:
    reports = entry.reports.values()
    moved = [report for report in reports if report.frames] or reports  # a rank may have had nothing to send
    began, ended = min(r.started_at for r in moved), max(r.ended_at for r in moved)
    return pb.WorkerEvent(
        sent=pb.Sent(
            leg=ref_of(entry.leg.key),
            bytes=sum(report.bytes for report in reports),
            frames=sum(report.frames for report in reports),
            transfer_s=ended - began,
            exposed_s=max(0.0, ended - max(began, entry.computed_at)),
        )
    )
