"""Workers in virtual time for `placement.py`: the product's block pools, prefill scheduler, prefix feeds and step fits.

Simulated are the model (a step takes what a law says, give or take 5 %) and the decode batch (merged steps between
events).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from baton.engine.block_pool import BlockPool
from baton.engine.prefill_scheduler import Chunk, PrefillScheduler
from baton.engine.prefix_feed import PrefixFeed
from baton.proto import worker_pb2 as pb
from baton.proto.kv_layout import block_count
from baton.proto.leg import LegKey as WorkerLegKey
from baton.proto.step_time import StepTime, StepTimeFit, prefill_features
from baton.router.life_messages import LegKey, Peer
from baton.router.outstanding import LegId
from baton.router.placer import Site

NOISE = 0.05


@dataclass(frozen=True, slots=True)
class Machine:
    """What the cluster is made of. `pool`: tokens of each worker's KV pool."""

    prefills: int
    decodes: int
    pool: int
    block: int
    step_tokens: int
    chunk_tokens: int  # of prompts that a decode worker computes, in one step
    prefill_law: StepTime
    decode_law: StepTime


@dataclass(slots=True, eq=False)
class Request:
    """One line of the trace, and what became of it. Seconds from the start of the trace."""

    number: int
    at: float
    prompt: Sequence[int]
    output: int
    first_at: float | None = None
    ended_at: float | None = None
    blocks: list[int] = field(default_factory=list)  # on the decode worker

    @property
    def key(self) -> WorkerLegKey:
        """As the workers know it."""
        return str(self.number), 1, 0

    @property
    def leg(self) -> LegId:
        """As the router knows it."""
        return LegId(str(self.number), LegKey(1, 0))

    @property
    def ttft(self) -> float:
        """Of a request that was served."""
        return (self.first_at or 0.0) - self.at

    @property
    def latency(self) -> float:
        """Until the last token; likewise."""
        return (self.ended_at or 0.0) - self.at

    @property
    def tpot(self) -> float:
        """Likewise; 0 where there is one token."""
        return ((self.ended_at or 0.0) - (self.first_at or 0.0)) / max(1, self.output - 1)


class Clock:
    """Events in order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, moment: float, act: Callable[..., None], *arguments: Any) -> None:
        """Call `act` then."""
        heapq.heappush(self._due, (moment, next(self._order), act, arguments))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._due:
            self.now, _, act, arguments = heapq.heappop(self._due)
            act(*arguments)


class Worker:
    """What both kinds have."""

    def __init__(self, clock: Clock, machine: Machine, name: str, law: StepTime, rng: random.Random) -> None:
        self.clock, self.machine, self.law = clock, machine, law
        self.peer = Peer(name, "1")
        self.pool = BlockPool(machine.pool // machine.block, machine.block, True)
        self.feed = PrefixFeed(self.pool)
        self.busy_s = 0.0
        self._fit = StepTimeFit()
        self._rng = rng

    def step_s(self, features: tuple[float, float, float]) -> float:
        """How long such a step takes; the worker learns from it."""
        seconds = self.law.seconds(features) * self._rng.uniform(1 - NOISE, 1 + NOISE)
        self._fit.observe(features, seconds)
        return seconds

    def warm_up(self) -> None:
        """It has run for a while: the law of its steps is known."""
        for number in range(1, 33):
            self.step_s((1.0, float(number), 200.0 * number * (1 + number % 7)))

    def site(self, role: str) -> Site:
        """As the router sees it."""
        law = self._fit.law
        load = pb.Load() if law is None else pb.Load(step_time=pb.StepTime(a=law.a, b=law.b, c=law.c))
        return Site(self.peer, "host", self.welcome(role), load)

    def welcome(self, role: str) -> pb.Welcome:
        """What it says of itself."""
        size = self.machine.block
        step = self.machine.step_tokens if role == "prefill" else self.machine.chunk_tokens
        return pb.Welcome(role=role, block_size=size, total_blocks=self.pool.total, max_batch_tokens=step)


class PrefillWorker(Worker):
    """Prompts in line, and the product's scheduler. `computed(request)` is told of first tokens."""

    def __init__(
        self,
        clock: Clock,
        machine: Machine,
        name: str,
        law: StepTime,
        rng: random.Random,
        computed: Callable[[Request], None],
    ) -> None:
        super().__init__(clock, machine, name, law, rng)
        self._computed = computed
        self._scheduler = PrefillScheduler(self.machine.step_tokens)
        self._line: deque[Request] = deque()
        self._running: dict[WorkerLegKey, tuple[Request, list[int]]] = {}
        self._stepping = False

    def submit(self, request: Request) -> None:
        """A prompt to compute."""
        self._line.append(request)
        self._step()

    def _step(self) -> None:
        if self._stepping:
            return
        while self._line and self._place(self._line[0]):
            self._line.popleft()
        if chunks := self._scheduler.plan():
            seconds = self.step_s(prefill_features([(chunk.start, chunk.stop) for chunk in chunks]))
            self._stepping = True
            self.busy_s += seconds
            self.clock.at(self.clock.now + seconds, self._ran, chunks)

    def _place(self, request: Request) -> bool:
        pool, prompt = self.pool, request.prompt
        shared = pool.match(prompt[:-1], "")
        rest = block_count(len(prompt), pool.block_size) - len(shared)
        if rest > pool.free_after_pin(shared):
            return False
        pool.pin(shared)
        self._running[request.key] = request, shared + pool.allocate(rest)
        cached = len(shared) * pool.block_size
        pool.record_lookup(len(prompt), cached)
        self._scheduler.add(request.key, len(prompt), cached)
        return True

    def _ran(self, chunks: Sequence[Chunk]) -> None:
        self._stepping = False
        complete = self._scheduler.computed(chunks)
        for chunk in chunks:
            request, blocks = self._running[chunk.key]
            self.pool.publish(blocks, request.prompt[: chunk.stop], "")
        for key in complete:
            request, blocks = self._running.pop(key)
            self.pool.release(blocks)
            self._computed(request)
        self._step()


