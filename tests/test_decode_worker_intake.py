"""How legs get into a decode worker: the exact number of blocks, the line, and the clocks. SP-01, SP-02, SP-05."""

from __future__ import annotations

import pytest
from baton.decode_worker.intake import blocks_needed, refuse_what_never_fits
from baton.engine.block_pool import BlockPool
from baton.proto.errors import InvalidRequest
from baton.tests.harness.legs_rig import BLOCK, DecodeBook, leg


@pytest.mark.parametrize(
    ("length", "max_tokens", "choices", "shared", "table", "total"),
    [
        (1, 2, 1, 0, 1, 1),  # positions 0 and 1: one block, and never more
        (3, 2, 1, 0, 1, 1),
        (3, 3, 1, 0, 2, 2),  # position 4 may be written
        (4, 2, 1, 1, 2, 2),  # the block is full: the first decoded token needs another
        (4, 50, 1, 1, 2, 2),
        (5, 50, 1, 1, 3, 3),  # one block beyond the prompt
        (5, 4, 1, 1, 2, 2),  # but not where it can never be used
        (5, 50, 3, 1, 3, 7),  # every choice has its own partial block and what follows
        (8, 50, 3, 2, 3, 5),
    ],
)
def test_sp_05_blocks_of_a_reservation_are_exact(
    length: int, max_tokens: int, choices: int, shared: int, table: int, total: int
) -> None:
    need = blocks_needed(leg(length, max_tokens, choices=range(choices)), BLOCK)
    assert (need.shared, need.table, need.total) == (shared, table, total)


def test_a_resumed_leg_reserves_all_it_can_ever_need() -> None:
    need = blocks_needed(leg(5, 20, generated=(1, 2)), BLOCK)  # 7 tokens now, at most 24
    assert (need.table, need.total) == (6, 6)


@pytest.mark.parametrize(
    ("length", "max_tokens", "choices", "field", "text"),
    [
        (64, 2, 1, "prompt", r"64 tokens does not fit.*16 KV blocks of 4 tokens \(64 tokens\)"),
        (100, 2, 1, "prompt", "100 tokens does not fit"),
        (40, 60, 1, "max_tokens", "40 tokens and 60 more do not fit.*16 KV blocks"),
        (21, 20, 8, "n", "8 choices need 21 blocks"),
        (4, 4, 9, "n", "9 choices, but the decode worker runs 8"),
        (40, 25, 1, None, ""),  # 64 tokens at most: the last is never written
    ],
)
def test_sp_01_what_never_fits_is_refused_with_the_numbers(
    length: int, max_tokens: int, choices: int, field: str | None, text: str
) -> None:
    one = leg(length, max_tokens, choices=range(choices))
    if field is None:
        refuse_what_never_fits(one, BlockPool(16, BLOCK, True), 8, 1000)
        return
    with pytest.raises(InvalidRequest, match=text) as caught:
        refuse_what_never_fits(one, BlockPool(16, BLOCK, True), 8, 1000)
    assert caught.value.field == field


def test_more_than_the_context_is_refused() -> None:
    refuse_what_never_fits(leg(10, 11), BlockPool(16, BLOCK, True), 8, 20)
    with pytest.raises(InvalidRequest, match="exceed the context of 20"):
        refuse_what_never_fits(leg(10, 12), BlockPool(16, BLOCK, True), 8, 20)


def test_sp_01_others_run_beside_what_was_refused() -> None:
    book = DecodeBook(blocks=16)
    with pytest.raises(InvalidRequest):
        book.submit(leg(40, 60))
    one = book.submit(leg(5))
    book.step()
    assert one.key in book.expected


def test_the_head_of_the_line_is_not_bypassed() -> None:
    book = DecodeBook(blocks=6)
    first, large, small = book.submit(leg(13)), book.submit(leg(17, first=50)), book.submit(leg(1, 2, first=90))
    book.step()
    assert list(book.expected) == [first.key]
    book.do(book.legs.cancel(first.key))
    book.step()
    assert list(book.expected) == [large.key]
    book.do(book.legs.cancel(large.key))
    book.step()
    assert list(book.expected) == [small.key]


def test_seats_count_every_choice() -> None:
    book = DecodeBook(blocks=100, seats=4)
    first = book.submit(leg(1, choices=range(3)))
    second = book.submit(leg(1, choices=range(2)))
    book.step()
    assert list(book.expected) == [first.key]
    book.arrive(first)
    while first.key not in book.expected and second.key not in book.expected:
        book.step()
    assert len(book.finished()) == 3  # the seats became free when the first leg's choices ended


def test_a_wait_that_is_too_long_is_refused_with_a_hint() -> None:
    book = DecodeBook(blocks=2)
    held = book.pool.allocate(2)
    book.submit(leg(4, 5))
    book.now = 99.0
    book.step()
    assert book.legs.intake.next_deadline() == 100.0
    book.now = 100.0
    book.step()
    assert [(failed.code, failed.retry_after_s) for failed in book.of("failed")] == [("exhausted", 1.0)]
    book.pool.release(held)
    book.step()
    assert book.pool.used == 0


def test_a_reservation_without_progress_is_reaped_by_the_clock() -> None:
    book = DecodeBook(ranks=2)
    one = book.submit(leg(5))
    book.step()
    book.now = 40.0
    book.do(book.legs.arrived(one.key, 0, 10, 1, book.now))
    book.now = 60.0
    book.step()
    assert book.of("failed") == []
    book.now = 91.0
    book.step()
    assert [failed.code for failed in book.of("failed")] == ["transfer_failed"]
    assert [book.pool.used, book.expected] == [0, {}]


def test_a_deadline_ends_waiting_and_reserved_legs() -> None:
    book = DecodeBook(blocks=2)
    book.submit(leg(4, 5, deadline=5.0))
    book.submit(leg(4, 5, deadline=6.0))
    book.step()
    book.now = 7.0
    book.step()
    assert [failed.code for failed in book.of("failed")] == ["deadline_exceeded"] * 2
    assert book.pool.used == 0


def test_cached_blocks_are_pinned_and_only_the_rest_is_expected() -> None:
    book = DecodeBook()
    one = book.submit(leg(10))
    book.step()
    assert (book.expected[one.key].cached, book.expected[one.key].tokens) == (0, 10)
    book.arrive(one)
    again = book.submit(leg(9))
    book.step()
    order = book.expected[again.key]
    assert (order.cached, order.tokens, len(order.blocks)) == (8, 9, 4)
    assert book.legs.load().prefix_hit_tokens == 8


def test_the_last_token_always_comes_from_prefill() -> None:
    book = DecodeBook()
    one = book.submit(leg(8))
    book.step()
    book.arrive(one)
    again = book.submit(leg(8))
    book.step()
    assert book.expected[again.key].cached == 4
