"""`bench`: PB-04 (what TTFT is), PB-05 (undefined numbers, failures), PB-06 (warm-up, intended send times), PB-07 (each
request's own first token)."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import AsyncIterator

import pytest
from baton.client.api import Client
from baton.cluster import bench, bench_plan
from baton.cluster.bench_plan import Plan
from baton.cluster.bench_stats import Sample, distribution, percentile, summarise, window
from baton.cluster.config_workload import Lengths, SLOSection, WorkloadSection
from baton.cluster.simulator.synthetic import length
from baton.proto import baton_pb2 as api
from baton.proto.errors import ConfigError, Exhausted
from baton.tests.harness.mock_router import MockRouter, Script, accepted, finished, serving, tokens

WORKLOAD = WorkloadSection(prompt_tokens=Lengths(mean=5.0, cv=0.0), output_tokens=Lengths(mean=3.0, cv=0.0))


def sample(
    sent: float, *arrivals: tuple[float, int], ended: float | None = None, error: str = "", warm: bool = False
) -> Sample:
    end = ended if ended is not None else arrivals[-1][0] if arrivals else sent
    return Sample(sent, end, arrivals, 5, error, warm)


# ---- PB-04 ---------------------------------------------------------------------------------------------------


async def test_pb_04_ttft_ends_with_the_first_token_and_not_with_an_empty_message() -> None:
    def answer(request: api.GenerateRequest) -> Script:
        empty = api.GenerateResponse(tokens=api.TokenChunk())
        return [(0.001, accepted()), (0.0, empty), (0.2, tokens(7)), (0.0, tokens(8, 9)), (0.0, finished())]

    async with serving(MockRouter(answer)) as address, Client(address) as client:
        samples = await bench.run_load(client, WORKLOAD, Plan(3, 0, None, 1, 0))
    for one in samples:
        assert one.ttft_s is not None
        assert 0.2 <= one.ttft_s < 0.6
        assert one.tokens == 3


# ---- PB-05 ---------------------------------------------------------------------------------------------------


def test_pb_05_one_token_has_no_tpot_and_none_has_no_ttft() -> None:
    assert sample(0.0, (1.0, 1)).tpot_s is None
    assert sample(0.0, (1.0, 4)).tpot_s is None  # all in one message: no interval was seen
    assert sample(0.0).ttft_s is None
    assert sample(0.0, (1.0, 1), (1.0, 1)).tpot_s is None  # 0 s a token would keep any limit
    assert sample(0.0, (1.0, 1), (2.0, 2)).tpot_s == 0.5
    assert sample(0.0, (1.0, 1), (2.0, 2)).gaps_s == [0.5, 0.5]


def test_pb_05_undefined_is_null_with_a_count_of_0() -> None:
    result = summarise([sample(0.0, ended=1.0, error="exhausted")], {"ttft": {"p99": 1.0}})
    assert result["requests"] == {
        "measured": 1,
        "completed": 0,
        "failed": 1,
        "errors": {"exhausted": 1},
        "warm_up": 0,
    }
    empty = {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None}
    assert [result[name] for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")] == [empty] * 4
    assert result["slo"] == {
        "limits_s": {"ttft": {"p99": 1.0}},
        "held": {"ttft_p99": None},
        "share_within_p99_limits": 0.0,
    }
    json.dumps(result, allow_nan=False)
    json.dumps(summarise([], {}), allow_nan=False)


def test_pb_05_failures_count_and_stay_out_of_latencies() -> None:
    samples = [sample(0.0, (1.0, 1), (1.5, 1)), sample(0.0, (90.0, 1), error="unavailable")]
    result = summarise(samples, {"ttft": {"p99": 2.0}, "tpot": {"p99": 1.0}})
    assert (result["ttft_s"]["count"], result["ttft_s"]["p99"], result["output_tokens"]) == (1, 1.0, 2)
    assert result["slo"]["share_within_p99_limits"] == 0.5
    assert result["slo"]["held"] == {"ttft_p99": True, "tpot_p99": True}


async def test_pb_05_all_requests_fail() -> None:
    router = MockRouter(lambda request: [(0.0, Exhausted("full"))])
    async with serving(router) as address:
        assert await bench.with_address(address, SLOSection(), WORKLOAD, Plan(3, 1, None, 2, 0), as_json=True) == 1


async def test_pb_05_a_step_of_the_wall_clock_changes_no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = time.time, itertools.cycle((0.0, 100.0))
    monkeypatch.setattr("time.time", lambda: real() + next(steps))  # forth and back whenever somebody looks
    router = MockRouter(lambda request: [(0.0, tokens(1)), (0.02, tokens(2, 3)), (0.0, finished())])
    async with serving(router) as address, Client(address) as client:
        samples = await bench.run_load(client, WORKLOAD, Plan(6, 0, 500.0, None, 0))
    result = summarise(samples, {})
    assert result["requests"]["completed"] == 6
    for metric in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert 0.0 <= result[metric]["p50"] <= result[metric]["p99"] < 90.0, metric


def test_percentiles_are_those_of_numpys_default() -> None:
    np = pytest.importorskip("numpy")
    rng = random.Random(1)
    for count in (1, 2, 3, 10, 101):
        values = sorted(rng.random() for _ in range(count))
        for share in (0.0, 0.5, 0.9, 0.99, 1.0):
            assert math.isclose(percentile(values, share), float(np.quantile(values, share)))
    assert distribution([3.0, 1.0])["mean"] == 2.0


# ---- PB-06 ---------------------------------------------------------------------------------------------------


def test_pb_06_warm_up_is_in_no_latency_but_its_tokens_count_inside_the_window() -> None:
    samples = [
        sample(0.0, (50.0, 1), (50.5, 1), warm=True),
        sample(50.0, (51.0, 1), (52.0, 1)),
        sample(58.0, (59.0, 1), (60.0, 1)),
    ]
    assert window(samples) == (50.0, 58.0)
    result = summarise(samples, {})
    assert result["requests"]["warm_up"] == 1
    assert result["ttft_s"]["p99"] == 1.0
    assert result["window_s"] == 8.0
    assert result["throughput"] == {"requests_per_s": 2 / 8, "output_tokens_per_s": 4 / 8}


def test_pb_06_requests_sent_at_once_have_a_window_to_the_last_end() -> None:
    assert window([sample(0.0, (1.0, 1), (4.0, 1)), sample(0.1, (1.0, 1), (5.0, 1))]) == (0.0, 5.0)


async def test_pb_06_an_open_loop_measures_from_the_intended_send_time() -> None:
    arrivals = bench.arrivals(200.0, 400, seed=3)
    assert arrivals == sorted(arrivals)
    assert 1.5 < arrivals[-1] < 2.7  # 400 at 200/s
    gate = itertools.count()

    def answer(request: api.GenerateRequest) -> Script:
        return [(0.3 if next(gate) == 0 else 0.0, tokens(1)), (0.0, finished())]

    router = MockRouter(answer)
    async with serving(router) as address, Client(address) as client:
        samples = await bench.run_load(client, WORKLOAD, Plan(20, 4, 200.0, None, 3))
    assert router.most_running > 1  # a slow answer does not hold up the next request
    sent = sorted(one.sent_s for one in samples)
    expected = bench.arrivals(200.0, 24, seed=3)
    for got, (first, then) in zip(itertools.pairwise(sent), itertools.pairwise(expected), strict=True):
        assert math.isclose(got[1] - got[0], then - first, abs_tol=1e-6)  # intended, not actual
    assert sum(one.warm_up for one in samples) == 4


async def test_pb_06_the_closed_loop_never_bursts_past_its_concurrency_and_goes_on_after_the_warm_up() -> None:
    router = MockRouter(lambda request: [(0.02, tokens(1)), (0.0, finished())])
    async with serving(router) as address, Client(address) as client:
        samples = await bench.run_load(client, WORKLOAD, Plan(12, 3, None, 3, 0))
    assert router.most_running == 3
    assert [one.warm_up for one in samples].count(True) == 3
    first = min(one.sent_s for one in samples if not one.warm_up)
    assert first < max(one.ended_s for one in samples if one.warm_up) + 0.02  # no pause between them


@pytest.mark.parametrize(("warm_up", "cold_ones_measured"), [(0, 4), (1, 3), (4, 0)])
async def test_pb_06_as_many_warm_ups_as_run_at_once_take_all_that_is_cold(
    warm_up: int, cold_ones_measured: int
) -> None:
    began = itertools.count()

    def answer(request: api.GenerateRequest) -> Script:  # who comes first finds everything cold
        return [(0.4 if next(began) < 4 else 0.0, tokens(1)), (0.0, finished())]

    async with serving(MockRouter(answer)) as address, Client(address) as client:
        samples = await bench.run_load(client, WORKLOAD, Plan(20, warm_up, None, 4, 0))
    measured = [one for one in samples if not one.warm_up]
    first = sorted(samples, key=lambda one: one.sent_s)[:4]
    assert all(one.ttft_s is not None and one.ttft_s > 0.3 for one in first)
    assert sum(one in first for one in measured) == cold_ones_measured
    assert len(measured) == 20


# ---- PB-07 ---------------------------------------------------------------------------------------------------


async def test_pb_07_a_first_token_is_a_requests_own_whatever_its_batch_still_waits_for() -> None:
    number, over = itertools.count(), asyncio.Event()

    class Interleaved(MockRouter):
        """The pool holds one request: the other's prompt is computed when the first has said its last token."""

        async def Generate(self, request: api.GenerateRequest, context: object) -> AsyncIterator[api.GenerateResponse]:
            if next(number):
                await over.wait()
                yield tokens(9)
            else:
                for token in range(5):
                    yield tokens(token)
                    await asyncio.sleep(0.02)
                over.set()
            yield finished()

    async with serving(Interleaved(lambda request: [])) as address, Client(address) as client:
        samples = await bench.run_load(client, WORKLOAD, Plan(2, 0, None, 2, 0))
    first, second = sorted(samples, key=lambda one: one.arrivals[0][0])
    assert first.ttft_s is not None
    assert second.ttft_s is not None
    assert second.arrivals[0][0] > first.arrivals[-1][0]
    assert second.ttft_s - first.ttft_s > 0.05  # which is the time of the first one's answer
    assert summarise(samples, {})["ttft_s"]["p50"] == pytest.approx((first.ttft_s + second.ttft_s) / 2)


