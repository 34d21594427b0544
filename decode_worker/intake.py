"""How a leg gets into a decode worker: reserve -> commit or abort. Pure; owns reservations until they are committed.

| state (intake_table.py has the transitions) | holds |
|---|---|
| waiting | nothing |
| reserved, covered, sampled, complete | its blocks, pinned or allocated |
| committed, gone | nothing here: the batch has the blocks, or they are free |

**The line.** First come, first served; the head is not bypassed, so a large reservation is never starved by small ones.
A reservation gets all its blocks or none, for all its choices, and enough to begin: room for the first token that is
decoded here and at least one block beyond the prompt where the request can ever use it. A leg that resumes a choice
gets everything it can ever need (see scheduler.py). While a running sequence lacks a block, nobody is admitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..engine.block_pool import BlockPool
from ..engine.prompt_chunks import reusable
from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, DeadlineExceeded, Exhausted, InvalidRequest, TransferFailed
from ..proto.kv_layout import block_count
from ..proto.leg import Leg, LegKey
from .intake_table import TABLE, IntakeEvent, IntakeState


@dataclass(frozen=True, slots=True)
class Need:
    """Blocks of a reservation: `shared` full ones serve all choices; a choice has `table` blocks, those included."""

    shared: int
    table: int
    total: int


def blocks_needed(leg: Leg, block_size: int) -> Need:
    """Exact: room in the last, partly filled block counts."""
    longest = block_count(leg.last, block_size)
    table = longest if leg.generated else min(block_count(leg.length, block_size) + 1, longest)
    shared = leg.length // block_size
    return Need(shared, table, shared + len(leg.choices) * (table - shared))


def refuse_what_never_fits(leg: Leg, pool: BlockPool, max_sequences: int, max_model_len: int) -> None:
    """Raises InvalidRequest, with the numbers, for a leg that could not run here even alone."""
    size, total = pool.block_size, pool.total
    capacity = f"the decode worker has {total} KV blocks of {size} tokens ({total * size} tokens)"
    if block_count(leg.length + 1, size) > total:
        raise InvalidRequest(f"the prompt of {leg.length} tokens does not fit: {capacity}", field="prompt")
    if block_count(leg.last, size) > total:
        raise InvalidRequest(
            f"{leg.length} tokens and {leg.remaining} more do not fit: {capacity}; ask for fewer", field="max_tokens"
        )
    if leg.last > max_model_len:
        raise InvalidRequest(
            f"{leg.length} tokens and {leg.remaining} more exceed the context of {max_model_len}", field="max_tokens"
        )
    if (need := blocks_needed(leg, size)).total > total:
        raise InvalidRequest(f"{len(leg.choices)} choices need {need.total} blocks to begin: {capacity}", field="n")
    if len(leg.choices) > max_sequences:
        raise InvalidRequest(
            f"{len(leg.choices)} choices, but the decode worker runs {max_sequences} sequences", field="n"
        )


@dataclass(slots=True)
class Waiting:
    """A reservation in the line."""

    leg: Leg
    session: int
    since: float
    compute: bool


@dataclass(slots=True)
class Reservation:
    """Blocks held for a leg that is being prefilled elsewhere or, with `compute`, here."""

    leg: Leg
    session: int
    need: Need
    blocks: list[int]  # the first choice's table, then what the others need for themselves
    cached: int  # leading tokens that are in the pool already
    waited_s: float
    since: float
    progress: float  # when something of it happened last
    compute: bool
    chunks: int = 0  # of the prompt that were computed here
    arrived: set[int] = field(default_factory=set)  # ranks that hold all KV
    first: pb.FirstTokens | None = None
    bytes: int = 0
    frames: int = 0
    giving: bool = False  # the cached blocks are being sent to the prefill worker
    state: IntakeState = IntakeState.RESERVED

    def on(self, event: IntakeEvent) -> bool:
        """Apply an event. False: illegal in this state, nothing changed."""
        following = TABLE.get((self.state, event))
        if following is None:
            return False
        self.state = following
        return True


class Intake:
    """The line and the reservations. Times are the caller's monotonic clock."""

    def __init__(
        self, pool: BlockPool, ranks: int, max_sequences: int, reserve_wait_s: float, commit_timeout_s: float
    ) -> None:
        self._pool = pool
        self.ranks = ranks
        self._max_sequences = max_sequences
        self._reserve_wait_s = reserve_wait_s
        self.commit_timeout_s = commit_timeout_s
        self._blocked: tuple[LegKey, int] | None = None  # head of the line and free blocks when they were too few
        self.waiting: dict[LegKey, Waiting] = {}
        self.reserved: dict[LegKey, Reservation] = {}

    def __repr__(self) -> str:
        return f"Intake(waiting={list(self.waiting)}, reserved={list(self.reserved)})"

    @property
    def reserved_sequences(self) -> int:
        """Choices that will join the batch."""
        return sum(len(reservation.leg.choices) for reservation in self.reserved.values())

    def submit(self, session: int, leg: Leg, now: float, compute: bool = False) -> None:
        """Join the line; a known key is ignored. compute: the prompt is computed here."""
        if leg.key not in self.waiting and leg.key not in self.reserved:
            self.waiting[leg.key] = Waiting(leg, session, now, compute)

    def admit(self, running: int, now: float) -> Reservation | None:
        """Give the head of the line its blocks, if they and its seats in the batch are free. `running`: seats taken."""
        if not self.waiting:
            return None
        head = next(iter(self.waiting.values()))
        leg, pool = head.leg, self._pool
        if running + self.reserved_sequences + len(leg.choices) > self._max_sequences:
            return None
        if self._blocked == (leg.key, pool.free):
            return None  # nothing has changed since the last look
        need = blocks_needed(leg, pool.block_size)
        # the last token comes from prefill in any case
        shared = pool.match(reusable(leg) if head.compute else leg.tokens[:-1], leg.salt)
        if need.total - len(shared) > pool.free_after_pin(shared):
            self._blocked = (leg.key, pool.free)
            return None
        pool.pin(shared)
        blocks = shared + pool.allocate(need.total - len(shared))
        cached = len(shared) * pool.block_size
        pool.record_lookup(leg.length, cached)
        del self.waiting[leg.key]
        waited_s = now - head.since
        reservation = Reservation(leg, head.session, need, blocks, cached, waited_s, now, now, head.compute)
        self.reserved[leg.key] = reservation
        return reservation

    def arrived(self, key: LegKey, rank: int, size: int, frames: int, now: float) -> Reservation | None:
        """A rank holds all KV. The reservation, when it is complete."""
        reservation = self.reserved.get(key)
        if reservation is None or rank in reservation.arrived:
            return None
        reservation.arrived.add(rank)
        if len(reservation.arrived) == self.ranks:
            reservation.on(IntakeEvent.KV)
        reservation.bytes += size
        reservation.frames += frames
        reservation.progress = now
        return self._if_complete(reservation)

    def first_tokens(self, key: LegKey, first: pb.FirstTokens, now: float) -> Reservation | None:
        """What prefill sampled. The reservation, when it is complete."""
        reservation = self.reserved.get(key)
        if reservation is None or not reservation.on(IntakeEvent.FIRST_TOKENS):
            return None
        reservation.first = first
        reservation.progress = now
        return self._if_complete(reservation)

    def _if_complete(self, reservation: Reservation) -> Reservation | None:
        return reservation if reservation.state is IntakeState.COMPLETE else None

    def take(self, key: LegKey) -> Reservation | None:
        """Remove a reservation: to commit it, or to give its blocks back. None: there is none."""
        reservation = self.reserved.pop(key, None)
        if reservation is not None:
            reservation.on(IntakeEvent.TAKE if reservation.state is IntakeState.COMPLETE else IntakeEvent.END)
        return reservation

    def overdue(self, now: float) -> list[tuple[LegKey, BatonError]]:
        """Legs whose time is up, and the reason for each."""
        late: list[tuple[LegKey, BatonError]] = []
        for key, moment, error in self._deadlines():
            if moment <= now and all(key != known for known, _ in late):
                late.append((key, error()))
        return late

    def next_deadline(self) -> float | None:
        """When `overdue` will name somebody."""
        return min((moment for _, moment, _ in self._deadlines()), default=None)

    def _deadlines(self) -> list[tuple[LegKey, float, Callable[[], BatonError]]]:
        wait, limit = self._reserve_wait_s, self.commit_timeout_s
        return [
            *((w.leg.key, w.leg.deadline, _late) for w in self.waiting.values()),
            *((w.leg.key, w.since + wait, lambda: _full(wait)) for w in self.waiting.values()),
            *((r.leg.key, r.leg.deadline, _late) for r in self.reserved.values()),
            *((r.leg.key, r.progress + limit, lambda: _silent(limit)) for r in self.reserved.values() if not r.compute),
        ]


def _late() -> BatonError:
    return DeadlineExceeded("the deadline passed before decoding began")


def _full(wait_s: float) -> BatonError:
    return Exhausted(f"no decode blocks became free within {wait_s:g} s", retry_after_s=1.0)


def _silent(limit_s: float) -> BatonError:
    return TransferFailed(f"no KV arrived within {limit_s:g} s")
