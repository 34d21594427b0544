"""What the simulator merges is what stepping comes to: times, blocks, preemptions; and runs repeat exactly."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from baton.cluster.simulator.counted_pool import CountedPool
from baton.cluster.simulator.request import Arrival
from baton.cluster.simulator.run import Outcome, Simulation
from baton.cluster.simulator.spec import Cluster, DecodePool, LayeredTransfer, Overheads, PrefillPool, Rules
from baton.decode_worker.scheduler import DecodeScheduler, Sequence, SequenceId
from baton.engine.block_pool import BlockPool, OutOfBlocks
from baton.proto.step_time import StepTime
from baton.router.placement.choose import Objectives
from hypothesis import given, settings
from hypothesis import strategies as st

RULES = Rules("least_loaded", "least_loaded", True, Objectives(None, None), 10_000, 120.0, 30.0, 600.0, 3)


def cluster(decode_blocks: int, overheads: Overheads, per_token: float, prefills: int = 2, decodes: int = 2) -> Cluster:
    return Cluster(
        PrefillPool(prefills, StepTime(0.01, 1e-4, 1e-9), 400, 256, 2),
        DecodePool(decodes, StepTime(0.008, 3e-4, per_token), decode_blocks, 16),
        8,
        LayeredTransfer(0.001, 1e-6, 4),
        RULES,
        overheads,
    )


def load(seed: int, count: int, rate: float) -> list[Arrival]:
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(Arrival(now, rng.randint(1, 200), rng.choice((1, 2, 3, 9, 40, 90))))
    return arrivals


def run(made: Cluster, arrivals: list[Arrival], merge: bool, named: bool = False) -> tuple[Outcome, list[list[float]]]:
    outcome = Simulation(made, arrivals, seed=1, merge=merge, named=named).run()
    results = outcome.results
    ends = sorted(zip(results.sent_s, results.values("ttft"), results.ended_s, strict=True))
    return outcome, [list(map(float, row)) for row in ends]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    decode_blocks=st.sampled_from((37, 60, 120, 2000)),
    rate=st.sampled_from((5.0, 25.0, 100.0)),
    per_token=st.sampled_from((0.0, 2e-6)),
    message_s=st.sampled_from((0.0, 0.0017)),
)
def test_merged_steps_say_every_token_when_single_steps_do(
    seed: int, decode_blocks: int, rate: float, per_token: float, message_s: float
) -> None:
    made = cluster(decode_blocks, Overheads(0.001, message_s), per_token)
    arrivals = load(seed, 60, rate)
    (merged, quick), (stepped, slow) = (run(made, arrivals, merge) for merge in (True, False))
    assert len(quick) == 60
    for row, other in zip(quick, slow, strict=True):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-6)
    assert merged.results.preemptions == stepped.results.preemptions
    assert merged.steps == stepped.steps
    assert merged.busy_s == pytest.approx(stepped.busy_s)
    assert merged.events <= stepped.events


def test_scarce_blocks_preempt_and_everybody_is_served_to_the_last_token() -> None:
    made = cluster(40, Overheads(), 2e-6)
    outcome, rows = run(made, load(3, 200, 40.0), merge=True)
    assert outcome.results.preemptions > 0
    assert len(rows) == 200


def test_blocks_without_names_change_nothing() -> None:
    """Requests of known contents that share nothing, in pools that count names, and of unknown contents in the rest."""
    plain = load(5, 80, 30.0)
    known = [
        Arrival(a.at, a.prompt, a.output, [1000 * n + place for place in range(a.prompt)]) for n, a in enumerate(plain)
    ]
    made = cluster(80, Overheads(0.001, 0.001), 2e-6)
    (_, counted), (_, named) = run(made, plain, True), run(made, known, True, named=True)
    for row, other in zip(counted, named, strict=True):
        assert row == pytest.approx(other, rel=1e-6)


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40))
def test_the_counted_pool_is_as_free_as_the_real_one(operations: list[tuple[int, bool]]) -> None:
    real, counted = BlockPool(30, 8, False), CountedPool(30, 8)
    held: list[tuple[list[int], list[int]]] = []
    for count, give_back in operations:
        if give_back and held:
            first, second = held.pop(count % len(held))
            real.release(first)
            counted.release(second)
        else:
            try:
                blocks = real.allocate(count)
            except OutOfBlocks:
                with pytest.raises(OutOfBlocks):
                    counted.allocate(count)
            else:
                held.append((blocks, counted.allocate(count)))
        assert (real.free, real.used, real.total) == (counted.free, counted.used, counted.total)
        assert real.free_after_pin([]) == counted.free_after_pin([])
    with pytest.raises(ValueError, match="released"):
        counted.release([0] * 31)


class _Table:
    def __init__(self, free: int) -> None:
        self.free = free
        self.taken: dict[SequenceId, int] = {}

    def grow(self, sequence: SequenceId) -> None:
        self.free -= 1
        self.taken[sequence] = self.taken.get(sequence, 0) + 1

    def preempt(self, sequence: SequenceId) -> None:
        raise AssertionError("there are blocks enough")


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=8),
    st.integers(1, 60),
)
def test_fast_forward_is_planning_and_advancing_by_turns(shapes: list[tuple[int, int, int]], steps: int) -> None:
    made = []
    for _ in range(2):
        scheduler = DecodeScheduler(8)
        for number, (tokens, spare, more) in enumerate(shapes):
            blocks = -(-tokens // 8) + spare
            scheduler.join(Sequence(((str(number), 1, 0), 0), tokens, blocks, tokens + more, False))
        made.append(scheduler)
    steps = min(steps, made[0].steps_to_end())
    stepped, leapt = _Table(1000), _Table(1000)
    growth = made[1].growth(steps)
    for _ in range(steps):
        made[0].advance(made[0].plan(stepped).run, 1)
    ended = made[1].fast_forward(leapt, steps)
    assert repr(made[0]) == repr(made[1])
    assert stepped.taken == leapt.taken
    assert growth == 1000 - leapt.free
    assert bool(ended) == (made[0].steps_to_end() == 0)


def test_a_run_repeats_exactly_and_its_seed_matters() -> None:
    made = replace(cluster(200, Overheads(0.001, 0.001), 2e-6), noise=0.05)
    arrivals = load(9, 150, 60.0)
    one, two = (Simulation(made, arrivals, seed=4).run().results.summary({}) for _ in range(2))
    assert one == two
    other = Simulation(made, arrivals, seed=5).run().results
    assert one != other.summary({})
