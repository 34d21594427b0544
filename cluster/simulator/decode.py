"""A decode worker in virtual time: the product's intake, scheduler and block pool, with merged steps.

As a live worker it decides at the ends of steps: who joined runs in the next one, and the line is looked at. Between
two events all sequences take one step after another, so that these are run as one: k steps of n sequences that hold c
tokens take (a + b*n + c1*c)*k + c1*n*k*(k - 1)/2 seconds. Where blocks are scarce single steps are planned by the
scheduler. Either way tokens come out at the same times (`tests/test_simulator_exact.py`).
"""

from __future__ import annotations

import random

from ...decode_worker.intake import Intake, blocks_needed
from ...decode_worker.scheduler import DecodeScheduler, Sequence, SequenceId
from ...proto import worker_pb2 as pb
from ...router.life_messages import Peer
from .clock import Clock
from .request import Flight, Running
from .spec import Cluster
from .steps import Steps
from .worker import Front, Worker

_LOOK_S = 1.0
_FIRST = pb.FirstTokens()  # whose contents do not matter here


class DecodeWorker(Worker):
    """`merge=False` runs every step by itself, as the live worker does: slower, and the same."""

    role = "decode"

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
        super().__init__(clock, front, cluster, peer, rng, named)
        rules = cluster.rules
        self._named, self._merge = named, merge
        self._intake = Intake(self.pool, 1, cluster.decode.max_sequences, rules.reserve_wait_s, rules.commit_timeout_s)
        self._scheduler = DecodeScheduler(cluster.block_size)
        self._running: dict[SequenceId, Running] = {}  # the batch
        self._joining: list[Running] = []
        self._legs: dict[object, Flight] = {}  # waiting or reserved, by key of the leg
        self._context = 0  # tokens that the batch holds
        self._planned: list[SequenceId] | None = None  # of a planned step; None: merged ones of the whole batch
        self._run = Steps(0.0, 0, 0.0, 0.0)
        self._version = 0
        self._stepping = self._stalled = False
        self._look_at = 0.0  # at the clocks of those who wait
        self.preemptions = 0
        self.sequence_s = 0.0

    @property
    def idle(self) -> bool:
        """See Worker."""
        return not (self._legs or self._running or self._joining)

    @property
    def waiting(self) -> int:
        """Reservations in the line."""
        return len(self._intake.waiting)

    @property
    def running(self) -> int:
        """Sequences of the batch."""
        return len(self._running)

    def has(self, flight: Flight) -> bool:
        """Whether the leg waits here or is reserved."""
        return flight.leg.key in self._legs

    # ---- from the router -------------------------------------------------------------------------------------------

    def reserve(self, flight: Flight) -> None:
        """Blocks for a leg; `granted` or `refused` follows."""
        self._legs[flight.leg.key] = flight
        self._intake.submit(0, flight.leg, self.clock.now)
        if not self._stepping:
            self._turn(self._version)
        elif self._roomy(flight):
            self.clock.at(self._run.end(self._run.running(self.clock.now)), self._admit_within, self._version)
        else:
            self._cut()

    def arrived(self, flight: Flight) -> None:
        """All KV of a leg is here, and its first token."""
        if not self._commit(flight):
            return
        if not self._stepping:
            self._turn(self._version)
        else:
            self._cut()

    def _commit(self, flight: Flight) -> bool:
        """It joins at the end of the step; False: there is no such reservation (any more)."""
        key, now = flight.leg.key, self.clock.now
        if self._intake.arrived(key, 0, 0, 0, now) is None and self._intake.first_tokens(key, _FIRST, now) is None:
            return False
        reservation = self._intake.take(key)
        if reservation is None:
            return False
        leg, table = reservation.leg, reservation.blocks
        del self._legs[key]
        self.pool.publish(table, leg.tokens, leg.salt)
        sequence = Sequence((key, 0), leg.length, len(table), leg.last, bool(leg.generated))
        self._joining.append(Running(flight, sequence, table))
        self.front.committed(flight)
        return True

    def cancel(self, flight: Flight) -> None:
        """Forget a leg that is waiting or reserved."""
        self._legs.pop(flight.leg.key, None)
        self._intake.waiting.pop(flight.leg.key, None)
        reservation = self._intake.take(flight.leg.key)
        if reservation is not None:
            self.pool.release(reservation.blocks)
            if self._intake.waiting:
                self._cut() if self._stepping else self._turn(self._version)

    def lose(self) -> list[tuple[Flight, int | None]]:
        """The worker dies: who was here, with the tokens said if it was in the batch."""
        if self._stepping:
            self._book(self._run.done(self.clock.now))
        self.alive = False
        self._version += 1
        batch = [(running.flight, running.said) for running in (*self._running.values(), *self._joining)]
        return [*batch, *((flight, None) for flight in self._legs.values())]

    # ---- the batch -------------------------------------------------------------------------------------------------

    def _turn(self, version: int) -> None:
        """The end of the run, or the beginning where there is none."""
        if version != self._version or not self.alive:
            return
        if self._stepping:
            self._book(self._run.count)
            self._stepping = False
        for running in self._joining:
            self._join(running)
        self._joining.clear()
        if self._intake.waiting:
            self._expire()
        scheduler, pool = self._scheduler, self.pool
        count = len(scheduler)
        self._version += 1
        if not count:
            self._planned, self._stalled = None, False
            self._admit()
            self._begin(1, 0)
            return
        steps = scheduler.steps_to_end() if self._merge else 1
        free = pool.free
        fits = count * (steps // pool.block_size + 1) <= free or scheduler.growth(steps) <= free
        if fits and self._merge:
            self._planned, self._stalled = None, False
            if self._intake.waiting:
                scheduler.plan(self)  # takes the blocks of the next step, which come before the line
                self._admit()
                if scheduler.growth(steps) > pool.free:  # who was let in has taken what later steps need
                    steps = 1
        else:
            steps = 1
            plan = scheduler.plan(self)
            self._planned, self._stalled = plan.run, bool(plan.stalled)
            self._admit()
            count = len(plan.run)
        self._begin(steps, count)

    def _begin(self, steps: int, count: int) -> None:
        """So many steps of `count` sequences, of which there may be none."""
        if count:
            self._start(steps, count, 0.0)

    def _start(self, steps: int, count: int, more_s: float) -> None:
        """`more_s`: of the first step, for what is computed beside the batch."""
        factor, law = self._factor(), self.law
        context = self._context if self._planned is None else sum(map(self._scheduler.tokens, self._planned))
        first_s = factor * (law.a + law.b * count + law.c * (context + count) + more_s)
        self._run = Steps(self.clock.now, steps, first_s, factor * law.c * count)
        self._stepping = True
        self.clock.at(self._run.end(steps), self._turn, self._version)

    def _cut(self) -> None:
        """The run ends with the step that runs: something is to be decided."""
        steps = self._run.running(self.clock.now)
        if steps < self._run.count:
            self._run.count = steps
            self._version += 1
            self.clock.at(self._run.end(steps), self._turn, self._version)

    def _book(self, steps: int) -> None:
        """So many steps of the run are over."""
        if not steps:
            return
        seconds = self._run.seconds(steps)
        self.busy_s += seconds
        self.steps += steps
        if self._planned is None:
            count = len(self._scheduler)
            ended = self._scheduler.fast_forward(self, steps)
        else:
            count = len(self._planned)
            self._scheduler.advance(self._planned, steps)
            sequences = [self._running[name].sequence for name in self._planned]
            ended = [sequence.id for sequence in sequences if sequence.tokens >= sequence.limit]
        self.sequence_s += count * seconds
        self._context += steps * count
        for name in ended:
            self._end(name)

    def _join(self, running: Running) -> None:
        sequence = running.sequence
        if sequence.tokens >= sequence.limit:  # its first token was its last
            self.pool.release(running.table)
            self.front.ended(running.flight)
            return
        self._running[sequence.id] = running
        self._scheduler.join(sequence)
        self._context += sequence.tokens

    def _end(self, name: SequenceId) -> None:
        running = self._running.pop(name)
        self._context -= running.sequence.tokens
        self._scheduler.leave(name)
        self.pool.release(running.table)
        self.front.ended(running.flight)

    # ---- the line --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while not self._stalled:
            reservation = self._intake.admit(len(self._running) + len(self._joining), self.clock.now)
            if reservation is None:
                break
            self._granted(self._legs[reservation.leg.key], reservation.cached)

    def _granted(self, flight: Flight, cached: int) -> None:
        """It has its blocks; `cached`: tokens whose KV they hold already."""
        flight.ticket = True
        self.front.granted(flight)

    def _roomy(self, flight: Flight) -> bool:
        """Whether the leg gets its blocks at the end of this step whatever the run takes until its own end, so that the
        run need not be cut for it. Where contents matter it is: what is found may be given away meanwhile."""
        if self._named or self._planned is not None or len(self._intake.waiting) > 1:
            return False
        size = self.pool.block_size
        most = len(self._scheduler) * (self._run.count // size + 1) + blocks_needed(flight.leg, size).total
        return most <= self.pool.free

    def _admit_within(self, version: int) -> None:
        if self._intake.waiting and self.alive:
            if version == self._version and self._stepping:
                self._admit()
            elif not self._stepping:
                self._turn(self._version)

    def _expire(self) -> None:
        """Who has waited for too long tries elsewhere."""
        if self.clock.now < self._look_at:
            return
        self._look_at = self.clock.now + _LOOK_S
        for key, _ in self._intake.overdue(self.clock.now):
            flight = self._legs.get(key)
            if flight is not None:
                self.cancel(flight)
                self.front.refused(flight)

    # ---- Blocks, for the scheduler ---------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Blocks that can be given away now."""
        return self.pool.free

    def grow(self, sequence: SequenceId) -> None:
        """One more block for this sequence."""
        self._running[sequence].table.extend(self.pool.allocate(1))

    def preempt(self, sequence: SequenceId) -> None:
        """Take back the blocks of a sequence; the router places it again."""
        running = self._running.pop(sequence)
        self._context -= running.sequence.tokens
        self.pool.release(running.table)
        self.preemptions += 1
        self.front.preempted(running.flight, running.said)