class DecodeWorker(Worker):
    """Reservations in line, and a batch whose steps are merged until somebody joins or ends. While there are prompts to
    compute here, each step has a chunk of them beside the batch. `computed(request)` is told of first tokens."""

    def __init__(
        self,
        clock: Clock,
        machine: Machine,
        name: str,
        rng: random.Random,
        computed: Callable[[Request], None],
        ended: Callable[[Request], None],
    ) -> None:
        super().__init__(clock, machine, name, machine.decode_law, rng)
        self._computed = computed
        self._ended = ended
        self._line: deque[tuple[Request, Callable[[int], None]]] = deque()
        self._left: dict[Request, int] = {}  # steps until the end
        self._joining: list[Request] = []
        self._prompts = PrefillScheduler(machine.chunk_tokens)
        self._computing: dict[WorkerLegKey, Request] = {}
        self._chunks: list[Chunk] = []  # of the step that runs
        self._context = 0
        self._since = self._step_s = 0.0
        self._version = 0
        self._busy = self._turning = False
        self.sequence_s = 0.0

    def reserve(self, request: Request, granted: Callable[[int], None]) -> None:
        """Blocks for all that it can come to hold; `granted` is told how many tokens are cached."""
        self._line.append((request, granted))
        self._admit()

    def _admit(self) -> None:
        while self._line:
            request, granted = self._line[0]
            shared = self.pool.match(request.prompt[:-1], "")
            rest = block_count(len(request.prompt) + request.output, self.pool.block_size) - len(shared)
            if rest > self.pool.free_after_pin(shared):
                return
            self.pool.pin(shared)
            request.blocks = shared + self.pool.allocate(rest)
            cached = len(shared) * self.pool.block_size
            self.pool.record_lookup(len(request.prompt), cached)
            self._line.popleft()
            granted(cached)

    def compute(self, request: Request, cached: int) -> None:
        """Compute the prompt here, in the blocks that it has."""
        self._computing[request.key] = request
        self._prompts.add(request.key, len(request.prompt), cached)
        self._wake()

    def join(self, request: Request) -> None:
        """All KV is here: it decodes from the next step on."""
        self.pool.publish(request.blocks, request.prompt, "")
        self._joining.append(request)
        self._wake()

    def _wake(self) -> None:
        """There is something new for the next step: merged ones end with the one that runs."""
        if self._turning:
            return
        if not self._busy:
            self._turn(self._version)
        elif not self._chunks:
            self._version += 1
            steps = int((self.clock.now - self._since) / self._step_s) + 1
            self.clock.at(self._since + steps * self._step_s, self._turn, self._version)

    def _turn(self, version: int) -> None:
        """The steps since the last turn have run."""
        if version != self._version:
            return
        self._turning = True
        if self._busy:
            self._ran()
        for request in self._joining:
            self._left[request] = request.output - 1
            self._context += len(request.prompt)
        self._joining = []
        self._admit()
        self._chunks = self._prompts.plan()
        self._busy = bool(self._left or self._chunks)
        if self._busy:
            self._since = self.clock.now
            self._step_s = self._next_s()
            self._version += 1
            steps = 1 if self._chunks else min(self._left.values())
            self.clock.at(self._since + steps * self._step_s, self._turn, self._version)
        self._turning = False

    def _next_s(self) -> float:
        batch = (1.0, float(len(self._left)), float(self._context))
        if not self._chunks:
            return self.step_s(batch)
        _, tokens, squares = prefill_features([(chunk.start, chunk.stop) for chunk in self._chunks])
        chunks_s = self.machine.prefill_law.seconds((0.0, tokens, squares))
        return (self.law.seconds(batch) + chunks_s) * self._rng.uniform(1 - NOISE, 1 + NOISE)

    def _ran(self) -> None:
        passed_s = self.clock.now - self._since
        if self._left:
            steps = 1 if self._chunks else min(round(passed_s / self._step_s), min(self._left.values()))
            self.sequence_s += len(self._left) * passed_s
            self._context += steps * len(self._left)
            for request in self._left:
                self._left[request] -= steps
            for request in [request for request, left in self._left.items() if not left]:
                self._end(request)
        complete = self._prompts.computed(self._chunks)
        for chunk in self._chunks:
            request = self._computing[chunk.key]
            self.pool.publish(request.blocks, request.prompt[: chunk.stop], "")
        for key in complete:
            self._computed(self._computing.pop(key))

    def _end(self, request: Request) -> None:
        del self._left[request]
        self._context -= len(request.prompt) + request.output - 1
        self.release(request)
        self._ended(request)

    def release(self, request: Request) -> None:
        """Its blocks stay as prefix cache."""
        self.pool.release(request.blocks)
        request.blocks = []
