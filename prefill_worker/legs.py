"""All legs of a prefill worker and who holds which blocks: a sans-I/O book, events in, effects out.

| phase | holds | left by |
|---|---|---|
| queued | nothing | blocks are free -> fetching or computing; cancel, deadline, session end |
| fetching | all blocks; a prefix arrives from the decode worker | it is here, fails or is late -> computing; ... |
| computing | the same blocks; a transfer, if it has a ticket | last chunk -> held or gone; cancel, ... |
| held, sending | the same, until they are sent *and* released | release, cancel, session end; broken -> held, unsent |
| held, sent | the same | release, cancel, session end, its clock |
| held, unsent | the same | a Handover -> sending; a prompt that needs blocks; cancel, session end, its clock |

A transfer that breaks ends no leg: what was computed waits, under its key, for a Handover, which puts it under another
key and sends it elsewhere (in every phase; what is being computed goes on). A leg that is gone holds nothing, and
whatever still arrives for it changes nothing. A leg without a ticket, or whose choices all end with their first token,
is gone as soon as it is computed. Blocks are given in the order of arrival and all at once, so two prompts can never
wait for each other; a prompt larger than the pool is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..engine.block_pool import BlockPool
from ..engine.prefill_scheduler import Chunk, PrefillScheduler
from ..engine.prompt_chunks import reusable, scores_event, step_of
from ..engine.step import SampledToken, SequenceStep
from ..kv_transfer.events import Sent
from ..kv_transfer.send_reports import SendReports
from ..kv_transfer.ticket import Ticket
from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, DeadlineExceeded, InvalidRequest, TransferFailed, Unavailable
from ..proto.kv_layout import block_count
from ..proto.leg import Leg, LegKey, ref_of
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
    unsent,
)
from .entry import Entry, Order, Phase, first_event, repeated


@dataclass(frozen=True, slots=True)
class Rules:
    """Clocks in seconds. `fetch_tokens`: the least prefix worth asking the decode worker for; 0: never ask."""

    keep_s: float  # blocks without a transfer are kept for the router so long
    fetch_tokens: int
    fetch_s: float  # a prefix that was asked for may take so long


class PrefillLegs:
    """Times are the caller's monotonic clock. Every method that can change something returns the effects of it."""

    def __init__(self, pool: BlockPool, scheduler: PrefillScheduler, ranks: int, rules: Rules) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.computed_tokens = 0
        self.fetched_tokens = 0
        self.steps = 0
        self._ranks = ranks
        self._rules = rules
        self._legs: dict[LegKey, Entry] = {}
        self._queue: dict[LegKey, Entry] = {}  # oldest first
        self._orders: dict[LegKey, tuple[LegKey, Order]] = {}  # Handovers by new key, until the step boundary
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
        fetching = [entry for entry in self._legs.values() if entry.phase is Phase.FETCHING]
        return pb.Load(
            running=len(self.scheduler) + len(fetching),
            waiting=len(self._queue),
            waiting_tokens=queued + sum(e.leg.length - e.cached for e in fetching) + self.scheduler.tokens_left,
            used_blocks=self.pool.used,
            cached_blocks=self.pool.cached,
            total_blocks=self.pool.total,
            steps=self.steps,
            prefix_hit_tokens=self.pool.prefix_hit_tokens,
            prefix_query_tokens=self.pool.prefix_query_tokens,
            computed_prompt_tokens=self.computed_tokens,
            held_legs=sum(entry.phase is Phase.HELD for entry in self._legs.values()),
            fetched_prompt_tokens=self.fetched_tokens,
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
            entry = Entry(leg, session, ticket, now, SendReports(self._ranks))
            self._legs[leg.key] = self._queue[leg.key] = entry
        return []

    def handover(self, session: int, leg: Leg, ticket: bytes, held: LegKey) -> list[Effect]:
        """At the next step boundary: what is known as `held` goes on as `leg`, to where the ticket says."""
        if held[0] != leg.key[0]:
            return [Tell(session, failed(leg.key, _gone(held)))]
        if leg.key not in self._legs:
            self._orders[leg.key] = (held, Order(session, leg, ticket))
        return []

    def cancel(self, key: LegKey) -> list[Effect]:
        """Forget the leg whatever its phase."""
        if key in self._orders:
            key, _ = self._orders.pop(key)
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
        self._orders = {key: order for key, order in self._orders.items() if order[1].session != session}
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
        if entry is None or not entry.sending or not entry.reports.add(rank, report):
            return []
        entry.sending = False
        effects: list[Effect] = [Tell(entry.session, entry.reports.event(ref_of(report.leg), entry.computed_at))]
        return effects + (self._drop(entry) if entry.released else [])

    def send_failed(self, key: LegKey, error: BatonError) -> list[Effect]:
        """A leg cannot reach its decode worker. After the release that is of no interest to the router; before, the
        blocks are kept for another decode worker, unless no worker could be sent this."""
        entry = self._legs.get(key)
        if entry is None or not entry.sending:
            return []
        if entry.released:
            return self._drop(entry)
        if not error.retryable:
            return self.fail(key, error)
        entry.sending, entry.unsent = False, True
        return [CancelTransfer(key), Tell(entry.session, unsent(key, error))]  # other ranks may still be sending

    def arrived(self, key: LegKey, rank: int) -> list[Effect]:
        """A rank has all of the prefix that was asked for."""
        entry = self._legs.get(key)
        if entry is None or entry.phase is not Phase.FETCHING:
            return []
        entry.arriving.discard(rank)
        if entry.arriving:
            return []
        entry.fetched = entry.fetch_stop - entry.cached
        self.fetched_tokens += entry.fetched
        self.pool.publish(entry.blocks, entry.leg.tokens[: entry.fetch_stop], entry.leg.salt)
        return self._stop_fetching(entry)

    def receive_failed(self, key: LegKey) -> list[Effect]:
        """The prefix will not come: it is computed here, and nobody need know."""
        entry = self._legs.get(key)
        return self._stop_fetching(entry) if entry is not None and entry.phase is Phase.FETCHING else []

    # ---- the step --------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Effect]:
        """Fail what is past its deadline before it is computed, stop waiting for prefixes, free what nobody sent for.

        The clock of blocks that only wait begins at the first call that finds them so.
        """
        late = [e for e in self._legs.values() if e.phase is not Phase.HELD and e.leg.deadline <= now]
        error = DeadlineExceeded("the deadline passed before the prompt was computed")
        effects = [effect for entry in late for effect in self.fail(entry.leg.key, error)]
        for entry in list(self._legs.values()):
            if entry.phase is Phase.FETCHING and entry.fetch_until <= now:
                effects += self._stop_fetching(entry)
            elif entry.idle and entry.idle_since is None:
                entry.idle_since = now
            elif entry.idle and entry.idle_since is not None and entry.idle_since + self._rules.keep_s <= now:
                effects += self._drop(entry)
        return effects

    def next_deadline(self) -> float | None:
        """When `expire` will have something to do."""
        return min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        for entry in self._legs.values():
            if entry.phase is not Phase.HELD:
                yield entry.leg.deadline
            if entry.phase is Phase.FETCHING:
                yield entry.fetch_until
            if entry.idle and entry.idle_since is not None:
                yield entry.idle_since + self._rules.keep_s

    def admit(self, now: float) -> list[Effect]:
        """Carry out Handovers; give blocks to queued prompts, in order, as long as there are enough."""
        orders, self._orders = self._orders, {}
        effects = [effect for held, order in orders.values() for effect in self._hand_over(held, order)]
        while self._queue:
            entry = next(iter(self._queue.values()))
            if self._place(entry):
                effects += self._begin(entry, now)
                continue
            spare = next((e for e in self._legs.values() if e.idle and e.unsent), None)
            if spare is None:
                break
            effects += self._drop(spare)  # it can be computed again
        return effects

    def plan(self) -> list[SequenceStep]:
        """What the engine runs next; a prompt's last chunk draws the first token of all its choices."""
        planned = ((self._legs[chunk.key], chunk) for chunk in self.scheduler.plan())
        return [step_of(entry.leg, chunk, entry.blocks) for entry, chunk in planned]

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
            if step.scores is not None:
                effects.append(Tell(entry.session, scores_event(key, step.start, step.scores)))
            if row is not None and row[0].error is not None:
                effects += self.fail(key, row[0].error)
            elif row is not None:
                effects += self._first_tokens(entry, row, now)
        return effects

    def _first_tokens(self, entry: Entry, row: Sequence[SampledToken], now: float) -> list[Effect]:
        key = entry.leg.key
        entry.phase, entry.computed_at = Phase.HELD, now
        first = entry.first = first_event(entry, row, now)
        effects: list[Effect] = []
        going_on = bool(entry.ticket) and not all(token.finish_reason for token in first.tokens)
        if entry.sending:
            effects.append(FinishTransfer(key, first.SerializeToString()) if going_on else AbandonTransfer(key))
        effects.append(Tell(entry.session, pb.WorkerEvent(first=first)))
        if going_on:
            return effects
        entry.sending = False
        return effects + self._drop(entry)

    # ---- transitions -----------------------------------------------------------------------------------------------

    def _place(self, entry: Entry) -> bool:
        """Give the leg all its blocks, if there are enough."""
        leg = entry.leg
        if self._blocked == (leg.key, self.pool.free):
            return False  # nothing has changed since the last look
        shared = self.pool.match(reusable(leg), leg.salt)
        rest = block_count(leg.length, self.pool.block_size) - len(shared)
        if rest > self.pool.free_after_pin(shared):
            self._blocked = (leg.key, self.pool.free)
            return False
        self.pool.pin(shared)
        entry.blocks = shared + self.pool.allocate(rest)
        entry.cached = len(shared) * self.pool.block_size
        self.pool.record_lookup(leg.length, entry.cached)
        del self._queue[leg.key]
        return True

    def _begin(self, entry: Entry, now: float) -> list[Effect]:
        """Compute, after the prefix that the decode worker holds has come, where that is worth asking for."""
        leg, rules = entry.leg, self._rules
        entry.admitted = now
        stop = min(_offered(entry.ticket), len(reusable(leg)))
        if not rules.fetch_tokens or stop - entry.cached < rules.fetch_tokens:
            return self._compute(entry)
        entry.phase, entry.fetch_stop, entry.fetch_until = Phase.FETCHING, stop, now + rules.fetch_s
        entry.arriving = set(range(self._ranks))
        return [ExpectPrefix(entry.session, leg.key, tuple(entry.blocks), entry.cached, stop)]

    def _stop_fetching(self, entry: Entry) -> list[Effect]:
        return [ForgetPrefix(entry.leg.key), *self._compute(entry)]

    def _compute(self, entry: Entry) -> list[Effect]:
        """Compute what is not in the blocks, and begin to send."""
        self._schedule(entry)
        return self._open(entry, entry.cached + entry.fetched) if entry.ticket else []

    def _schedule(self, entry: Entry) -> None:
        entry.phase = Phase.COMPUTING
        self.scheduler.add(entry.leg.key, entry.leg.length, entry.cached + entry.fetched)

    def _open(self, entry: Entry, there: int) -> list[Effect]:
        """Begin to send; the first `there` tokens are in the blocks."""
        leg = entry.leg
        entry.sending = True
        return [OpenTransfer(leg.key, entry.ticket, tuple(entry.blocks), leg.length, there)]

    def _hand_over(self, held: LegKey, order: Order) -> list[Effect]:
        entry, leg = self._legs.get(held), order.leg
        if entry is None or entry.session != order.session or leg.tokens != entry.leg.tokens:
            return [Tell(order.session, failed(leg.key, _gone(held)))]
        if not set(leg.choices) <= set(entry.leg.choices):
            return [Tell(order.session, failed(leg.key, TransferFailed(f"{held} has no choices {leg.choices}")))]
        effects: list[Effect] = [CancelTransfer(held)] if entry.sending else []
        if entry.phase is Phase.FETCHING:  # from the worker that is given up
            effects.append(ForgetPrefix(held))
            self._schedule(entry)
        self._rename(held, entry, order)
        done = self.scheduler.done(leg.key)
        if entry.phase is Phase.COMPUTING and done is not None:
            effects += self._open(entry, done)
        if entry.phase is Phase.HELD and entry.first is not None:
            entry.first = repeated(entry.first, leg)
            effects += self._open(entry, leg.length)
            effects.append(Tell(entry.session, pb.WorkerEvent(first=entry.first)))
            effects.append(FinishTransfer(leg.key, entry.first.SerializeToString()))
        return effects

    def _rename(self, held: LegKey, entry: Entry, order: Order) -> None:
        new = order.leg.key
        self._legs = {(new if key == held else key): known for key, known in self._legs.items()}
        self._queue = {(new if key == held else key): known for key, known in self._queue.items()}
        self.scheduler.rename(held, new)
        entry.leg, entry.ticket = order.leg, order.ticket
        entry.sending = entry.unsent = entry.released = False
        entry.reports, entry.idle_since = SendReports(self._ranks), None

    def _drop(self, entry: Entry) -> list[Effect]:
        """The leg is gone: its blocks are free once the effects are done."""
        key = entry.leg.key
        del self._legs[key]
        self._queue.pop(key, None)
        self.scheduler.remove(key)
        self.pool.release(entry.blocks)
        if entry.phase is Phase.FETCHING:
            return [ForgetPrefix(key)]
        return [CancelTransfer(key)] if entry.sending else []


def _gone(held: LegKey) -> BatonError:
    return Unavailable(f"the prefill worker does not hold the KV of {held} (any more)")


def _offered(ticket: bytes) -> int:
    """Leading tokens that the decode worker holds, by its ticket; one that cannot be read fails when it is used."""
    try:
        return Ticket.unpack(ticket).cached_tokens
    except BatonError:
        return 0
