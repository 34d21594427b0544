"""A prefill worker's book when a leg's decode worker is lost: the KV goes on under another key; and prefixes that come
from decode workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from baton.kv_transfer.ticket import Ticket
from baton.prefill_worker.entry import Phase
from baton.proto.errors import InternalError, TransferFailed
from baton.proto.kv_layout import KVLayout
from baton.proto.leg import Leg, key_of
from baton.tests.harness.legs_rig import PrefillBook, again, drawn, leg


def ticket(one: Leg, cached: int) -> bytes:
    """Of a decode worker that holds the first `cached` tokens."""
    layout = KVLayout("m", 2, 2, 8, "default", "float32", 4, ((0, 2),))
    where = layout, ("127.0.0.1:1",)
    made = Ticket(*one.key, "decode-0", "i", *where, cached, one.length, b"n" * 16, "inline", 1.0, 1.0, b"m" * 32)
    return made.pack()


def broken(book: PrefillBook, one: Leg) -> None:
    """The leg's transfer breaks."""
    book.do(book.legs.send_failed(one.key, TransferFailed("link lost")))


# ---- Handover ------------------------------------------------------------------------------------------------------


def test_what_is_computed_waits_when_the_transfer_breaks_and_goes_on_under_another_key() -> None:
    book = PrefillBook(budget=100)
    one = book.submit(leg(9, choices=(0, 1)))
    book.step()
    broken(book, one)
    assert [book.last("unsent").code, book.pool.used, book.open] == ["transfer_failed", 3, {}]
    two = again(one)
    book.do(book.legs.handover(1, two, b"other", one.key))
    book.step()
    assert [book.legs.phase(one.key), book.legs.phase(two.key)] == [None, Phase.HELD]
    assert [book.open, book.finishing] == [{two.key: 9}, {two.key}]
    first = book.last("first")
    assert [key_of(first.leg), [token.choice for token in first.tokens]] == [two.key, [0, 1]]
    assert [first.queue_s, first.prefill_s, first.chunks] == [0, 0, 0]
    assert book.legs.load().computed_prompt_tokens == 9
    book.sent(two.key)
    book.do(book.legs.release(two.key))
    assert book.pool.used == 0


def test_what_was_sent_whole_and_not_released_is_sent_again() -> None:
    """The decode worker was lost after the last frame and before it committed."""
    book = PrefillBook(budget=100)
    one = book.submit(leg(9))
    book.step()
    book.sent(one.key)
    two = again(one)
    book.do(book.legs.handover(1, two, b"other", one.key))
    book.step()
    assert [book.open, book.finishing] == [{two.key: 9}, {two.key}]
    book.do(book.legs.release(two.key))
    assert book.pool.used == 3  # while it is being sent
    book.sent(two.key)
    assert [book.pool.used, book.count("sent")] == [0, 2]


@pytest.mark.parametrize("breaks", [True, False])
def test_what_is_being_computed_goes_on(breaks: bool) -> None:
    """The decode worker is lost in mid-prompt; the router may say so before the link does."""
    book = PrefillBook(budget=8)
    one = book.submit(leg(24))
    book.step()
    if breaks:
        broken(book, one)
    steps = book.plan()
    two = again(one)
    book.do(book.legs.handover(1, two, b"other", one.key))  # while a step runs
    book.do(book.legs.computed(steps, drawn(steps), 0.0))
    assert book.plan()[0].attempt == 2
    assert book.open == {two.key: 16}
    book.step()
    assert [book.legs.phase(two.key), book.finishing, book.count("first")] == [Phase.HELD, {two.key}, 1]
    assert book.legs.load().computed_prompt_tokens == 24
    book.do(book.legs.cancel(two.key))
    assert [book.pool.used, book.open] == [0, {}]