# ---- the load ------------------------------------------------------------------------------------------------


def test_requests_fit_the_context_and_are_the_same_for_the_same_seed() -> None:
    wide = WorkloadSection(prompt_tokens=Lengths(mean=60.0, cv=1.0), output_tokens=Lengths(mean=30.0, cv=0.5))
    requests = bench.make_requests(wide, 200, 1, 100)
    assert all(len(r.token_ids.ids) >= 1 and len(r.token_ids.ids) + r.max_tokens <= 100 for r in requests)
    assert requests == bench.make_requests(wide, 200, 1, 100)
    assert requests != bench.make_requests(wide, 200, 2, 100)
    assert len({bytes(r.token_ids.ids) for r in requests}) == 200  # no prefix is shared


def test_lengths_have_the_mean_and_spread_that_were_asked_for() -> None:
    rng = random.Random(0)
    drawn = [length(Lengths(mean=500.0, cv=0.5), rng) for _ in range(20_000)]
    mean = sum(drawn) / len(drawn)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in drawn) / len(drawn))
    assert mean == pytest.approx(500, rel=0.02)
    assert deviation / mean == pytest.approx(0.5, rel=0.05)
    assert {length(Lengths(mean=7.0, cv=0.0), rng) for _ in range(9)} == {7}


def test_the_plan_comes_from_arguments_else_from_the_workload() -> None:
    assert bench_plan.plan(WORKLOAD, None, None, 5, None, 0) == Plan(5, 4, 2.0, None, 0)
    assert bench_plan.plan(WORKLOAD, "30/min", None, 5, 0, 0) == Plan(5, 0, 0.5, None, 0)
    assert bench_plan.plan(WORKLOAD, "3", None, 5, 0, 0).rate == 3.0
    assert bench_plan.plan(WORKLOAD, None, 8, 5, None, 0) == Plan(5, 8, None, 8, 0)
    with pytest.raises(ConfigError, match="not both"):
        bench_plan.plan(WORKLOAD, "1/s", 8, 5, None, 0)
    for wrong in ("0", "fast", "-1/s"):
        with pytest.raises(ConfigError, match="--rate"):
            bench_plan.plan(WORKLOAD, wrong, None, 5, None, 0)


async def test_the_table_and_the_json_show_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    router = MockRouter(lambda request: [(0.0, tokens(1)), (0.01, tokens(2)), (0.0, finished())])
    slo = SLOSection.model_validate({"ttft": {"p99": "1s"}, "tpot": {"p50": "1us"}})
    async with serving(router) as address:
        assert await bench.with_address(address, slo, WORKLOAD, Plan(4, 1, None, 2, 0), as_json=False) == 0
        table = capsys.readouterr().out
        assert await bench.with_address(address, slo, WORKLOAD, Plan(4, 1, None, 2, 0), as_json=True) == 0
    assert "closed loop, 2 at a time: 4 completed, 0 failed" in table
    assert "ttft_p99 held, tpot_p50 missed" in table
    result = json.loads(capsys.readouterr().out)
    assert result["load"]["mode"] == "closed loop"
    assert result["ttft_s"]["count"] == 4
