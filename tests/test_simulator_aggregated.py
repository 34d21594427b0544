"""Workers that do both: what a step with prompts costs those who generate, and that it is the same without merging."""

from __future__ import annotations

from dataclasses import replace

import pytest
from baton.cluster.simulator.request import Arrival
from baton.cluster.simulator.run import Simulation
from baton.cluster.simulator.spec import Cluster, Fail
from baton.tests.test_simulator_changes import TWO, check, load

ONE = replace(TWO, aggregated=True, decode=replace(TWO.decode, replicas=1, blocks=400))


def test_one_request_alone_takes_its_prompt_and_then_its_steps() -> None:
    outcome = Simulation(ONE, [Arrival(0.0, 100, 5)]).run()
    law, steps = ONE.prefill.law, ONE.decode.law
    first = law.seconds((1.0, 100.0, 10000.0)) + 0.003  # router, and a message each way
    assert outcome.results.values("ttft")[0] == pytest.approx(first)
    rest = sum(steps.seconds((1.0, 1.0, 100.0 + token)) for token in range(1, 5))
    assert outcome.results.values("tpot")[0] == pytest.approx(rest / 4)


def test_pb_07_in_a_tiny_pool_each_request_has_its_own_first_token() -> None:
    """The pool holds one request at a time, so that prompts and answers take turns."""
    size = ONE.block_size
    made = replace(ONE, decode=replace(ONE.decode, blocks=-(-(100 + 20) // size)))
    results = Simulation(made, [Arrival(0.0, 100, 20)] * 3).run().results
    ends, firsts = list(results.ended_s), [float(value) for value in results.values("ttft")]
    alone = Simulation(ONE, [Arrival(0.0, 100, 20)]).run().results
    assert firsts[0] == pytest.approx(float(alone.values("ttft")[0]))
    assert ends[0] == pytest.approx(alone.ended_s[0])
    for first, before in zip(firsts[1:], ends, strict=False):
        assert first > before - 0.01  # the prompt had its turn when the one before had ended
    assert [float(value) for value in results.values("tpot")] == pytest.approx([float(alone.values("tpot")[0])] * 3)


def test_a_prompt_slows_the_step_that_it_shares() -> None:
    alone = Simulation(ONE, [Arrival(0.0, 10, 50)]).run().results
    beside = Simulation(ONE, [Arrival(0.0, 10, 50), Arrival(0.1, 200, 1)]).run().results
    law = ONE.prefill.law
    slower = float(beside.ended_s[-1]) - float(alone.ended_s[-1])
    assert slower == pytest.approx(law.b * 200 + law.c * 200**2, rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_merged_steps_say_every_token_when_single_steps_do(seed: int) -> None:
    ends = []
    for merge in (True, False):
        results = Simulation(ONE, load(seed, 60, 15.0), seed=1, merge=merge).run().results
        ends.append(sorted(zip(results.sent_s, results.ended_s, strict=True)))
    assert len(ends[0]) == 60
    for one, other in zip(*ends, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)


def test_who_loses_its_blocks_goes_on_first_with_all_that_it_has_said() -> None:
    made = replace(ONE, decode=replace(ONE.decode, blocks=60))
    ends = []
    for merge in (True, False):
        results = Simulation(made, load(8, 100, 30.0), seed=1, merge=merge).run().results
        assert results.preemptions > 0
        assert len(results) == 100
        ends.append(sorted(zip(results.sent_s, results.ended_s, strict=True)))
    assert [end for _, end in ends[0]] == pytest.approx([end for _, end in ends[1]], rel=1e-6)


def test_a_worker_that_dies_loses_nobody() -> None:
    made = replace(ONE, decode=replace(ONE.decode, replicas=2), changes=[Fail(1.0, "decode-0", 0.5)])
    check(Simulation(made, load(3, 80, 25.0)), 80)


def test_two_pools_keep_the_time_between_tokens_that_prompts_disturb_in_one() -> None:
    """The reason for two pools, at the same number of workers."""
    arrivals = load(4, 300, 20.0)
    split = replace(TWO, prefill=replace(TWO.prefill, replicas=1), decode=replace(TWO.decode, replicas=1, blocks=400))
    both = replace(ONE, decode=replace(ONE.decode, replicas=2))
    tails = {}
    for name, made in (("split", split), ("both", both)):
        tails[name] = Simulation(made, arrivals).run().results.summary({})["tpot_s"]["p99"]
    assert tails["split"] < tails["both"]


# ---- decode workers that compute some prompts ----------------------------------------------------------------------


def placed(where: str, **changes: object) -> Cluster:
    return replace(TWO, rules=replace(TWO.rules, disaggregation=where), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["never", "conditional"])
@pytest.mark.parametrize("seed", range(3))
def test_prompts_on_decode_workers_are_the_same_without_merging(where: str, seed: int) -> None:
    ends = []
    for merge in (True, False):
        results = Simulation(placed(where), load(seed, 80, 30.0), seed=1, merge=merge).run().results
        assert len(results) == 80
        ends.append(sorted(zip(results.sent_s, results.ended_s, strict=True)))
        assert results.on_decode == 80 if where == "never" else 0 < results.on_decode < 80
    for one, other in zip(*ends, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("where", ["never", "conditional"])
def test_decode_workers_that_compute_prompts_die_and_come_back_and_nobody_is_lost(where: str) -> None:
    made = placed(where, changes=[Fail(0.5, "decode-0", 0.5), Fail(1.0, "prefill-1", None), Fail(1.5, "decode-1", 0.2)])
    check(Simulation(made, load(4, 90, 30.0)), 90)
    check(Simulation(replace(made, decode=replace(TWO.decode, blocks=50)), load(5, 90, 30.0)), 90)


def test_without_prefill_workers_decode_workers_compute_unless_they_never_may() -> None:
    alone = replace(TWO.prefill, replicas=0)
    assert Simulation(placed("conditional", prefill=alone), load(6, 20, 5.0)).run().results.on_decode == 20
    assert len(Simulation(placed("always", prefill=alone), load(6, 20, 5.0)).run().results) == 0


def test_what_a_decode_worker_computed_is_in_its_prefix_cache() -> None:
    prompt = tuple(range(160))
    first, second = Arrival(0.0, 160, 4, prompt), Arrival(5.0, 160, 4, prompt)
    made = placed("never", decode=replace(TWO.decode, replicas=1))
    results = Simulation(made, [first, second], named=True).run().results
    law = TWO.prefill.law
    waits = [float(value) for value in results.values("ttft")]
    assert waits[0] - waits[1] > 0.5 * law.b * 152  # all but the last block is found
