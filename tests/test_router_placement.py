"""Choosing workers, counting what is outstanding there, and the lookahead gate."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, get_args

from baton.cluster.config import DecodePlacement, PrefillPlacement
from baton.proto.step_time import StepTime
from baton.router.gate import LookaheadGate
from baton.router.life_messages import LegKey, Peer
from baton.router.outstanding import LegId, Outstanding, Work
from baton.router.placement.choose import DECODE, PREFILL, Objectives, choose
from baton.router.placement.latency_aware import LatencyAwareDecode, LatencyAwarePrefill, predict_ttft_s
from baton.router.placement.least_loaded import LeastLoaded
from baton.router.placement.policy import Candidate, Demand
from baton.router.placement.power_of_two import PowerOfTwo
from baton.router.placement.prefix_aware import PrefixAwareDecode, PrefixAwarePrefill
from baton.router.placement.round_robin import RoundRobin
from baton.router.placement.session_affinity import SessionAffinity
from baton.router.placement.transfer_aware import TransferAware
from hypothesis import given
from hypothesis import strategies as st

A, B, C = Peer("w-0", "1"), Peer("w-1", "1"), Peer("w-2", "1")
LEG = Demand(tokens=100, output=10, choices=1, session="")


def leg(name: str) -> LegId:
    return LegId(name, LegKey(1, 0))


def test_round_robin_takes_turns_and_survives_changes() -> None:
    policy, rng = RoundRobin(), random.Random(0)
    three = [Candidate(peer, 0) for peer in (C, A, B)]
    assert [policy.choose(LEG, three, rng).peer for _ in range(4)] == [A, B, C, A]
    assert policy.choose(LEG, three[:1], rng).peer == C
    assert policy.choose(LEG, three, rng).peer == A


def test_least_loaded_takes_the_least_and_breaks_ties_at_random() -> None:
    policy, rng = LeastLoaded(), random.Random(0)
    assert policy.choose(LEG, [Candidate(A, 5), Candidate(B, 4)], rng).peer == B
    three = [Candidate(A, 1), Candidate(B, 1), Candidate(C, 2)]
    counts = Counter(policy.choose(LEG, three, rng).peer for _ in range(200))
    assert set(counts) == {A, B}
    assert min(counts.values()) > 60


def test_power_of_two_never_takes_the_most_loaded_and_spreads_over_the_others() -> None:
    policy, rng = PowerOfTwo(), random.Random(0)
    three = [Candidate(A, 1), Candidate(B, 2), Candidate(C, 3)]
    counts = Counter(policy.choose(LEG, three, rng).peer for _ in range(300))
    assert set(counts) == {A, B}  # two of every three draws hold A
    assert counts[B] > 60
    assert policy.choose(LEG, three[2:], rng).peer == C


def queue(*tokens: int) -> dict[str, Any]:
    """The legs outstanding at a candidate."""
    return {"outstanding": sum(tokens), "works": [Work(count) for count in tokens]}


def test_prefix_aware_prefill_weighs_what_is_cached_against_what_delays_it() -> None:
    policy, rng = PrefixAwarePrefill(), random.Random(0)
    assert policy.choose(LEG, [Candidate(A, **queue(50), cached=64), Candidate(B, 0)], rng).peer == A  # 72
    assert policy.choose(LEG, [Candidate(A, **queue(70), cached=20), Candidate(B, 0)], rng).peer == B  # 150
    assert policy.choose(LEG, [Candidate(A, **queue(9000), cached=64), Candidate(B, 0)], rng).peer == A  # 72
    assert policy.choose(LEG, [Candidate(A, **queue(*[40] * 3), cached=64), Candidate(B, 0)], rng).peer == B  # 144


def test_prefix_aware_decode_weighs_what_is_cached_against_what_is_held() -> None:
    policy, rng = PrefixAwareDecode(), random.Random(0)
    assert policy.choose(LEG, [Candidate(A, 240, cached=64), Candidate(B, 0)], rng).peer == A
    assert policy.choose(LEG, [Candidate(A, 270, cached=64), Candidate(B, 0)], rng).peer == B


def test_prefix_aware_lets_a_common_beginning_not_herd_everything_to_one_idle_worker() -> None:
    for policy in (PrefixAwarePrefill(), PrefixAwareDecode()):
        rng, first = random.Random(0), Counter[Peer]()
        for _ in range(100):
            known = [Candidate(A, 0, cached=60), Candidate(B, 0), Candidate(C, 0)]
            first[policy.choose(LEG, known, rng).peer] += 1
        assert set(first) == {A, B, C}
        assert max(first.values()) > 40


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 100)), min_size=1, max_size=6), st.integers(0, 9))
def test_prefix_aware_never_leaves_a_worker_that_is_better_in_both(workers: list[tuple[int, int]], seed: int) -> None:
    candidates = [
        Candidate(Peer(f"w-{i}", "1"), **queue(*[10] * load), cached=held) for i, (load, held) in enumerate(workers)
    ]
    for policy in (PrefixAwarePrefill(), PrefixAwareDecode()):
        peer = policy.choose(LEG, candidates, random.Random(seed)).peer
        (chosen,) = [candidate for candidate in candidates if candidate.peer == peer]
        for other in candidates:
            better = other.outstanding < chosen.outstanding and other.cached > chosen.cached
            assert not better, (chosen, other)


def test_a_session_stays_where_it_is_and_only_a_lost_worker_s_sessions_move() -> None:
    policy, rng = SessionAffinity(), random.Random(0)
    three = [Candidate(peer, 0) for peer in (A, B, C)]
    demands = [Demand(10, 5, 1, f"session {i}") for i in range(60)]
    before = [policy.choose(demand, three, rng).peer for demand in demands]
    assert set(before) == {A, B, C}
    assert [policy.choose(demand, three, random.Random(7)).peer for demand in demands] == before
    after = [policy.choose(demand, [three[0], three[2]], rng).peer for demand in demands]
    assert all(now == was for now, was in zip(after, before, strict=True) if was != B)
    restarted = [three[0], Candidate(Peer("w-1", "2"), 0), three[2]]
    names = [policy.choose(demand, restarted, rng).peer.worker_id for demand in demands]
    assert names == [peer.worker_id for peer in before]


def test_a_session_s_worker_is_passed_over_when_it_has_far_more_than_its_share() -> None:
    policy, rng = SessionAffinity(), random.Random(0)
    demand = Demand(10, 5, 1, "one")
    home = policy.choose(demand, [Candidate(A, 0), Candidate(B, 0)], rng).peer
    other = B if home == A else A
    assert policy.choose(demand, [Candidate(home, 100), Candidate(other, 90)], rng).peer == home
    assert policy.choose(demand, [Candidate(home, 500), Candidate(other, 90)], rng).peer == other
    assert policy.choose(LEG, [Candidate(home, 9), Candidate(other, 3)], rng).peer == other  # of no session


def test_transfer_aware_counts_tokens_by_the_length_of_their_way() -> None:
    policy, rng = TransferAware(), random.Random(0)
    near, far = Candidate(A, 250, distance=1.0), Candidate(B, 0, distance=4.0)
    assert policy.choose(LEG, [near, far], rng).peer == A  # 350 against 400
    assert policy.choose(LEG, [near, Candidate(B, 0, cached=48, distance=4.0)], rng).peer == B  # 208: little to move


def test_latency_aware_prefill_predicts_by_each_worker_s_own_law() -> None:
    policy, rng = LatencyAwarePrefill(0.5), random.Random(0)
    slow, fast = StepTime(0.0, 0.01, 0.0), StepTime(0.0, 0.002, 0.0)
    idle_slow = Candidate(A, 0, law=slow, step_tokens=64)
    busy_fast = Candidate(B, 200, [Work(200, 0)], law=fast, step_tokens=64)
    choice = policy.choose(LEG, [idle_slow, busy_fast], rng)
    assert choice.peer == B
    assert choice.late_s == 0.0  # 0.2 s of its own, and as much of the longer one
    full = Candidate(B, 1000, [Work(100, 0)] * 10, law=fast, step_tokens=64)
    late = policy.choose(LEG, [idle_slow, full], rng)
    assert late.peer == A
    assert late.late_s == 0.5  # 1 s


def test_latency_aware_prefill_lets_no_long_prompt_weigh_on_a_short_one() -> None:
    law = StepTime(0.0, 0.001, 0.0)
    short = Demand(10, 1, 1, "")
    assert predict_ttft_s(short, Candidate(A, 5000, [Work(5000, 0)], law=law, step_tokens=64)) == 0.02
    assert predict_ttft_s(short, Candidate(A, 20, [Work(5, 0)] * 4, law=law, step_tokens=64)) == 0.03


def test_latency_aware_counts_the_attention_of_what_is_not_cached() -> None:
    law = StepTime(0.0, 0.0, 1e-4)
    candidate = Candidate(A, 0, cached=60, law=law, step_tokens=64)
    assert round(predict_ttft_s(LEG, candidate), 9) == round(1e-4 * (100**2 - 60**2), 9)


def test_latency_aware_tries_a_worker_without_a_law_first() -> None:
    law, rng = StepTime(0.0, 0.01, 0.0), random.Random(0)
    unknown = Candidate(B, 900)
    assert LatencyAwarePrefill(0.1).choose(LEG, [Candidate(A, 0, law=law), unknown], rng) == (B, 0.0)
    assert LatencyAwareDecode(0.1).choose(LEG, [Candidate(A, 0, law=law), unknown], rng) == (B, 0.0)


def test_latency_aware_decode_predicts_the_step_with_this_leg_in_it() -> None:
    law, rng = StepTime(0.01, 0.001, 1e-5), random.Random(0)
    policy = LatencyAwareDecode(0.02)
    crowd = Candidate(A, 500, [Work(50, 0, 1)] * 10, law=law)
    long = Candidate(B, 3000, [Work(3000, 0, 1)], law=law)
    choice = policy.choose(LEG, [crowd, long], rng)
    assert choice.peer == A  # 0.0271 against 0.0431
    assert round(choice.late_s, 6) == round(0.0071 * LEG.output, 6)
    assert LatencyAwareDecode(None).choose(LEG, [crowd, long], rng).late_s == 0.0


def test_every_policy_by_name_takes_one_of_the_candidates() -> None:
    candidates = [Candidate(A, 3, cached=4), Candidate(B, 2)]
    for table in (PREFILL, DECODE):
        for make in table.values():
            assert make(Objectives(1.0, 0.1)).choose(LEG, candidates, random.Random(0)).peer in (A, B)


def test_choose_prefers_avoids_and_gives_up() -> None:
    policy, rng = LeastLoaded(), random.Random(0)
    both = [Candidate(A, 0), Candidate(B, 9)]

    def chosen(prefer: Peer | None, avoid: set[Peer], may: bool, among: list[Candidate] = both) -> Peer | None:
        choice = choose(policy, LEG, among, rng, prefer=prefer, avoid=avoid, may_use_avoided=may)
        return None if choice is None else choice.peer

    assert chosen(None, set(), True) == A
    assert chosen(B, set(), True) == B
    assert chosen(C, set(), True) == A  # no longer ready
    assert chosen(B, {B}, True) == A
    assert chosen(None, {A}, True) == B
    assert chosen(None, {A, B}, True) == A
    assert chosen(None, {A, B}, False) is None
    assert chosen(None, set(), True, []) is None


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
            load.add(leg(name), peer, Work(tokens))
            model[leg(name)] = (peer, tokens)
        for worker in (A, B):
            held = [tokens for at, tokens in model.values() if at == worker]
            assert load.tokens(worker) == sum(held) >= 0
            assert sorted(work.tokens for work in load.works(worker)) == sorted(held)


class Gate:
    """A gate for prompts of one tenant, unless they say otherwise."""

    def __init__(self, limit_tokens: int) -> None:
        self._gate = LookaheadGate(limit_tokens)
        self.leave = self._gate.leave

    def enter(self, name: LegId, tokens: int, priority: int = 0, tenant: str = "") -> list[LegId]:
        return self._gate.enter(name, tokens, priority=priority, tenant=tenant)


def test_gate_lets_through_up_to_the_lookahead_in_order() -> None:
    gate = Gate(100)
    assert gate.enter(leg("a"), 60) == [leg("a")]
    assert gate.enter(leg("b"), 60) == [leg("b")]  # 60 outstanding: within the lookahead
    assert gate.enter(leg("c"), 60) == []  # 120 outstanding
    assert gate.enter(leg("d"), 60) == []
    assert gate.leave(leg("c")) == []  # cancelled in the queue
    assert gate.leave(leg("a")) == [leg("d")]
    assert gate.leave(leg("a")) == []


def test_sp_04_gate_does_not_hold_short_prompts_behind_long_ones() -> None:
    gate = Gate(16)
    assert gate.enter(leg("long"), 200) == [leg("long")]
    assert gate.enter(leg("longer"), 300) == []
    shorts = [leg(f"short-{i}") for i in range(8)]
    assert [bool(gate.enter(short, 4)) for short in shorts] == [True] * 5 + [False] * 3  # 16 outstanding, then 20
    assert gate.leave(shorts[0]) == [shorts[5]]
    assert gate.leave(leg("long")) == [leg("longer")]  # the oldest now: overtaken by all, so it is not kept waiting
    assert gate.leave(shorts[1]) == [shorts[6]]


def test_gate_never_blocks_an_idle_worker() -> None:
    gate = Gate(0)
    assert gate.enter(leg("a"), 1000) == [leg("a")]
    assert gate.enter(leg("b"), 1000) == []
    assert gate.leave(leg("a")) == [leg("b")]


def test_the_configuration_offers_the_policies_that_there_are() -> None:
    assert set(get_args(PrefillPlacement)) == set(PREFILL)
    assert set(get_args(DecodePlacement)) == set(DECODE)


def test_gate_shares_a_worker_evenly_among_tenants() -> None:
    gate = Gate(10)
    assert gate.enter(leg("a0"), 20, tenant="a") == [leg("a0")]
    for number in range(1, 6):
        assert gate.enter(leg(f"a{number}"), 20, tenant="a") == []
    assert gate.enter(leg("b0"), 20, tenant="b") == []
    assert gate.enter(leg("b1"), 20, tenant="b") == []
    order = [leg("a0")]
    for _ in range(7):
        order += gate.leave(order[-1])
    assert [name.request_id for name in order] == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_gate_counts_a_tenant_s_tokens_not_its_prompts() -> None:
    gate = Gate(0)
    assert gate.enter(leg("first"), 1, tenant="c") == [leg("first")]
    for number in range(4):
        gate.enter(leg(f"a{number}"), 30, tenant="a")
        gate.enter(leg(f"b{number}"), 90, tenant="b")
    order = gate.leave(leg("first"))
    for _ in range(4):
        order += gate.leave(order[-1])
    assert [name.request_id for name in order] == ["a0", "b0", "a1", "a2", "a3"]


def test_gate_takes_the_urgent_first() -> None:
    gate = Gate(0)
    assert gate.enter(leg("runs"), 20) == [leg("runs")]
    assert gate.enter(leg("later"), 20, priority=1) == []
    assert gate.enter(leg("normal"), 20) == []
    assert gate.enter(leg("urgent"), 20, priority=-1) == [leg("urgent")]  # before everything that was let through
    assert gate.enter(leg("urgent too"), 20, priority=-1) == []
    assert gate.leave(leg("runs")) == []
    assert gate.leave(leg("urgent")) == [leg("urgent too")]
    assert gate.leave(leg("urgent too")) == [leg("normal")]
    assert gate.leave(leg("normal")) == [leg("later")]


@given(st.text("ab", min_size=1, max_size=40))
def test_two_tenants_that_both_wait_get_the_same_tokens_but_for_one_prompt(tenants: str) -> None:
    gate = Gate(0)
    through = gate.enter(leg("first"), 1, tenant="c")
    sizes, waiting, got = dict[LegId, tuple[str, int]](), Counter[str](), Counter[str]()
    for number, tenant in enumerate(tenants):
        sizes[leg(f"{number}")] = tenant, 50  # of one length: the order of turns alone decides
        waiting[tenant] += 1
        assert gate.enter(leg(f"{number}"), 50, tenant=tenant) == []
    while through:
        opened = gate.leave(through.pop())
        for name in opened:
            tenant, tokens = sizes[name]
            waiting[tenant] -= 1
            got[tenant] += tokens
            if waiting["a"] and waiting["b"]:
                assert abs(got["a"] - got["b"]) <= 50
        through += opened
    assert sum(got.values()) == 50 * len(tenants)
