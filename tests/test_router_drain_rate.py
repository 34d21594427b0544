"""The retry hint: as long as it takes until as many requests have ended as there are too many."""

from __future__ import annotations

import pytest
from baton.router.drain_rate import DrainRate
from hypothesis import given
from hypothesis import strategies as st


@given(st.floats(0.5, 20), st.floats(5, 100), st.integers(1, 5))
def test_the_hint_is_the_surplus_by_the_rate(rate: float, seconds: float, surplus: int) -> None:
    drained = DrainRate(100.0)
    for number in range(1, int(rate * seconds) + 1):
        drained.ended(100.0 + number / rate)
    now = 100.0 + int(rate * seconds) / rate
    assert drained.per_second(now) == pytest.approx(rate, rel=0.15)
    assert drained.hint_s(surplus, now) == pytest.approx(min(max(surplus / rate, 0.1), 10), rel=0.15)


def test_where_nothing_ends_the_hint_is_the_longest() -> None:
    drained = DrainRate(0.0)
    assert drained.hint_s(1, 0.0) == drained.hint_s(1, 50.0) == 10.0
    drained.ended(50.0)
    assert drained.hint_s(1, 50.0) < 10.0
    assert drained.hint_s(1, 500.0) == 10.0


def test_a_fast_router_still_asks_for_a_moment() -> None:
    drained = DrainRate(0.0)
    for number in range(1000):
        drained.ended(number / 1000)
    assert drained.hint_s(1, 1.0) == 0.1
