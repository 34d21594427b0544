"""Continuous batching over counts: who runs, who is preempted, who stalls."""

from __future__ import annotations

from random import Random

from baton.decode_worker.scheduler import DecodeScheduler, Sequence, SequenceId
from hypothesis import given
from hypothesis import strategies as st

BLOCK = 4


class Counts:
    """A pool of numbers."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.held: dict[SequenceId, int] = {}

    def grow(self, sequence: SequenceId) -> None:
        self.free -= 1
        self.held[sequence] += 1

    def preempt(self, sequence: SequenceId) -> None:
        self.free += self.held.pop(sequence)


def name(label: object) -> SequenceId:
    return (str(label), 1, 0), 0


def batch(free: int, *sequences: tuple[str, int, int, bool]) -> tuple[DecodeScheduler, Counts]:
    """(label, tokens, blocks, resumed), oldest first."""
    scheduler, counts = DecodeScheduler(BLOCK), Counts(free)
    for label, tokens, blocks, resumed in sequences:
        scheduler.join(Sequence(name(label), tokens, blocks, 100, resumed))
        counts.held[name(label)] = blocks
    return scheduler, counts


def labels(names: list[SequenceId]) -> str:
    return "".join(key[0] for key, _ in names)


def test_all_run_and_those_at_an_edge_get_a_block() -> None:
    scheduler, counts = batch(1, ("a", 7, 2, False), ("b", 8, 2, False))
    plan = scheduler.plan(counts)
    assert (labels(plan.run), plan.preempted, plan.stalled) == ("ab", [], [])
    assert counts.held == {name("a"): 2, name("b"): 3}


def test_the_newest_makes_room_for_an_older_one() -> None:
    scheduler, counts = batch(0, ("a", 8, 2, False), ("b", 5, 2, False), ("c", 5, 2, False))
    plan = scheduler.plan(counts)
    assert (labels(plan.run), labels(plan.preempted)) == ("ab", "c")
    assert counts.free == 1


def test_the_newest_stalls_rather_than_preempt_itself() -> None:
    scheduler, counts = batch(0, ("a", 5, 2, False), ("b", 8, 2, False))
    plan = scheduler.plan(counts)
    assert (labels(plan.run), plan.preempted, labels(plan.stalled)) == ("a", [], "b")
    scheduler.leave(name("a"))
    counts.preempt(name("a"))
    assert labels(scheduler.plan(counts).run) == "b"


def test_resumed_sequences_are_never_preempted() -> None:
    scheduler, counts = batch(0, ("a", 8, 2, False), ("b", 5, 2, True), ("c", 5, 2, False), ("d", 5, 2, True))
    plan = scheduler.plan(counts)
    assert (labels(plan.run), labels(plan.preempted)) == ("abd", "c")
    scheduler, counts = batch(0, ("a", 8, 2, False), ("b", 5, 2, True))
    assert labels(scheduler.plan(counts).stalled) == "a"


def test_merged_steps_stop_at_the_first_event() -> None:
    scheduler = DecodeScheduler(BLOCK)
    assert scheduler.steps_until_event() == 0
    scheduler.join(Sequence(name("a"), 5, 3, 100, False))  # room for 7 more
    assert scheduler.steps_until_event() == 7
    scheduler.join(Sequence(name("b"), 5, 3, 8, False))  # ends after 3
    assert scheduler.steps_until_event() == 3
    scheduler.advance([name("a"), name("b"), name("gone")], 3)
    assert (scheduler.tokens(name("a")), scheduler.tokens(name("b"))) == (8, 8)


@given(
    total=st.integers(6, 30),
    lengths=st.lists(st.tuples(st.integers(1, 10), st.integers(2, 12)), min_size=1, max_size=8),
)
def test_the_simulators_merged_steps_equal_single_steps(total: int, lengths: list[tuple[int, int]]) -> None:
    """The same batch run step by step, and in merged steps between events, ends in the same state."""

    def run(merge: bool) -> tuple[list[tuple[SequenceId, int]], int]:
        scheduler, counts = DecodeScheduler(BLOCK), Counts(total)
        for number, (tokens, more) in enumerate(lengths):
            blocks = -(-(tokens + 1) // BLOCK)
            if blocks <= counts.free:
                counts.free -= blocks
                counts.held[name(number)] = blocks
                scheduler.join(Sequence(name(number), tokens, blocks, tokens + more, False))
        log: list[tuple[SequenceId, int]] = []
        time = 0
        while len(scheduler):
            plan = scheduler.plan(counts)
            log += [(victim, time) for victim in plan.preempted]
            steps = scheduler.steps_until_event() if merge and not plan.stalled else 1
            if not plan.run:
                break
            scheduler.advance(plan.run, steps)
            time += steps
            for one in plan.run:
                number = int(one[0][0])
                if scheduler.tokens(one) >= sum(lengths[number]):
                    scheduler.leave(one)
                    counts.preempt(one)
                    log.append((one, time))
        return log, time

    assert run(merge=True) == run(merge=False)


@given(
    total=st.integers(4, 24),
    joining=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 14), st.booleans()), min_size=1, max_size=8),
    luck=st.randoms(use_true_random=False),
)
def test_proposals_take_what_is_left_and_account_for_what_was_accepted(
    total: int, joining: list[tuple[int, int, bool]], luck: Random
) -> None:
    """A walk: blocks are conserved, nobody takes more than proposals need or the next step leaves, and all end."""
    scheduler, counts = DecodeScheduler(BLOCK), Counts(total)
    limits: dict[SequenceId, int] = {}
    for number, (tokens, more, resumed) in enumerate(joining):
        blocks = -(-(tokens + more if resumed else tokens + 1) // BLOCK)
        if blocks <= counts.free and -(-(tokens + more) // BLOCK) <= total:
            counts.free -= blocks
            counts.held[name(number)] = blocks
            limits[name(number)] = tokens + more
            scheduler.join(Sequence(name(number), tokens, blocks, tokens + more, resumed))
    ended = 0
    for _ in range(300):
        if not len(scheduler):
            break
        plan = scheduler.plan(counts)
        ended += len(plan.preempted)
        before = (dict(counts.held), counts.free)
        wanted = {one: luck.randint(0, 9) for one in plan.run}
        scheduler.look_ahead(counts, wanted)
        for one in plan.run:
            extra = counts.held[one] - before[0][one]
            assert counts.held[one] * BLOCK >= scheduler.tokens(one) + 1
            assert (
                not extra
                or counts.held[one] * BLOCK < min(scheduler.tokens(one) + 1 + wanted[one], limits[one]) + BLOCK
            )
        assert counts.free >= min(before[1], len(scheduler))  # a block for each in the next step, as far as there was
        assert counts.free + sum(counts.held.values()) == total
        for one in plan.run:
            room = min(counts.held[one] * BLOCK, limits[one]) - scheduler.tokens(one)
            scheduler.advance([one], luck.randint(1, min(room, 1 + wanted[one])))
            if scheduler.tokens(one) == limits[one]:
                scheduler.leave(one)
                counts.preempt(one)
                ended += 1
    assert (len(scheduler), ended, counts.free) == (0, len(limits), total)
