"""Prompts that a decode worker computes itself, in chunks beside its batch: which part of which, and what comes of it.

A step computes at most `max_batch_tokens` of them, so that a running stream waits for that many and no more; how they
are divided among the prompts is the rule of prefill workers (engine/prefill_scheduler.py). Who holds the blocks is the
intake's business: a prompt is computed for as long as it has a reservation there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..engine.block_pool import BlockPool
from ..engine.prefill_scheduler import Chunk, PrefillScheduler
from ..engine.prompt_chunks import scores_event, step_of
from ..engine.step import SampledToken, SequenceStep
from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError
from ..proto.leg import LegKey, ref_of
from .effects import token_message
from .intake import Reservation


class Prompts:
    """Those whose reservation says `compute`."""

    def __init__(self, pool: BlockPool, scheduler: PrefillScheduler) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self.computed_tokens = 0

    @property
    def tokens_left(self) -> int:
        """Tokens still to compute."""
        return self._scheduler.tokens_left

    def begin(self, reservation: Reservation) -> None:
        """A reservation got its blocks; what is cached is not computed."""
        self._scheduler.add(reservation.leg.key, reservation.leg.length, reservation.cached)

    def forget(self, key: LegKey) -> None:
        """The reservation is gone; one that was not computed here is no error."""
        self._scheduler.remove(key)

    def plan(self, reserved: Mapping[LegKey, Reservation]) -> list[SequenceStep]:
        """The chunks of the next step; a prompt's last one draws the first token of all its choices."""
        planned = ((reserved[chunk.key], chunk) for chunk in self._scheduler.plan())
        return [step_of(r.leg, chunk, r.blocks[: r.need.table]) for r, chunk in planned]

    def computed(
        self,
        reserved: Mapping[LegKey, Reservation],
        steps: Sequence[SequenceStep],
        drawn: Sequence[Sequence[SampledToken]],
        now: float,
    ) -> list[tuple[Reservation, pb.WorkerEvent | BatonError]]:
        """Chunks ran; `drawn` has a row for each that draws. Returns what each reservation's router is told, the first
        tokens of a whole prompt being the last of it, or why there are none; those that are gone are skipped."""
        rows, news = iter(drawn), list[tuple[Reservation, pb.WorkerEvent | BatonError]]()
        for step in steps:
            row = next(rows) if step.draw is not None else None
            key = (step.request_id, step.attempt, step.first_choice)
            self.computed_tokens += len(step.tokens)
            self._scheduler.computed([Chunk(key, step.start, step.end)])
            reservation = reserved.get(key)
            if reservation is None:
                continue
            leg = reservation.leg
            reservation.chunks += 1
            self._pool.publish(step.blocks, leg.tokens[: step.end], leg.salt)
            if step.scores is not None:
                news.append((reservation, scores_event(key, step.start, step.scores)))
            if row is not None:
                error = row[0].error
                first = error or pb.WorkerEvent(first=_first_tokens(reservation, row, now))
                news.append((reservation, first))
        return news


def _first_tokens(reservation: Reservation, row: Sequence[SampledToken], now: float) -> pb.FirstTokens:
    leg = reservation.leg
    return pb.FirstTokens(
        leg=ref_of(leg.key),
        tokens=[token_message(leg, sampled, len(leg.generated)) for sampled in row],
        cached_tokens=reservation.cached,
        queue_s=reservation.waited_s,
        prefill_s=now - reservation.since,
        chunks=reservation.chunks,
        drawn_at=now,
    )
