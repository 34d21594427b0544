"""Which prompts a prefill step computes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from baton.engine.prefill_scheduler import Chunk, PrefillScheduler
from baton.proto.leg import LegKey
from hypothesis import given
from hypothesis import strategies as st


def key(name: object) -> LegKey:
    return (str(name), 1, 0)


def test_one_prompt_gets_the_whole_budget() -> None:
    scheduler = PrefillScheduler(8)
    scheduler.add(key("a"), 20, 4)
    assert scheduler.plan() == [Chunk(key("a"), 4, 12)]
    assert scheduler.computed(scheduler.plan()) == []
    assert scheduler.computed(scheduler.plan()) == [key("a")]
    assert scheduler.plan() == []


def test_half_goes_to_the_oldest_and_half_to_the_shortest() -> None:
    scheduler = PrefillScheduler(8)
    for name, tokens in (("long", 100), ("middle", 10), ("short", 3)):
        scheduler.add(key(name), tokens, 0)
    assert scheduler.plan() == [Chunk(key("long"), 0, 4), Chunk(key("short"), 0, 3), Chunk(key("middle"), 0, 1)]


def test_what_one_half_does_not_need_goes_to_the_other() -> None:
    scheduler = PrefillScheduler(8)
    scheduler.add(key("old"), 1, 0)
    scheduler.add(key("new"), 100, 0)
    assert scheduler.plan() == [Chunk(key("old"), 0, 1), Chunk(key("new"), 0, 7)]


def test_equal_prompts_run_one_after_another() -> None:
    scheduler = PrefillScheduler(8)
    for name in ("a", "b", "c"):
        scheduler.add(key(name), 12, 0)
    done: list[LegKey] = []
    while scheduler.plan():
        done += scheduler.computed(scheduler.plan())
    assert done == [key("a"), key("b"), key("c")]


def test_a_prompt_that_left_during_the_step_is_skipped() -> None:
    scheduler = PrefillScheduler(8)
    scheduler.add(key("a"), 4, 0)
    plan = scheduler.plan()
    scheduler.remove(key("a"))
    assert scheduler.computed(plan) == []
    assert len(scheduler) == 0


@pytest.mark.parametrize("computed", [-1, 4, 5])
def test_nothing_left_to_compute_is_refused(computed: int) -> None:
    with pytest.raises(ValueError, match="computed"):
        PrefillScheduler(8).add(key("a"), 4, computed)


def test_sp_04_short_prompts_do_not_wait_behind_a_long_one() -> None:
    scheduler = PrefillScheduler(8)
    scheduler.add(key("long"), 200, 0)
    for number in range(20):
        scheduler.add(key(number), 4, 0)
    ended: dict[LegKey, int] = {}
    for step in range(1, 100):
        for done in scheduler.computed(scheduler.plan()):
            ended[done] = step
    assert [ended[key(number)] for number in range(20)] == list(range(1, 21))  # one each step, from the first
    assert ended[key("long")] == 35  # 280 tokens at 8 a step: nothing is wasted


def test_sp_04_a_continuous_feed_of_short_prompts_does_not_starve_a_long_one() -> None:
    scheduler = PrefillScheduler(8)
    scheduler.add(key("long"), 200, 0)
    for step in range(51):
        for number in range(3):
            scheduler.add(key(f"{step}.{number}"), 8, 0)
        if key("long") in scheduler.computed(scheduler.plan()):
            break
    assert step + 1 <= 50  # at most twice as long as alone


def test_sp_04_a_feed_of_long_prompts_delays_a_short_one_by_nothing() -> None:
    scheduler = PrefillScheduler(8)
    for number in range(10):
        scheduler.add(key(number), 100, 0)
    scheduler.add(key("short"), 4, 0)
    assert key("short") in scheduler.computed(scheduler.plan())


PROMPTS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=12)


@given(prompts=PROMPTS, budget=st.integers(1, 20))
def test_every_token_is_computed_once_and_no_budget_is_wasted(prompts: list[tuple[int, int]], budget: int) -> None:
    scheduler = PrefillScheduler(budget)
    left = {}
    for number, (tokens, computed) in enumerate(prompts):
        left[key(number)] = list(range(min(computed, tokens - 1), tokens))
        scheduler.add(key(number), tokens, min(computed, tokens - 1))
    total = sum(map(len, left.values()))
    while chunks := scheduler.plan():
        assert len({chunk.key for chunk in chunks}) == len(chunks)
        size = sum(chunk.stop - chunk.start for chunk in chunks)
        assert size == min(budget, total)
        total -= size
        for name, start, stop in chunks:
            assert left[name][: stop - start] == list(range(start, stop))
            del left[name][: stop - start]
        assert scheduler.tokens_left == total + size
        complete = scheduler.computed(chunks)
        assert all(not left[name] for name in complete)
    assert not any(left.values())


@given(prompts=PROMPTS, budget=st.integers(1, 20))
def test_merged_steps_complete_a_prompt_only_at_their_end(prompts: list[tuple[int, int]], budget: int) -> None:
    merged, single = PrefillScheduler(budget), PrefillScheduler(budget)
    for number, (tokens, _) in enumerate(prompts):
        merged.add(key(number), tokens, 0)
        single.add(key(number), tokens, 0)
    while steps := merged.steps_until_event():
        early = [done for _ in range(steps - 1) for done in single.computed(single.plan())]
        assert early == []
        assert merged.advance(steps) == single.computed(single.plan())
        assert repr(merged) == repr(single)


def test_the_plan_is_in_order_of_progress() -> None:
    scheduler = PrefillScheduler(6)
    scheduler.add(key("a"), 30, 0)
    seen = []
    for _ in range(5):
        (chunk,) = scheduler.plan()
        scheduler.computed([chunk])
        seen.append(chunk)
    assert all(one.stop == two.start for one, two in pairwise(seen))
