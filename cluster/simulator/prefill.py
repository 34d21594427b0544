"""A prefill worker in virtual time: prompts in line, the product's scheduler and block pool, and the law of a step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from ...engine.prefill_scheduler import Chunk, PrefillScheduler
from ...proto.kv_layout import block_count
from ...proto.leg import LegKey
from ...proto.step_time import prefill_features
from ...router.life_messages import Peer
from .clock import Clock
from .request import Flight
from .spec import Cluster
from .worker import Front, Worker


class PrefillWorker(Worker):
    """Prompts get their blocks in the order of arrival and all at once, as in `prefill_worker/legs.py`."""

    role = "prefill"

    def __init__(
        self, clock: Clock, front: Front, cluster: Cluster, peer: Peer, rng: random.Random, named: bool
    ) -> None:
        super().__init__(clock, front, cluster, peer, rng, named)
        self._scheduler = PrefillScheduler(cluster.prefill.max_batch_tokens)
        self._line: deque[Flight] = deque()
        self._running: dict[LegKey, Flight] = {}
        self._held: dict[LegKey, Flight] = {}  # computed, and not yet at their decode worker
        self._blocks: dict[LegKey, list[int]] = {}  # of both
        self._stepping = False

    @property
    def idle(self) -> bool:
        """See Worker."""
        return not (self._line or self._running or self._held)

    @property
    def waiting(self) -> int:
        """Prompts without blocks."""
        return len(self._line)

    @property
    def running(self) -> int:
        """Prompts that are being computed."""
        return len(self._running)

    def submit(self, flight: Flight) -> None:
        """A prompt to compute."""
        self._line.append(flight)
        if not self._stepping:
            self._turn()

    def release(self, key: LegKey) -> None:
        """Its KV is where it is needed, or needed no more; the blocks stay as prefix cache."""
        if self._held.pop(key, None) is not None:
            self.pool.release(self._blocks.pop(key))
            if self._line and not self._stepping:
                self._turn()

    def lose(self) -> list[Flight]:
        """The worker dies: who was here, in order of arrival."""
        self.alive = False
        return sorted([*self._line, *self._running.values(), *self._held.values()], key=lambda flight: flight.number)

    def cancel(self, flight: Flight) -> None:
        """Forget the leg, wherever it is."""
        if flight in self._line:
            self._line.remove(flight)
        if self._running.pop(flight.leg.key, None) is not None:
            self._scheduler.remove(flight.leg.key)
            self.pool.release(self._blocks.pop(flight.leg.key))
        self.release(flight.leg.key)

    def _turn(self) -> None:
        while self._line and self._place(self._line[0]):
            self._line.popleft()
        if chunks := self._scheduler.plan():
            seconds = self.law.seconds(prefill_features([(start, stop) for _, start, stop in chunks])) * self._factor()
            self._stepping = True
            self.busy_s += seconds
            self.steps += 1
            self.clock.at(self.clock.now + seconds, self._ran, chunks)

    def _place(self, flight: Flight) -> bool:
        pool, leg = self.pool, flight.leg
        shared = pool.match(leg.tokens[:-1], leg.salt)
        rest = block_count(leg.length, pool.block_size) - len(shared)
        if rest > pool.free_after_pin(shared):
            return False
        pool.pin(shared)
        self._blocks[leg.key] = shared + pool.allocate(rest)
        flight.cached = len(shared) * pool.block_size
        flight.begun_at = self.clock.now
        pool.record_lookup(leg.length, flight.cached)
        self._running[leg.key] = flight
        self._scheduler.add(leg.key, leg.length, flight.cached)
        return True

    def _ran(self, chunks: Sequence[Chunk]) -> None:
        if not self.alive:
            return
        complete = self._scheduler.computed(chunks)
        for chunk in chunks:
            if (flight := self._running.get(chunk.key)) is not None:
                self.pool.publish(self._blocks[chunk.key], flight.leg.tokens[: chunk.stop], flight.leg.salt)
        for key in complete:
            flight = self._running.pop(key)
            self._held[key] = flight
            self.front.computed(flight)
        self._stepping = False
        self._turn()
