"""Thousands of small clusters on virtual time: router, two prefill and two decode workers, under faults of every kind.

After every step the invariants I1 to I6 and I10 to I13 must hold (tests/harness/simulation/cluster.py and worker.py say
where), and when the faults have stopped everything comes to rest. A seed that fails is cut down to the requests and
faults that matter and printed with the requests' stories.

To run one seed again, and only that:

    BATON_SEED=4711 python -m pytest tests/test_simulation.py -k one_seed
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence

import pytest
from baton.tests.harness.simulation import broken
from baton.tests.harness.simulation.run import Failure, run, search, shrink, simulated, told
from baton.tests.harness.simulation.scenario import Fault, scenario

SEED = os.environ.get("BATON_SEED", "")
ENOUGH = 500  # seeds in which every broken variant must have been found


@pytest.fixture
def virtual() -> Iterator[None]:
    """Runs on virtual time."""
    with simulated():
        yield


def hold(seeds: Sequence[int]) -> None:
    """Every seed keeps every invariant."""
    failure = search(seeds)
    assert failure is None, str(failure)


@pytest.mark.skipif(not SEED, reason="BATON_SEED names no seed")
def test_one_seed() -> None:
    hold([int(SEED or 0)])


@pytest.mark.parametrize("part", range(2))
def test_every_invariant_holds_under_faults(part: int) -> None:
    hold(range(250 * part, 250 * (part + 1)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_every_invariant_holds_under_faults_for_long(part: int) -> None:
    hold(range(1000 + 5000 * part, 1000 + 5000 * (part + 1)))


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("mistake", broken.NAMES)
def test_the_simulation_finds_what_is_broken(mistake: str) -> None:
    assert broken.seeds_until_found(mistake, ENOUGH, lambda seed: run(scenario(seed)) is not None) < ENOUGH


@pytest.mark.usefixtures("virtual")
def test_a_leg_that_decode_has_is_not_sent_again() -> None:
    """Every link between the two breaks as the first acknowledgement of a leg's end is about to arrive."""
    plain = scenario(6)
    workers = tuple((name, dataclasses.replace(spec, ranks=1)) for name, spec in plain.workers)  # one link, one end
    asks = tuple(dataclasses.replace(ask, stop_at=0, max_tokens=5, salt="", deadline_s=600.0) for ask in plain.asks)
    links = [(p, d) for p in ("p0", "p1") for d in ("d0", "d1")]
    cuts = tuple(Fault("cut link", 0.0, "link.done_ack", 1, p, d, 0.0, side=0) for p, d in links)
    stories = [
        told(dataclasses.replace(plain, luck=luck, workers=workers, asks=asks[:1], faults=cuts)) for luck in range(40)
    ]
    asked = [story for story in stories if "withdraw leg" in story]
    early = [story for story in asked if story.index("withdraw leg") < story.index(": committed")]
    assert early, "the source's word never came first"
    assert len(early) < len(stories)
    assert not [story for story in stories if "attempt 2" in story]


@pytest.mark.usefixtures("virtual")
def test_decode_workers_compute_prompts_in_some_seeds() -> None:
    """Also several choices, prompts of many chunks, and those that are placed again."""
    stories = "\n".join(told(scenario(seed)) for seed in (*range(9, 12), *range(33, 36), *range(45, 48)))
    for part in ("attempt 1 goes to d", "attempt 2 goes to d", "first token of 3 choice(s)"):
        assert part in stories, part
    assert stories.count("which computes it") > 5


@pytest.mark.usefixtures("virtual")
def test_a_seed_means_one_run() -> None:
    with broken.broken("decode commits without all KV"):
        found = [run(scenario(seed)) for seed in range(12)]
        again = [run(scenario(seed)) for seed in range(12)]
    assert any(found)
    assert [str(failure) for failure in found] == [str(failure) for failure in again]


@pytest.mark.usefixtures("virtual")
def test_a_failing_run_is_cut_down_and_told() -> None:
    """This mistake needs no fault and no second request."""
    with broken.broken("prefill frees before the acknowledgement"):
        failures: Iterator[Failure | None] = (run(scenario(seed)) for seed in range(ENOUGH))
        failure = next(found for found in failures if found is not None and len(found.scenario.faults) > 1)
        least = shrink(failure)
    assert (len(least.scenario.asks), least.scenario.faults) == (1, ())
    (ask,) = least.scenario.asks
    assert f"{ask.request_id}\n" in least.stories
    assert "router: place attempt 1 (first)" in str(least)
    assert f"seed {failure.scenario.seed}" in str(least)
