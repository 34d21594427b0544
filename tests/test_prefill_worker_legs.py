"""A prefill worker's book: who holds which blocks, and what routers are told. LC-03, LC-05, LC-09, SP-01."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from baton.prefill_worker.effects import Tell
from baton.prefill_worker.entry import Phase
from baton.proto import worker_pb2 as pb
from baton.proto.errors import InvalidRequest, TransferFailed
from baton.proto.leg import Leg, LegKey, key_of
from baton.tests.harness.legs_rig import BLOCK, PrefillBook, again, drawn, leg
from hypothesis import given, settings
from hypothesis import strategies as st


def test_a_leg_goes_through_its_phases() -> None:
    book = PrefillBook(budget=8)
    one = book.submit(leg(12))
    assert book.legs.phase(one.key) is Phase.QUEUED
    assert book.pool.used == 0
    book.step()
    assert book.legs.phase(one.key) is Phase.COMPUTING
    assert book.pool.used == 3
    book.step()
    assert book.legs.phase(one.key) is Phase.HELD
    assert [book.count("first"), book.finishing] == [1, {one.key}]
    book.sent(one.key)
    assert [book.count("sent"), book.pool.used] == [
        1,
        3,
    ]  # until the router releases: the leg may have to be sent again
    book.do(book.legs.release(one.key))
    assert book.legs.phase(one.key) is None
    assert book.pool.used == 0


def test_first_tokens_say_what_the_router_and_the_decode_worker_need() -> None:
    book = PrefillBook(budget=100)
    one = book.submit(leg(6, choices=(0, 1, 2)))
    book.step()
    (event,) = [event.first for event in book.told]
    assert [(t.choice, t.index, t.token_id, t.finish_reason) for t in event.tokens] == [(c, 0, 7, "") for c in range(3)]
    resumed = book.submit(leg(6, max_tokens=4, generated=(5, 5, 5), choices=(2,)))
    book.step()
    (last,) = book.told[-1].first.tokens
    assert (last.choice, last.index, last.finish_reason) == (2, 3, "length")
    assert book.legs.phase(resumed.key) is None
    assert book.legs.phase(one.key) is Phase.HELD


def test_a_release_waits_for_the_transfer() -> None:
    book = PrefillBook()
    one = book.submit(leg(4))
    book.step()
    book.do(book.legs.release(one.key))
    assert book.pool.used == 1
    book.sent(one.key)
    assert [book.pool.used, book.count("sent")] == [0, 1]


def test_a_transfer_that_fails_after_the_release_is_nobodys_business() -> None:
    book = PrefillBook()
    one = book.submit(leg(4))
    book.step()
    book.do(book.legs.release(one.key))
    book.do(book.legs.send_failed(one.key, TransferFailed("link lost")))
    assert [book.pool.used, book.count("failed")] == [0, 0]


def test_a_leg_is_sent_when_every_rank_says_so() -> None:
    book = PrefillBook(ranks=2)
    one = book.submit(leg(4))
    book.step()
    book.sent(one.key, rank=1)
    book.sent(one.key, rank=1)
    assert book.count("sent") == 0
    book.sent(one.key, rank=0)
    (event,) = [event.sent for event in book.told if event.WhichOneof("event") == "sent"]
    assert (event.bytes, event.frames, event.transfer_s, event.exposed_s) == (20, 2, 1.0, 1.0)


@pytest.mark.parametrize("ticket", [b"", b"ticket"])
def test_a_leg_that_ends_with_its_first_token_holds_nothing(ticket: bytes) -> None:
    book = PrefillBook()
    one = book.submit(leg(4, max_tokens=1), ticket)
    book.step()
    assert book.legs.phase(one.key) is None
    assert [book.pool.used, book.count("first"), book.open] == [0, 1, {}]


def test_a_choice_that_goes_on_keeps_the_transfer() -> None:
    book = PrefillBook()
    one = book.submit(leg(4, choices=(0, 1), stop_token_ids=frozenset({9})))
    steps = book.plan()
    (first,) = drawn(steps)
    mixed = [first[0], type(first[1])(1, 9, None, ())]
    book.do(book.legs.computed(steps, [mixed], 0.0))
    assert [token.finish_reason for token in book.told[0].first.tokens] == ["", "stop"]
    assert book.finishing == {one.key}


def test_cached_blocks_are_shared_and_the_last_token_is_computed() -> None:
    book = PrefillBook(budget=100)
    book.submit(leg(8), b"")
    book.submit(leg(8), b"")
    book.step()
    again = book.submit(leg(8))
    (step,) = book.plan()
    assert (step.start, len(step.tokens)) == (4, 4)
    book.do(book.legs.computed([step], drawn([step]), 0.0))
    assert book.told[-1].first.cached_tokens == 4
    assert book.legs.load().prefix_hit_tokens == 4
    book.do(book.legs.cancel(again.key))


def test_blocks_are_given_in_the_order_of_arrival() -> None:
    book = PrefillBook(blocks=4, budget=100)
    first, large, small = (book.submit(leg(n, first=100 * n)) for n in (8, 12, 4))
    book.step()
    assert book.legs.phase(large.key) is Phase.QUEUED
    assert book.legs.phase(small.key) is Phase.QUEUED  # it would fit, but does not overtake
    book.do(book.legs.cancel(first.key))
    book.step()
    assert book.legs.phase(large.key) is Phase.HELD
    assert book.legs.phase(small.key) is Phase.HELD


def test_a_late_leg_fails_unless_it_is_computed() -> None:
    book = PrefillBook(blocks=2, budget=4)
    computing = book.submit(leg(8, deadline=5.0))
    queued = book.submit(leg(4, deadline=4.0))
    book.plan()
    assert book.legs.next_deadline() == 4.0
    book.do(book.legs.expire(4.5))
    assert [event.failed.code for event in book.told] == ["deadline_exceeded"]
    book.do(book.legs.expire(6.0))
    assert [book.count("failed"), book.pool.used] == [2, 0]
    assert {book.legs.phase(computing.key), book.legs.phase(queued.key)} == {None}


def test_a_session_that_ends_takes_its_legs_and_no_others() -> None:
    book = PrefillBook(budget=100)
    book.submit(leg(4), session=1)
    other = book.submit(leg(4), session=2)
    book.step()
    book.do(book.legs.session_ended(1))
    assert [book.pool.used, set(book.open)] == [1, {other.key}]


def test_a_broken_engine_fails_every_leg_once() -> None:
    book = PrefillBook(budget=4)
    for _ in range(3):
        book.submit(leg(8))
    book.step()
    book.do(book.legs.fail_all(TransferFailed("broken")))
    book.do(book.legs.fail_all(TransferFailed("broken")))
    assert [book.count("failed"), book.pool.used] == [3, 0]


def test_sp_01_a_prompt_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    book = PrefillBook(blocks=16)
    with pytest.raises(
        InvalidRequest, match=r"65 tokens needs 17 KV blocks of 4 tokens.*has 16 \(64 tokens\)"
    ) as caught:
        book.submit(leg(65))
    assert caught.value.field == "prompt"
    book.submit(leg(64))


EVENTS = ("finish", "abort", "transfer_done")


@pytest.mark.parametrize("order", list(permutations(EVENTS)), ids="-".join)
@pytest.mark.parametrize("times", [1, 2])
def test_lc_03_finish_abort_and_transfer_done_in_any_order(order: tuple[str, ...], times: int) -> None:
    book = PrefillBook(budget=100)
    one = book.submit(leg(8))
    steps = book.plan()
    for event in order:
        for _ in range(times):
            if event == "finish":
                book.do(book.legs.computed(steps, drawn(steps), 0.0))
            elif event == "abort":
                book.do(book.legs.cancel(one.key))
            else:
                book.sent(one.key)
    assert book.legs.phase(one.key) is None
    assert book.pool.used == 0
    assert book.count("first") <= 1
    assert book.count("failed") == 0


def test_lc_05_queued_legs_are_cancelled_without_blocks() -> None:
    book = PrefillBook(blocks=2, budget=4)
    running = book.submit(leg(8))
    queued = [book.submit(leg(8)) for _ in range(5)]
    book.step()
    for one in queued:
        book.do(book.legs.cancel(one.key))
    book.do(book.legs.cancel(("never seen", 1, 0)))
    assert book.pool.used == 2
    book.step()
    assert book.legs.phase(running.key) is Phase.HELD
    assert [event.WhichOneof("event") for event in book.told] == ["first"]


@pytest.mark.parametrize("chunk", range(8))
def test_lc_09_a_cancel_drops_the_chunk_in_flight(chunk: int) -> None:
    book = PrefillBook(budget=8)
    one = book.submit(leg(64))
    for _ in range(chunk):
        book.step()
    steps = book.plan()
    book.do(book.legs.cancel(one.key))
    used = book.pool.used
    book.do(book.legs.computed(steps, drawn(steps), 0.0))
    assert [used, book.pool.used, book.told, book.open] == [0, 0, [], {}]
    assert len(book.pool.match(one.tokens, "")) == 2 * chunk  # what was computed before the cancel, and no more


@given(seed=st.integers(0, 10_000), blocks=st.integers(4, 12), cache=st.booleans())
@settings(max_examples=150)
def test_a_walk_never_leaks_a_block_and_every_leg_ends_once(seed: int, blocks: int, cache: bool) -> None:
    rng = random.Random(seed)
    book = PrefillBook(blocks=blocks, budget=rng.choice([1, 3, 8, 50]), prefix_cache=cache)
    seen: list[Leg] = []
    cancelled: set[LegKey] = set()
    for _ in range(80):
        key = rng.choice(seen).key if seen else ("nobody", 1, 0)
        match rng.randrange(10):
            case 0 | 1:
                length = rng.randint(1, blocks * BLOCK)
                new = leg(length, max_tokens=rng.choice([1, 5]), first=rng.choice([0, 1]))
                seen.append(book.submit(new, rng.choice([b"", b"t"])))
            case 2 | 3:
                book.step()
            case 4:
                cancelled.add(key)
                book.do(book.legs.cancel(key))
            case 5 if key in book.finishing:
                book.sent(key)
            case 6:
                book.do(book.legs.release(key))
            case 7 if key in book.open and rng.random() < 0.3:
                book.do(book.legs.send_failed(key, TransferFailed("lost")))
            case 8 if seen:
                held = next(one for one in reversed(seen) if one.key == key)
                seen.append(again(held, attempt=len(seen) + 2))
                book.do(book.legs.handover(1, seen[-1], b"t", rng.choice([key, key, rng.choice(seen).key])))
            case 9 if rng.random() < 0.3:
                book.expire(book.now + 30.0)
    book.step()
    stalled = 0
    while book.legs.load().waiting or book.legs.load().running or book.open:
        before = book.legs.load().computed_prompt_tokens, len(book.told)
        book.step()
        for key in list(book.finishing):
            book.sent(key)
        for one in seen:
            book.do(book.legs.release(one.key))
        stalled = stalled + 1 if before == (book.legs.load().computed_prompt_tokens, len(book.told)) else 0
        assert stalled < 3, repr(book.legs)
    for one in seen:
        book.do(book.legs.release(one.key))
    assert book.pool.used == 0
    assert book.legs.load() == _counters(book)
    ends: dict[LegKey, list[str]] = {}
    for event in book.told:
        kind = str(event.WhichOneof("event"))
        ends.setdefault(key_of(getattr(event, kind).leg), []).append(kind)
    for said in ends.values():
        assert len(said) == len(set(said))
        assert said.index("failed") == len(said) - 1 if "failed" in said else True
    for one in {one.key[0]: one for one in seen}.values():  # the last leg of each request
        if not any(key[0] == one.key[0] for key in cancelled):
            assert {"first", "failed"} & set(ends[one.key])


def _counters(book: PrefillBook) -> pb.Load:
    """What a load says of an idle worker: totals that only grow, and the cache."""
    load = book.legs.load()
    return pb.Load(
        cached_blocks=load.cached_blocks,
        total_blocks=load.total_blocks,
        steps=load.steps,
        prefix_hit_tokens=load.prefix_hit_tokens,
        prefix_query_tokens=load.prefix_query_tokens,
        computed_prompt_tokens=load.computed_prompt_tokens,
    )


def test_effects_name_the_session_of_the_leg() -> None:
    book = PrefillBook()
    one = leg(4)
    book.do(book.legs.submit(42, one, b"", 0.0))
    (told,) = book.legs.fail(one.key, TransferFailed("x"))
    assert isinstance(told, Tell)
    assert told.session == 42
