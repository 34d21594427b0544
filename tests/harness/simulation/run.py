"""Runs scenarios, finds those that break an invariant, cuts them down and says what happened."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.kv_transfer import sender

from .cluster import Cluster
from .faults import Faults
from .scenario import Scenario, scenario, with_luck
from .send_link import SendLink
from .world import CLOCK, Violation, virtual_time

SETTLE_S = 60.0  # from the last disturbance to rest
_CALM_S = 3.0  # from the last end of a request to rest, where nothing went wrong
_MAX_STEPS = 200_000
_LUCKS = 5  # orders in which a smaller scenario is tried


@dataclass(frozen=True, slots=True)
class Failure:
    """A scenario that broke an invariant."""

    scenario: Scenario
    error: Exception
    stories: str

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}\n{self.scenario}\n{self.stories}"


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Within it, the product's modules run on virtual time, its senders dial simulated links, and nothing is logged."""
    real = vars(sender)["SendLink"]
    vars(sender)["SendLink"] = SendLink
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with virtual_time():
            yield
    finally:
        logging.disable(before)
        vars(sender)["SendLink"] = real


def run(one: Scenario) -> Failure | None:
    """One scenario from its start to rest; None: everything held. To be called within `simulated`."""
    cluster = Cluster(one)
    Faults(cluster, one.faults)
    CLOCK.world = cluster.world
    try:
        _to_rest(cluster)
    except Exception as error:
        return Failure(one, error, _stories(cluster))
    return None


def told(one: Scenario) -> str:
    """The stories of a scenario that holds everything; likewise. Raises Violation."""
    cluster = Cluster(one)
    Faults(cluster, one.faults)
    CLOCK.world = cluster.world
    _to_rest(cluster)
    return _stories(cluster)


def _to_rest(cluster: Cluster) -> None:
    world = cluster.world
    while True:
        alive = all(world.step() for _ in range(8))
        if cluster.over and not cluster.problem():
            return
        if cluster.over and not cluster.faulty and world.now > cluster.last_end + _CALM_S:
            raise Violation(f"no rest {_CALM_S} s after the last request ended: {cluster.problem()}")
        if not alive or world.now > world.disturbed + SETTLE_S or world.steps > _MAX_STEPS:
            if cluster.leave_waiting():
                continue
            after_s = world.now - world.disturbed
            raise Violation(f"no rest {after_s:g} s after the last disturbance: {cluster.problem()}")


def _stories(cluster: Cluster) -> str:
    found = [cluster.lives.stories.find(name) for name in cluster.clients]
    return "\n".join(str(story) for story in found if story is not None)


def search(seeds: Sequence[int]) -> Failure | None:
    """The first of these seeds that fails, cut down."""
    with simulated():
        for seed in seeds:
            if (failure := run(scenario(seed))) is not None:
                return shrink(failure)
    return None


def shrink(failure: Failure) -> Failure:
    """Leaves out requests and faults as long as it still fails, in this order of events or another."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(failure.scenario):
            if (found := _fails(smaller)) is not None:
                failure, changed = found, True
                break
    return failure


def _smaller(one: Scenario) -> Iterator[Scenario]:
    for index in range(len(one.faults)):
        yield dataclasses.replace(one, faults=one.faults[:index] + one.faults[index + 1 :])
    for index, ask in enumerate(one.asks):
        if len(one.asks) > 1 and not any(fault.who == ask.request_id for fault in one.faults):
            yield dataclasses.replace(one, asks=one.asks[:index] + one.asks[index + 1 :])
    for index, ask in enumerate(one.asks):
        if ask.n > 1:
            plain = dataclasses.replace(ask, n=ask.n - 1)
            yield dataclasses.replace(one, asks=(*one.asks[:index], plain, *one.asks[index + 1 :]))


def _fails(one: Scenario) -> Failure | None:
    lucks = [one.luck, *(one.seed * 1000 + turn for turn in range(1, _LUCKS))]
    tries = (run(with_luck(one, luck)) for luck in lucks)
    return next((found for found in tries if found is not None), None)
