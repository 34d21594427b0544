"""A whole run: requests through the router to the workers, while workers die, change their roles, come and go."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ...router.life_messages import Peer
from ...router.placement.disaggregation import ALWAYS
from .aggregated import AggregatedWorker, ComputingWorker
from .clock import Clock
from .decode import DecodeWorker
from .front import Router
from .prefill import PrefillWorker
from .request import Arrival
from .results import Results
from .spec import Cluster, Fail, Role, Scale, Switch
from .timeline import Row
from .worker import Worker

_ROLES: tuple[Role, Role] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to. Busy seconds are those in which a worker computed, by name."""

    results: Results
    timeline: list[Row]
    ended_s: float  # virtual time of the last event
    events: int
    busy_s: dict[str, float]
    steps: dict[str, int]
    prefix_query_tokens: int
    prefix_hit_tokens: int
    worker_s: dict[Role, float] = field(default_factory=dict)  # seconds of workers that take requests or drain


Observer = Callable[["Simulation"], None]


class Simulation:
    """Deterministic by `seed`. `arrivals` come in order of time and are taken one by one. `named`: they have contents.
    `every`: called every so many seconds of virtual time while requests come (an autoscaler, a progress bar)."""

    def __init__(
        self,
        cluster: Cluster,
        arrivals: Iterable[Arrival],
        *,
        seed: int = 0,
        named: bool = False,
        warm_up: int = 0,
        merge: bool = True,
        every: tuple[float, Observer] | None = None,
    ) -> None:
        self.cluster, self.clock = cluster, Clock()
        self.results = Results(warm_up)
        self.router = Router(self.clock, cluster, self.results, seed)
        self.router.drained = self._drained
        self.workers: dict[str, Worker] = {}  # of all that take requests or drain
        self.starting: dict[Role, int] = dict.fromkeys(_ROLES, 0)
        self.arrived = self.prompt_tokens = self.output_tokens = 0
        self._named, self._merge, self._every = named and cluster.prefix_cache, merge, every
        computing = ComputingWorker if cluster.disaggregation != ALWAYS else DecodeWorker
        self._kind = AggregatedWorker if cluster.aggregated else computing
        self._incarnations, self._seed = 0, seed
        self._names: dict[Role, int] = dict.fromkeys(_ROLES, 0)
        self.gone: list[Worker] = []  # that took requests and do no more; after the run: all
        self._after: dict[str, Switch] = {}
        self._born: dict[str, float] = {}
        self._worker_s: dict[Role, float] = dict.fromkeys(_ROLES, 0.0)
        self._timeline: list[Row] = []
        self._more = True
        sizes = (0 if cluster.aggregated else cluster.prefill.replicas, cluster.decode.replicas)
        for role, size in zip(_ROLES, sizes, strict=True):
            for _ in range(size):
                self._add((role, self._name(role)))
        for change in cluster.changes:
            self.clock.at(change.at, self._change, change)
        self._arrivals: Iterator[Arrival] = iter(arrivals)

    def run(self) -> Outcome:
        """Until all requests have ended."""
        self._next(None)
        if self.cluster.sample_s is not None:
            self._sample(None)
        if self._every is not None:
            self.clock.at(self._every[0], self._observe)
        self.clock.run()
        for name in list(self.workers):
            self._remove(name)
        everybody = self.gone
        return Outcome(
            self.results,
            self._timeline,
            self.clock.now,
            self.clock.events,
            _summed(everybody, lambda worker: worker.busy_s),
            {name: int(steps) for name, steps in _summed(everybody, lambda worker: worker.steps).items()},
            sum(worker.pool.prefix_query_tokens for worker in everybody if worker.role == "prefill"),
            sum(worker.pool.prefix_hit_tokens for worker in everybody if worker.role == "prefill"),
            self._worker_s,
        )

    def pool(self, role: Role) -> list[Worker]:
        """Its workers that take requests."""
        return [worker for worker in self.workers.values() if worker.role == role and not worker.draining]

    def scale(self, role: Role, replicas: int, takes_s: float) -> None:
        """As Scale, now."""
        ready = self.pool(role)
        for _ in range(replicas - len(ready) - self.starting[role]):
            self.starting[role] += 1
            self.clock.at(self.clock.now + takes_s, self._started, role)
        for worker in reversed(ready[replicas:] if replicas < len(ready) else []):
            self.router.worker_drains(worker)

    # ---- requests --------------------------------------------------------------------------------------------------

    def _next(self, arrival: Arrival | None) -> None:
        if arrival is not None:
            self.router.arrive(self.arrived, arrival)
            self.arrived += 1
            self.prompt_tokens += arrival.prompt
            self.output_tokens += arrival.output
        following = next(self._arrivals, None)
        if following is None:
            self._more = False
        else:
            self.clock.at(following.at, self._next, following)

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _name(self, role: Role) -> str:
        self._names[role] += 1
        return f"{role}-{self._names[role] - 1}"

    def _add(self, what: tuple[Role, str]) -> None:
        role, name = what
        self._incarnations += 1
        peer, rng = Peer(name, str(self._incarnations)), random.Random(f"{self._seed} {name} {self._incarnations}")
        shared = (self.clock, self.router, self.cluster, peer, rng, self._named)
        if role == "prefill":
            worker: Worker = PrefillWorker(*shared)
        else:
            worker = self._kind(*shared, merge=self._merge)
        self.workers[name] = worker
        self._born[name] = self.clock.now
        self.router.worker_up(worker)

    def _started(self, role: Role) -> None:
        self.starting[role] -= 1
        self._add((role, self._name(role)))

    def _remove(self, name: str) -> None:
        worker = self.workers.pop(name)
        self.gone.append(worker)
        self._worker_s[worker.role] += self.clock.now - self._born.pop(name)

    def _change(self, change: object) -> None:
        match change:
            case Fail(_, name, down_s) if (worker := self.workers.get(name)) is not None:
                self._remove(name)
                self.router.worker_lost(worker)
                if down_s is not None:
                    self.clock.at(self.clock.now + down_s, self._add, (worker.role, name))
            case Switch(_, name, _) if (worker := self.workers.get(name)) is not None and not worker.draining:
                self._after[name] = change
                self.router.worker_drains(worker)
            case Scale(_, role, replicas, takes_s):
                self.scale(role, replicas, takes_s)

    def _drained(self, worker: Worker) -> None:
        name = worker.peer.worker_id
        if self.workers.get(name) is not worker:
            return
        self._remove(name)
        switch = self._after.pop(name, None)
        if switch is not None:
            other: Role = "decode" if worker.role == "prefill" else "prefill"
            self.clock.at(self.clock.now + switch.takes_s, self._add, (other, name))

    # ---- watching --------------------------------------------------------------------------------------------------

    def _observe(self, _: None) -> None:
        if self._every is not None and (self._more or self.router.flights):
            self._every[1](self)
            self.clock.at(self.clock.now + self._every[0], self._observe)

    def _sample(self, _: None) -> None:
        prefills = [worker for worker in self.workers.values() if isinstance(worker, PrefillWorker)]
        decodes = [worker for worker in self.workers.values() if isinstance(worker, DecodeWorker)]
        row = Row(
            self.clock.now,
            self.router.waiting,
            sum(worker.waiting for worker in prefills),
            sum(worker.running for worker in prefills),
            sum(worker.waiting for worker in decodes),
            sum(worker.running for worker in decodes),
            _used(prefills),
            _used(decodes),
            len(self.pool("prefill")),
            len(self.pool("decode")),
        )
        self._timeline.append(row)
        if self.cluster.sample_s is not None and (self._more or self.router.flights):
            self.clock.at(self.clock.now + self.cluster.sample_s, self._sample)


def simulate(
    cluster: Cluster, arrivals: Iterable[Arrival], *, seed: int = 0, named: bool = False, warm_up: int = 0
) -> Outcome:
    """One run."""
    return Simulation(cluster, arrivals, seed=seed, named=named, warm_up=warm_up).run()


def _used(workers: Iterable[Worker]) -> float:
    pools = [worker.pool for worker in workers]
    return sum(pool.used for pool in pools) / max(1, sum(pool.total for pool in pools))


def _summed(workers: Iterable[Worker], value: Callable[[Worker], float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for worker in workers:
        sums[worker.peer.worker_id] = sums.get(worker.peer.worker_id, 0.0) + value(worker)
    return sums
