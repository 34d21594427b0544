"""The law of step times: what a prompt costs however it is cut, and that a worker finds its own coefficients."""

from __future__ import annotations

import random

import pytest
from baton.proto.step_time import StepTime, StepTimeFit, decode_features, prefill_features
from hypothesis import given
from hypothesis import strategies as st

COEFFICIENT = st.floats(0, 1, allow_subnormal=False).map(lambda x: round(x, 3))


def test_a_prompt_costs_the_same_however_it_is_cut_but_for_the_steps() -> None:
    law = StepTime(0.01, 0.001, 1e-6)
    whole = law.seconds(prefill_features([(64, 1000)]))
    parts = [law.seconds(prefill_features([part])) for part in ((64, 300), (300, 301), (301, 1000))]
    assert sum(parts) == pytest.approx(whole + 2 * law.a)
    assert prefill_features([(0, 10), (5, 10)]) == (1.0, 15.0, 175.0)
    assert decode_features([10, 20]) == (1.0, 2.0, 30.0)


def test_there_is_no_law_before_some_steps() -> None:
    fit = StepTimeFit()
    laws = []
    for seconds in [0.01] * 7 + [0.0, 0.01]:  # the one that took no time is not counted
        laws.append(fit.law)
        fit.observe((1.0, 8.0, 64.0), seconds)
    assert not any(laws)
    law = fit.law
    assert law is not None
    assert law.seconds((1.0, 8.0, 64.0)) == pytest.approx(0.01, rel=1e-6)


@given(a=COEFFICIENT, b=COEFFICIENT, c=COEFFICIENT, seed=st.integers(0, 99))
def test_the_fit_finds_the_law_that_made_the_steps(a: float, b: float, c: float, seed: int) -> None:
    true, fit, rng = StepTime(1e-3 + 0.05 * a, 1e-4 * b, 1e-7 * c), StepTimeFit(), random.Random(seed)
    steps = [prefill_features([(start := rng.randrange(4000), start + rng.randint(1, 2000))]) for _ in range(64)]
    for step in steps:
        fit.observe(step, true.seconds(step))
    assert fit.law is not None
    assert min(fit.law) >= 0
    for step in steps:
        assert fit.law.seconds(step) == pytest.approx(true.seconds(step), rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 1 << 20), st.floats(1e-5, 10)), min_size=16, max_size=80))
def test_whatever_it_sees_its_coefficients_are_finite_and_not_negative(steps: list[tuple[int, int, float]]) -> None:
    fit = StepTimeFit()
    for sequences, context, seconds in steps:
        fit.observe((1.0, float(sequences), float(context)), seconds)
    assert fit.law is not None
    assert all(0 <= coefficient < float("inf") for coefficient in fit.law)


def test_the_fit_follows_a_worker_that_becomes_slower() -> None:
    fit, rng = StepTimeFit(), random.Random(1)
    for factor in (1.0, 3.0):
        for _ in range(1500):
            features = decode_features([rng.randint(10, 3000) for _ in range(rng.randint(1, 64))])
            noise = rng.uniform(0.9, 1.1)
            fit.observe(features, factor * noise * StepTime(0.01, 1e-4, 1e-7).seconds(features))
    assert fit.law is not None
    probe = decode_features([1000] * 32)
    assert fit.law.seconds(probe) == pytest.approx(3 * StepTime(0.01, 1e-4, 1e-7).seconds(probe), rel=0.1)
