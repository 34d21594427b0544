"""Conditional disaggregation is never much worse than always or never: whole runs of the simulator."""

from __future__ import annotations

import pytest
from baton.benchmarks.disaggregation import KINDS, RATES, Row, measure, work

SECONDS = 20.0


def run(kind: str, prefills: int, rate: float, disaggregation: str) -> Row:
    return measure(kind, prefills, rate, disaggregation, SECONDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefills", RATES)
@pytest.mark.parametrize("load", ["quiet", "busy"])
def test_it_is_never_5_percent_worse_than_the_better_of_both(kind: str, prefills: int, load: str) -> None:
    rate = RATES[prefills][kind][load == "busy"]
    conditional = run(kind, prefills, rate, "conditional")
    always, never = (run(kind, prefills, rate, how) for how in ("always", "never"))
    assert (always.on_decode, never.on_decode) == (0.0, 1.0)
    assert conditional.latency_mean <= 1.05 * min(always.latency_mean, never.latency_mean)


def test_it_is_better_than_both_where_each_way_is_right_for_some() -> None:
    rate = RATES[1]["mixed"][1]
    conditional = run("mixed", 1, rate, "conditional")
    assert 0.1 < conditional.on_decode < 0.9
    for how in ("always", "never"):
        assert conditional.latency_mean < 0.95 * run("mixed", 1, rate, how).latency_mean


def test_the_work_is_what_it_says() -> None:
    lengths = {kind: [request.prompt for request in work(kind, 20.0, 60.0)] for kind in KINDS}
    assert 15 < sum(length > 3000 for length in lengths["summaries"]) / 60 <= 20
    assert 0.1 < sum(length > 3000 for length in lengths["mixed"]) / len(lengths["mixed"]) < 0.2
    assert max(lengths["chat"]) <= 3000