def test_a_queued_prompt_takes_the_new_ticket_and_keeps_its_place() -> None:
    book = PrefillBook(blocks=4, budget=100)
    holder, one, behind = (book.submit(leg(12, first=100 * n)) for n in range(3))
    book.step()
    two = again(one)
    book.do(book.legs.handover(1, two, b"other", one.key))
    book.do(book.legs.cancel(holder.key))
    book.step()
    assert [book.legs.phase(two.key), book.legs.phase(behind.key)] == [Phase.HELD, Phase.QUEUED]


def test_only_some_choices_may_go_on() -> None:
    book = PrefillBook(budget=100)
    one = book.submit(leg(9, choices=(0, 1, 2)))
    book.step()
    broken(book, one)
    two = again(one, 1, 2)
    book.do(book.legs.handover(1, two, b"other", one.key))
    book.step()
    assert [token.choice for token in book.last("first").tokens] == [1, 2]
    wrong = again(two, 0)
    book.do(book.legs.handover(1, wrong, b"other", two.key))
    book.step()
    assert key_of(book.last("failed").leg) == wrong.key


def test_what_is_not_held_is_refused_and_other_sessions_get_nothing() -> None:
    book = PrefillBook(budget=100)
    one = book.submit(leg(9))
    book.step()
    longer = dataclasses.replace(again(one), tokens=[*one.tokens, 1])
    refused = [
        (1, leg(9), ("nobody", 1, 0)),
        (1, leg(9), one.key),
        (2, again(one, attempt=2), one.key),
        (1, dataclasses.replace(longer, key=(one.key[0], 3, 0)), one.key),
    ]
    for session, other, held in refused:
        book.do(book.legs.handover(session, other, b"other", held))
        book.step()
        assert [key_of(book.last("failed").leg), book.last("failed").code] == [other.key, "unavailable"]
    assert book.legs.phase(one.key) is Phase.HELD


def test_an_error_that_no_other_worker_mends_ends_the_leg() -> None:
    book = PrefillBook(budget=100)
    one = book.submit(leg(9))
    book.step()
    book.do(book.legs.send_failed(one.key, InternalError("the pool cannot be read")))
    assert [book.last("failed").code, book.pool.used] == ["internal", 0]


@pytest.mark.parametrize("cancelled", ["old", "new"])
def test_a_cancel_before_the_step_boundary_takes_the_handover_with_it(cancelled: str) -> None:
    book = PrefillBook(budget=100)
    one = book.submit(leg(9))
    book.step()
    broken(book, one)
    two = again(one)
    book.do(book.legs.handover(1, two, b"other", one.key))
    book.do(book.legs.cancel(one.key if cancelled == "old" else two.key))
    book.step()
    assert [book.pool.used, book.open, book.count("failed")] == [0, {}, int(cancelled == "old")]


def test_a_session_that_ends_takes_its_handovers_along() -> None:
    book = PrefillBook(budget=100)
    one = book.submit(leg(9))
    book.step()
    broken(book, one)
    book.do(book.legs.handover(1, again(one), b"other", one.key))
    book.do(book.legs.session_ended(1))
    book.step()
    assert [book.pool.used, book.open, book.count("failed")] == [0, {}, 0]


@pytest.mark.parametrize("way", ["unsent", "sent"])
def test_blocks_that_nobody_sends_for_are_reaped_by_the_clock(way: str) -> None:
    book = PrefillBook(budget=100)
    one = book.submit(leg(9))
    book.step()
    if way == "sent":
        book.sent(one.key)
    else:
        broken(book, one)
    book.expire(10.0)
    assert book.legs.next_deadline() == 60.0
    book.expire(59.0)
    assert book.pool.used == 3
    book.expire(60.0)
    assert [book.pool.used, book.legs.phase(one.key), book.count("failed")] == [0, None, 0]
    book.do(book.legs.handover(1, again(one), b"other", one.key))
    book.step()
    assert book.last("failed").code == "unavailable"


