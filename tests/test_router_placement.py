"""Choosing workers, counting what is outstanding there, and the lookahead gate."""

from __future__ import annotations

import random
from collections import Counter

from baton.router.gate import LookaheadGate
from baton.router.life_messages import LegKey, Peer
from baton.router.placement import Candidate, LeastLoaded, LegId, Outstanding, RoundRobin, pick
from hypothesis import given
from hypothesis import strategies as st

A, B, C = Peer("w-0", "1"), Peer("w-1", "1"), Peer("w-2", "1")


def leg(name: str) -> LegId:
    return LegId(name, LegKey(1, 0))


def test_round_robin_takes_turns_and_survives_changes() -> None:
    policy, rng = RoundRobin(), random.Random(0)
    three = [Candidate(peer, 0) for peer in (C, A, B)]
    assert [policy.choose(three, rng) for _ in range(4)] == [A, B, C, A]
    assert policy.choose(three[:1], rng) == C
    assert policy.choose(three, rng) == A


def test_least_loaded_takes_the_least_and_breaks_ties_at_random() -> None:
    policy, rng = LeastLoaded(), random.Random(0)
    assert policy.choose([Candidate(A, 5), Candidate(B, 4)], rng) == B
    counts = Counter(policy.choose([Candidate(A, 1), Candidate(B, 1), Candidate(C, 2)], rng) for _ in range(200))
    assert set(counts) == {A, B}
    assert min(counts.values()) > 60


def test_pick_prefers_avoids_and_gives_up() -> None:
    policy, rng = LeastLoaded(), random.Random(0)
    both = [Candidate(A, 0), Candidate(B, 9)]

    def choose(prefer: Peer | None, avoid: set[Peer], may: bool, among: list[Candidate] = both) -> Peer | None:
        return pick(policy, among, rng, prefer=prefer, avoid=avoid, may_use_avoided=may)

    assert choose(None, set(), True) == A
    assert choose(B, set(), True) == B
    assert choose(C, set(), True) == A  # no longer ready
    assert choose(B, {B}, True) == A
    assert choose(None, {A}, True) == B
    assert choose(None, {A, B}, True) == A
    assert choose(None, {A, B}, False) is None
    assert choose(None, set(), True, []) is None


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([A, B, None]), st.integers(0, 9))))
def test_sp_06_outstanding_equals_the_live_legs_and_is_never_negative(
    steps: list[tuple[str, Peer | None, int]],
) -> None:
    load, model = Outstanding(), dict[LegId, tuple[Peer, int]]()
    for name, peer, tokens in steps:
        if peer is None:
            load.remove(leg(name))
            model.pop(leg(name), None)
        else:
            load.add(leg(name), peer, tokens)
            model[leg(name)] = (peer, tokens)
        for worker in (A, B):
            assert load.of(worker) == sum(tokens for at, tokens in model.values() if at == worker) >= 0


def test_gate_lets_through_up_to_the_lookahead_in_order() -> None:
    gate = LookaheadGate(100)
    assert gate.enter(leg("a"), 60) == [leg("a")]
    assert gate.enter(leg("b"), 60) == [leg("b")]  # 60 outstanding: within the lookahead
    assert gate.enter(leg("c"), 60) == []  # 120 outstanding
    assert gate.enter(leg("d"), 60) == []
    assert gate.leave(leg("c")) == []  # cancelled in the queue
    assert gate.leave(leg("a")) == [leg("d")]
    assert gate.leave(leg("a")) == []


def test_sp_04_gate_does_not_hold_short_prompts_behind_long_ones() -> None:
    gate = LookaheadGate(16)
    assert gate.enter(leg("long"), 200) == [leg("long")]
    assert gate.enter(leg("longer"), 300) == []
    shorts = [leg(f"short-{i}") for i in range(8)]
    assert [bool(gate.enter(short, 4)) for short in shorts] == [True] * 5 + [False] * 3  # 16 outstanding, then 20
    assert gate.leave(shorts[0]) == [shorts[5]]
    assert gate.leave(leg("long")) == [leg("longer")]  # the oldest now: overtaken by all, so it is not kept waiting
    assert gate.leave(shorts[1]) == [shorts[6]]


def test_gate_never_blocks_an_idle_worker() -> None:
    gate = LookaheadGate(0)
    assert gate.enter(leg("a"), 1000) == [leg("a")]
    assert gate.enter(leg("b"), 1000) == []
    assert gate.leave(leg("a")) == [leg("b")]
