"""Workers die, change their roles, come and go while requests run: every request has its end, and nothing is kept."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from baton.cluster.simulator.request import Arrival
from baton.cluster.simulator.run import Simulation
from baton.cluster.simulator.spec import (
    Change,
    Cluster,
    DecodePool,
    Fail,
    LayeredTransfer,
    Overheads,
    PrefillPool,
    Rules,
    Scale,
    Switch,
)
from baton.proto.step_time import StepTime
from baton.router.placement.choose import DECODE, PREFILL, Objectives
from hypothesis import given, settings
from hypothesis import strategies as st

RULES = Rules("least_loaded", "least_loaded", True, Objectives(None, None), 10_000, 120.0, 30.0, 600.0, 50)
TWO = Cluster(
    PrefillPool(2, StepTime(0.01, 1e-4, 1e-9), 200, 256, 2),
    DecodePool(2, StepTime(0.008, 3e-4, 2e-6), 120, 16),
    8,
    LayeredTransfer(0.001, 1e-6, 4),
    RULES,
    Overheads(0.001, 0.001),
)


def load(seed: int, count: int, rate: float) -> list[Arrival]:
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(Arrival(now, rng.randint(1, 200), rng.choice((1, 2, 9, 40, 90))))
    return arrivals


def check(simulation: Simulation, count: int) -> None:
    """All have ended; no worker, gate or placer remembers anybody."""
    workers = dict(simulation.workers)
    outcome = simulation.run()
    assert len(outcome.results) + outcome.results.all_failed == count
    assert not simulation.router.flights
    assert simulation.router.waiting == 0
    for worker in {**workers, **simulation.workers}.values():
        if worker.alive:
            assert worker.idle
            assert worker.pool.used == 0


changes = st.lists(
    st.one_of(
        st.builds(
            Fail,
            st.floats(0.0, 3.0),
            st.sampled_from(("prefill-0", "prefill-1", "decode-0", "decode-1")),
            st.floats(0.1, 1.0),
        ),
        st.builds(Scale, st.floats(0.0, 3.0), st.sampled_from(("prefill", "decode")), st.integers(1, 4), st.just(0.3)),
    ),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), changes, st.sampled_from((20.0, 80.0)))
def test_whatever_happens_to_workers_every_request_ends_once(seed: int, happens: list[Change], rate: float) -> None:
    check(Simulation(replace(TWO, changes=happens), load(seed, 60, rate), seed=seed), 60)


def test_a_decode_worker_that_dies_costs_retries_and_time() -> None:
    arrivals = load(1, 100, 30.0)
    calm = Simulation(TWO, arrivals).run().results
    broken = Simulation(replace(TWO, changes=[Fail(1.0, "decode-0", None)]), arrivals).run().results
    assert calm.retries == 0
    assert broken.retries > 0
    assert broken.values("e2e").mean() > calm.values("e2e").mean()


def test_a_worker_that_switches_serves_the_other_pool() -> None:
    made = replace(TWO, changes=[Switch(0.5, "prefill-1", 0.2)], sample_s=0.1)
    outcome = Simulation(made, load(2, 200, 40.0)).run()
    counts = [(row.prefill_workers, row.decode_workers) for row in outcome.timeline]
    assert counts[0] == (2, 2)
    assert (1, 2) in counts  # it drains and changes
    assert counts[-1] == (1, 3)
    assert len(outcome.results) == 200


def test_a_pool_that_grows_waits_less() -> None:
    arrivals = load(3, 400, 90.0)
    small = Simulation(TWO, arrivals).run().results.values("ttft").mean()
    made = replace(TWO, changes=[Scale(0.2, "prefill", 6, 0.1), Scale(0.2, "decode", 8, 0.1)])
    assert Simulation(made, arrivals).run().results.values("ttft").mean() < 0.7 * small


def test_without_any_worker_requests_wait_for_one() -> None:
    made = replace(
        TWO, changes=[Fail(0.0, "prefill-0", 2.0), Fail(0.0, "prefill-1", None)], rules=replace(RULES, attempts=3)
    )
    outcome = Simulation(made, [Arrival(0.5, 30, 3)]).run()
    assert 1.5 < outcome.results.values("ttft")[0] < 1.6


def test_more_than_the_router_takes_in_are_refused_with_a_hint() -> None:
    made = replace(TWO, rules=replace(RULES, max_inflight=5))
    outcome = Simulation(made, load(4, 100, 200.0)).run()
    assert outcome.results.all_refused > 0
    assert len(outcome.results) + outcome.results.all_refused == 100
    assert 0.1 <= outcome.results.hints_s / outcome.results.all_refused <= 10


def test_what_no_worker_could_hold_is_told_apart() -> None:
    outcome = Simulation(TWO, [Arrival(0.0, 20, 5), Arrival(0.1, 2000, 5), Arrival(0.2, 100, 900)]).run()
    assert outcome.results.summary({})["requests"]["too_long"] == 2
    assert len(outcome.results) == 1


@pytest.mark.parametrize(
    ("prefill", "decode"), [*((name, name) for name in PREFILL), ("round_robin", "transfer_aware")]
)
def test_every_policy_serves_everything(prefill: str, decode: str) -> None:
    assert set(DECODE) - set(PREFILL) == {"transfer_aware"}
    made = replace(TWO, rules=replace(RULES, prefill_placement=prefill, decode_placement=decode))
    check(Simulation(made, load(6, 80, 40.0)), 80)