def test_a_prompt_that_needs_blocks_takes_those_that_were_not_sent() -> None:
    book = PrefillBook(blocks=4, budget=100)
    one = book.submit(leg(12))
    book.step()
    new = book.submit(leg(12, first=50))
    book.step()
    assert book.legs.phase(new.key) is Phase.QUEUED  # while it is being sent
    broken(book, one)
    book.step()
    assert [book.legs.phase(one.key), book.legs.phase(new.key)] == [None, Phase.HELD]


# ---- prefixes from the decode worker -------------------------------------------------------------------------------


def fetching(ranks: int = 1) -> tuple[PrefillBook, Leg]:
    """A prompt of 21 tokens whose decode worker has the first 12 of them."""
    made = PrefillBook(budget=100, ranks=ranks, fetch_tokens=8)
    one = leg(21)
    made.submit(one, ticket(one, 12))
    made.plan()
    return made, one


def test_a_prefix_is_fetched_and_only_the_rest_is_computed() -> None:
    book, one = fetching(ranks=2)
    want = book.wanted[one.key]
    assert (want.start, want.stop, len(want.blocks)) == (0, 12, 6)
    assert [book.legs.phase(one.key), book.open, book.legs.load().running] == [Phase.FETCHING, {}, 1]
    assert not book.plan()
    book.do(book.legs.arrived(one.key, 1))
    assert not book.plan()
    book.do(book.legs.arrived(one.key, 0))
    assert [book.wanted, book.open] == [{}, {one.key: 12}]
    (step,) = book.step()
    assert (step.start, len(step.tokens)) == (12, 9)
    first = book.last("first")
    assert (first.cached_tokens, first.fetched_tokens, book.legs.load().computed_prompt_tokens) == (0, 12, 9)
    assert len(book.pool.match(one.tokens, "")) == 5  # found here from now on


def test_only_what_is_lacking_here_is_fetched() -> None:
    book = PrefillBook(budget=100, fetch_tokens=8)
    book.submit(leg(9), b"")
    book.step()
    for cached, wanted in ((12, None), (15, None), (16, (8, 16)), (20, (8, 20))):
        one = leg(21)
        book.submit(one, ticket(one, cached))
        book.plan()
        found = book.wanted.get(one.key)
        assert (found and (found.start, found.stop)) == wanted, cached
        book.do(book.legs.cancel(one.key))
    assert [book.pool.used, book.wanted] == [0, {}]


ENDS: dict[str, Callable[[PrefillBook, Leg], None]] = {
    "fails": lambda book, one: book.do(book.legs.receive_failed(one.key)),
    "silent": lambda book, one: book.expire(5.0),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_prefix_that_does_not_come_is_computed_and_nobody_is_told(end: str) -> None:
    book, one = fetching()
    assert book.legs.next_deadline() == 5.0
    ENDS[end](book, one)
    assert [book.wanted, book.open] == [{}, {one.key: 0}]
    book.do(book.legs.arrived(one.key, 0))  # late news
    (step,) = book.step()
    assert [(step.start, len(step.tokens)), book.last("first").fetched_tokens, book.count("failed")] == [(0, 21), 0, 0]


@pytest.mark.parametrize("end", ["cancel", "session", "fail"])
def test_a_leg_that_fetches_is_freed_at_once(end: str) -> None:
    book, one = fetching()
    if end == "cancel":
        book.do(book.legs.cancel(one.key))
    elif end == "session":
        book.do(book.legs.session_ended(1))
    else:
        book.do(book.legs.fail(one.key, TransferFailed("x")))
    assert [book.pool.used, book.wanted, book.plan()] == [0, {}, []]


def test_a_handover_while_fetching_computes_the_prefix() -> None:
    book, one = fetching()
    two = again(one)
    book.do(book.legs.handover(1, two, b"other", one.key))
    (step,) = book.plan()
    assert [(step.attempt, step.start, len(step.tokens)), book.wanted, book.open] == [(2, 0, 21), {}, {two.key: 0}]
