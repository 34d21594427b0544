"""Closed forms against queues that are played through, step by step."""

from __future__ import annotations

import heapq
import math
import random

import pytest
from baton.cluster.planner.queueing import Queue, Sharing, erlang_c


def played(servers: int, rate: float, services: list[float], customers: int) -> list[float]:
    """Waits of a first come, first served queue."""
    rng = random.Random(7)
    free, now, waits = [0.0] * servers, 0.0, []
    for _ in range(customers):
        now += rng.expovariate(rate)
        begin = max(now, heapq.heappop(free))
        heapq.heappush(free, begin + rng.choice(services))
        waits.append(begin - now)
    return sorted(waits)


def test_erlang_c_of_the_books() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(500, 400) == pytest.approx(0.0, abs=1e-3)
    assert erlang_c(3, 3.5) == 1.0
    assert erlang_c(3, 0.0) == 0.0


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (1, 0.8), (4, 0.8)])
def test_waits_with_lengths_that_vary(servers: int, load: float) -> None:
    services = sorted([0.5] * 6 + [1.0] * 3 + [4.0])
    mean = sum(services) / len(services)
    queue = Queue(servers, load * servers / mean, services)
    waits = played(servers, queue.rate, services, 60_000)
    assert queue.utilisation == pytest.approx(load)
    assert queue.mean_wait() == pytest.approx(sum(waits) / len(waits), rel=0.15)
    assert queue.wait(0.99) == pytest.approx(waits[int(0.99 * len(waits))], rel=0.25)


def test_wait_and_service_together() -> None:
    services = [1.0, 1.0, 1.0, 5.0]
    queue = Queue(1, 1e-9, services)
    assert queue.percentile(0.5) == pytest.approx(1.0, rel=1e-3)
    assert queue.percentile(0.99) == pytest.approx(5.0, rel=1e-3)
    assert queue.within(2.0) == pytest.approx(0.75, abs=1e-3)
    full = Queue(1, 0.6, services)
    assert full.percentile(0.9) == math.inf
    assert full.within(100.0) == 0.0


def steps(a: float, k: float, rate: float, tokens: float) -> list[int]:
    """Batch sizes of a decode worker, at every step, with exponential numbers of tokens."""
    rng = random.Random(3)
    now, coming, seen = 0.0, rng.expovariate(rate), []
    batch: list[int] = []
    for _ in range(60_000):
        if not batch:
            now = coming
        while coming <= now:
            batch.append(max(1, round(rng.expovariate(1 / tokens))))
            coming += rng.expovariate(rate)
        seen.append(len(batch))
        now += a + k * len(batch)
        batch = [left - 1 for left in batch if left > 1]
    return seen


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_batches_of_a_decode_worker(load: float) -> None:
    a, k, tokens = 0.01, 0.0005, 100
    sharing = Sharing(a, k, load / (tokens * k), tokens)
    seen = steps(a, k, sharing.rate, tokens)
    time = sum(a + k * b for b in seen)
    mean = sum(b * (a + k * b) for b in seen) / time  # over time, as the closed form counts
    assert sharing.utilisation == pytest.approx(load)
    assert sharing.batch == pytest.approx(mean, rel=0.12)
    assert sharing.step == pytest.approx(a + k * sharing.batch, rel=0.05)
    assert sharing.batch_at(0.99) > mean


def test_no_load_is_one_sequence_and_too_much_is_no_batch() -> None:
    assert Sharing(0.01, 0.001, 0.0, 100).step == pytest.approx(0.011)
    assert Sharing(0.01, 0.001, 1e-9, 100).batch_at(0.99) == 1.0
    assert Sharing(0.01, 0.001, 20.0, 100).batch == math.inf
