"""What to start, drain or stop so that the workers become what is wanted: pure, time comes as an argument.

A worker is `starting` until its self-test has passed, then `ready`; `draining` takes no new requests; `stopping` is on
its way out; `dead` has ended and waits for its restart, whose delay doubles with each death that follows soon.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

State = Literal["starting", "ready", "draining", "stopping", "dead"]
POOLS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Observed:
    """One worker as the controller sees it."""

    state: State
    since: float  # monotonic seconds: when it entered the state
    failures: int = 0  # deaths in a row, each soon after the worker was ready, or before


@dataclass(frozen=True, slots=True)
class Start:
    """Start this worker under a new incarnation."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Let it finish its requests, then stop it."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop it now: nothing runs on it."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Forget:
    """It has ended and is not wanted."""

    worker_id: str


Action = Start | Drain | Stop | Forget


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays between restarts, in seconds; a worker that was ready for `longest` counts as healthy again."""

    first: float
    longest: float

    def delay(self, failures: int) -> float:
        """Before the restart that follows `failures` deaths in a row."""
        return 0.0 if failures == 0 else min(self.longest, self.first * 2.0 ** min(failures - 1, 30))

    def died(self, worker: Observed, now: float) -> Observed:
        """The worker after its death."""
        healthy = worker.state in ("ready", "draining") and now - worker.since >= self.longest
        return Observed("dead", now, 1 if healthy else worker.failures + 1)


def reconcile(
    wanted: Iterable[str], observed: Mapping[str, Observed], now: float, backoff: Backoff
) -> tuple[list[Action], float | None]:
    """The actions to take now, and the time at which to look again (None: only when something changes)."""
    wanted = set(wanted)
    actions: list[Action] = []
    wake: list[float] = []
    for worker_id in sorted(wanted | set(observed)):
        worker = observed.get(worker_id)
        if worker is None:
            actions.append(Start(worker_id))
        elif worker_id not in wanted:
            actions += _unwanted(worker_id, worker)
        elif worker.state == "dead":
            due = worker.since + backoff.delay(worker.failures)
            if due <= now:
                actions.append(Start(worker_id))
            else:
                wake.append(due)
    return actions, min(wake, default=None)


def _unwanted(worker_id: str, worker: Observed) -> list[Action]:
    if worker.state == "dead":
        return [Forget(worker_id)]
    if worker.state == "ready":
        return [Drain(worker_id)]
    return [Stop(worker_id)] if worker.state == "starting" else []


def enter(worker: Observed, state: State, now: float) -> Observed:
    """The worker in another state."""
    return replace(worker, state=state, since=now)


def pool_of(worker_id: str) -> str:
    """prefill | decode. Raises ValueError for an id that is not ours."""
    match = re.fullmatch(r"(prefill|decode)-\d+", worker_id)
    if match is None:
        raise ValueError(f"{worker_id!r} is no worker id; ids look like prefill-0 and decode-1")
    return match[1]


def members(pool: str, wanted: Iterable[str]) -> list[str]:
    """The wanted workers of a pool, by number."""
    return sorted((w for w in wanted if pool_of(w) == pool), key=lambda w: int(w.rpartition("-")[2]))


def scaled(wanted: Iterable[str], present: Collection[str], pool: str, replicas: int) -> frozenset[str]:
    """The wanted workers when `pool` has `replicas`: the highest numbers leave, the lowest free ones come.

    The names of workers that are still `present`, such as draining ones, are not given out again.
    """
    others = {worker for worker in wanted if pool_of(worker) != pool}
    mine = set(members(pool, wanted)[:replicas])
    free = (name for number in itertools.count() if (name := f"{pool}-{number}") not in mine and name not in present)
    mine.update(itertools.islice(free, replicas - len(mine)))
    return frozenset(others | mine)
