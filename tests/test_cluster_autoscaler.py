"""PB-01, PB-02, PB-03: pools follow load; no data, no load, impossible limits and nonsense are told apart."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from baton.cluster.autoscaler import Autoscaler, Bounds, Role, decode_capacity, infeasible
from baton.cluster.simulator import synthetic
from baton.cluster.simulator.autoscaling import Scaling
from baton.cluster.simulator.request import Arrival
from baton.cluster.simulator.run import Simulation
from baton.proto.errors import ConfigError
from baton.proto.step_time import StepTime
from baton.tests.test_simulator_changes import TWO

PREFILL = Bounds(1, 8, 0.5, 1000.0)
LAW = StepTime(0.008, 3e-4, 2e-6)


def scaler(patience_s: float = 60.0) -> Autoscaler:
    return Autoscaler({"prefill": PREFILL}, patience_s)


def sizes(one: Autoscaler, loads: list[float | None], present: int = 4, starting: int = 0) -> list[int]:
    """The pool takes on each size at once; a decision every 30 s."""
    found = []
    for number, load in enumerate(loads):
        present = one.decide(30.0 * number, {"prefill": load}, {"prefill": present}, {"prefill": starting})["prefill"]
        found.append(present)
    return found


def test_pb_01_no_load_comes_to_the_least_and_no_data_changes_nothing() -> None:
    assert sizes(scaler(), [0.0, 0.0, 0.0, 0.0])[-1] == 1
    for nothing in (None, math.nan, math.inf, -1.0):
        assert sizes(scaler(), [nothing] * 5) == [4] * 5
    assert sizes(scaler(), [0.0, 0.0, 0.0, None, 2000.0]) == [4, 4, 1, 1, 4]


def test_pb_01_one_sample_is_enough_to_grow_and_not_to_shrink() -> None:
    assert sizes(scaler(), [3900.0]) == [8]
    assert sizes(scaler(), [400.0]) == [4]


def test_load_that_falls_for_a_moment_takes_no_worker_away() -> None:
    assert sizes(scaler(), [2000.0, 2000.0, 2000.0, 500.0, 2000.0, 500.0]) == [4] * 6
    assert sizes(scaler(), [2000.0, 500.0, 500.0, 500.0, 500.0, 500.0])[-1] == 1


def test_nothing_is_added_while_workers_start() -> None:
    assert sizes(scaler(), [4000.0, 4000.0], present=2, starting=2) == [4, 6]
    one = scaler()
    assert one.decide(0.0, {"prefill": 4000.0}, {"prefill": 2}, {"prefill": 2})["prefill"] == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0, 4, 0.5, 1.0), "least"),
        ((3, 2, 0.5, 1.0), "least"),
        ((1, 2, 0.0, 1.0), "use"),
        ((1, 2, 1.5, 1.0), "use"),
        ((1, 2, 0.5, 0.0), "capacity"),
        ((1, 2, 0.5, math.nan), "capacity"),
        ((1, 2, 0.5, -3.0), "capacity"),
    ],
)
def test_pb_02_a_worker_without_capacity_is_a_mistake(fields: tuple[int, int, float, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Bounds(*fields)


def test_pb_02_limits_of_zero_and_laws_without_time_are_mistakes() -> None:
    for limit in (0.0, -0.1):
        with pytest.raises(ConfigError, match="more than 0"):
            decode_capacity(LAW, 100.0, 16, limit)
    with pytest.raises(ConfigError, match="no time"):
        decode_capacity(StepTime(0.0, 0.0, 0.0), 100.0, 16, None)
    most = decode_capacity(LAW, 100.0, 16, 0.011)
    assert most == pytest.approx(6 / (0.008 + 6 * 5e-4))
    assert decode_capacity(LAW, 100.0, 16, None) == pytest.approx(16 / (0.008 + 16 * 5e-4))


def test_pb_03_what_no_number_of_workers_cures_is_said_and_adds_none() -> None:
    assert infeasible("TTFT", 0.2, 0.1) is None
    assert "infeasible" in (infeasible("TTFT", 0.05, 0.1) or "")
    with pytest.raises(ConfigError, match="infeasible"):
        decode_capacity(LAW, 100.0, 16, 0.001)
    assert sizes(scaler(), [100.0] * 5)[-1] == 1  # replicas follow load whatever the latency is


def test_a_simulated_cluster_follows_its_load_up_and_down() -> None:
    rng = random.Random(1)
    times = itertools.takewhile(lambda at: at < 240.0, synthetic.diurnal(30.0, 0.9, 120.0, rng))
    arrivals = [Arrival(at, 100, 30) for at in times]
    bounds: dict[Role, Bounds] = {
        "prefill": Bounds(1, 8, 0.6, 5000.0),
        "decode": Bounds(1, 8, 0.6, decode_capacity(LAW, 115.0, 16, None)),
    }
    scaling = Scaling(Autoscaler(bounds, 10.0), 2.0, 1.0)
    still = Simulation(replace(TWO, sample_s=1.0), arrivals).run()
    moved = Simulation(replace(TWO, sample_s=1.0), arrivals, every=(2.0, scaling)).run()
    counts = [row.decode_workers for row in moved.timeline]
    assert max(counts) > 3 * min(counts)
    assert len(moved.results) == len(arrivals)
    assert moved.results.values("e2e").mean() < still.results.values("e2e").mean()
    assert moved.worker_s["decode"] < 240.0 * max(counts) * 0.8
