"""How far workers' machines are from each other, by what transfers took."""

from __future__ import annotations

import pytest
from baton.router.transfer_rates import TransferRates


def test_distances_are_multiples_of_the_shortest_measured_way() -> None:
    rates = TransferRates()
    assert rates.distances("p", ["d1", "d2"]) == [1.0, 1.0]
    rates.observe("p", "d1", 1000, 0.1)
    rates.observe("p", "d2", 1000, 0.4)
    rates.observe("q", "d1", 1000, 9.0)
    assert rates.distances("p", ["d2", "d1", "d3"]) == pytest.approx([4.0, 1.0, 1.0])
    assert rates.distances("p", ["d2"]) == [1.0]


def test_what_moved_nothing_or_took_no_time_says_nothing() -> None:
    rates = TransferRates()
    rates.observe("p", "d1", 0, 5.0)
    rates.observe("p", "d1", 5, 0.0)
    rates.observe("p", "d2", 5, 0.1)
    assert rates.distances("p", ["d1", "d2"]) == [1.0, 1.0]


def test_old_measurements_fade_and_large_ones_weigh_more() -> None:
    rates = TransferRates()
    rates.observe("p", "d1", 1000, 10.0)
    for _ in range(200):
        rates.observe("p", "d1", 1000, 0.1)
        rates.observe("p", "d2", 1000, 0.1)
    assert rates.distances("p", ["d1", "d2"]) == pytest.approx([1.0, 1.0], rel=1e-3)
