"""Decode workers that compute prompts, in virtual time: chunks of them share the steps of the batch (Sarathi-Serve).

Of a cluster whose `router.placement.disaggregation` says so (`decode_worker/prompts.py`), and of one without prefill
workers, which is here to be compared with: what the same GPUs would do without two pools. Intake and schedulers are
those of the two kinds of workers.
"""

from __future__ import annotations

import random

from ...decode_worker.intake import Waiting
from ...decode_worker.scheduler import SequenceId
from ...engine.prefill_scheduler import Chunk, PrefillScheduler
from ...proto.step_time import prefill_features
from ...router.life_messages import Peer
from .clock import Clock
from .decode import DecodeWorker
from .request import Flight, leg_of
from .spec import Cluster
from .worker import Front


class ComputingWorker(DecodeWorker):
    """Steps are merged while no prompt is being computed."""

    def __init__(
        self,
        clock: Clock,
        front: Front,
        cluster: Cluster,
        peer: Peer,
        rng: random.Random,
        named: bool,
        merge: bool = True,
    ) -> None:
        super().__init__(clock, front, cluster, peer, rng, named, merge)
        self._prompts = PrefillScheduler(cluster.prompt_chunk)
        self._chunks: list[Chunk] = []  # of the step that runs

    def cancel(self, flight: Flight) -> None:
        """See DecodeWorker."""
        self._prompts.remove(flight.leg.key)
        super().cancel(flight)

    def _granted(self, flight: Flight, cached: int) -> None:
        if not flight.here:
            super()._granted(flight, cached)
            return
        flight.ticket = True
        self._prompts.add(flight.leg.key, flight.leg.length, cached)

    def _roomy(self, flight: Flight) -> bool:
        return False  # who is let in is computed in the next step, which is a different one then

    def _begin(self, steps: int, count: int) -> None:
        self._chunks = self._prompts.plan()
        if not self._chunks:
            super()._begin(steps, count)
            return
        law = self._prompt_law
        _, tokens, squares = prefill_features([(start, stop) for _, start, stop in self._chunks])
        alone = 0.0 if count else law.a - self.law.a
        self._start(1, count, alone + law.b * tokens + law.c * squares)

    def _book(self, steps: int) -> None:
        super()._book(steps)
        if not steps:
            return
        chunks, self._chunks = self._chunks, []
        for chunk in chunks if self._named else ():
            if (held := self._intake.reserved.get(chunk.key)) is not None:
                self.pool.publish(held.blocks[: held.need.table], held.leg.tokens[: chunk.stop], held.leg.salt)
        for key in self._prompts.computed(chunks):
            flight = self._legs[key]
            self.front.first_token(flight)
            self._commit(flight)


class AggregatedWorker(ComputingWorker):
    """Of a cluster without prefill workers: whoever loses its blocks goes on here."""

    def preempt(self, sequence: SequenceId) -> None:
        """Take back the blocks; the sequence is the first in the line here, with all that it has said."""
        running = self._running.pop(sequence)
        flight, said = running.flight, running.said
        self._context -= running.sequence.tokens
        self.pool.release(running.table)
        self.preemptions += 1
        self.front.resumed(flight)
        flight.attempt, flight.generated = flight.attempt + 1, said
        leg = flight.leg = leg_of(flight.number, flight.attempt, flight.arrival, said, flight.leg.deadline)
        self._legs[leg.key] = flight
        self._intake.waiting = {leg.key: Waiting(leg, 0, self.clock.now, True), **self._intake.waiting}
