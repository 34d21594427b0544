"""Plans decided by simulation: the cheapest that holds, as an exhaustive search of the same space finds it."""

from __future__ import annotations

import pytest
from baton.benchmarks.plan_search import CONFIG, WORKLOADS, measure
from baton.cluster import config_load
from baton.cluster.planner.search import Search
from baton.cluster.planner.setup import site
from baton.cluster.planner.workload import from_config, slo_of
from baton.cluster.simulator.confirm import arrivals_of, decide, exhaust, judge


@pytest.mark.parametrize("name", ["chat", "idle"])
def test_a_decision_costs_what_the_cheapest_plan_costs(name: str) -> None:
    row = measure(name, most=2, requests=300)
    assert row.ratio == 1.0
    assert row.decided_gpus > 0
    assert row.plans == 72


@pytest.mark.slow
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_six_workloads_are_decided_within_five_percent(name: str) -> None:
    row = measure(name, most=4, requests=2000)
    assert row.ratio is not None
    assert row.ratio <= 1.05
    assert row.closed_form_s + row.decided_s < 30


def test_limits_that_nothing_keeps_leave_no_plan_and_name_what_is_missed() -> None:
    config = config_load.load(str(CONFIG), [*WORKLOADS["idle"], "slo={ttft: {p99: 1ms}}"])
    search, workload, slo = Search(site(config), 4, (1,)), from_config(config), slo_of(config)
    plans = list(search.all_plans("disaggregated", workload, slo, 2))
    arrivals = arrivals_of(workload, requests=100)
    assert decide(plans, slo, arrivals)[0] is None
    assert exhaust(plans, slo, arrivals)[0] is None
    assert "TTFT p99" in judge(plans[0], slo, arrivals).misses[0]
