"""A decode worker's book: commit, batch, preemption, and every leg's one end. LC-03, LC-05, SP-02."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations

import pytest
from baton.decode_worker.effects import Effect
from baton.engine.step import SampledToken
from baton.proto import worker_pb2 as pb
from baton.proto.errors import TransferFailed
from baton.tests.harness.legs_rig import BLOCK, DecodeBook, drawn, first_tokens, leg


def run_out(book: DecodeBook, steps: int = 200) -> None:
    """Step until the batch is empty."""
    for _ in range(steps):
        if not book.step():
            return
    raise AssertionError(repr(book.legs))


@pytest.mark.parametrize("first_is_early", [True, False])
def test_a_leg_is_committed_when_all_ranks_and_the_first_tokens_are_there(first_is_early: bool) -> None:
    book = DecodeBook(ranks=2)
    one = book.submit(leg(5, 4))
    book.step()
    news: list[Callable[[], Sequence[Effect]]] = [
        partial(book.legs.arrived, one.key, 0, 100, 2, 3.0),
        partial(book.legs.arrived, one.key, 1, 50, 1, 3.0),
    ]
    news.insert(0 if first_is_early else 2, partial(book.legs.first_tokens, one.key, first_tokens(one), 3.0))
    for number, deliver in enumerate(news):
        assert len(book.of("committed")) == 0, number
        book.do(deliver())
        book.do(deliver())  # repeated news changes nothing
    (committed,) = book.of("committed")
    assert (committed.bytes, committed.frames, committed.reserved_s) == (150, 3, 3.0)
    (repeated,) = book.of("tokens")
    assert [(s.request_id, s.attempt, s.token.index, s.token.token_id) for s in repeated.tokens] == [
        (one.key[0], 1, 0, 7)
    ]
    run_out(book)
    said = [step.token for body in book.of("tokens") for step in body.tokens]
    assert [(token.index, token.finish_reason) for token in said] == [(0, ""), (1, ""), (2, ""), (3, "length")]
    assert book.pool.used == 0


def test_one_message_holds_the_tokens_of_all_requests_of_a_step() -> None:
    book = DecodeBook()
    legs = [book.submit(leg(5, 4, first=20 * number)) for number in range(3)]
    book.step()
    for one in legs:
        book.arrive(one)
    before = len(book.of("tokens"))
    book.step()
    assert [len(body.tokens) for body in book.of("tokens")[before:]] == [3]


def test_a_step_feeds_the_last_token_at_its_position() -> None:
    book = DecodeBook()
    one = book.submit(leg(5, 6, generated=(11, 12)))
    book.step()
    assert book.expected[one.key].tokens == 7
    book.arrive(one)
    steps, _ = book.legs.plan()
    (step,) = steps
    assert (list(step.tokens), step.start, step.draw.generated if step.draw else None) == ([7], 7, [11, 12, 7])
    assert len(step.blocks) * BLOCK >= step.end


def test_choices_share_full_blocks_and_copy_the_partial_one() -> None:
    book = DecodeBook(blocks=20)
    one = book.submit(leg(6, 9, choices=(0, 1, 2)))
    book.step()
    book.arrive(one)
    steps, _ = book.legs.plan()
    tables = [list(step.blocks) for step in steps]
    assert len({table[0] for table in tables}) == 1
    assert len({block for table in tables for block in table[1:]}) == sum(len(table) - 1 for table in tables)
    assert book.copied == [(tables[0][1], tables[1][1]), (tables[0][1], tables[2][1])]
    book.do(book.legs.computed(steps, drawn(steps), 0.0))
    run_out(book)
    assert [book.pool.used, set(book.finished().values())] == [0, {1}]


def test_choices_that_ended_with_their_first_token_do_not_run() -> None:
    book = DecodeBook(blocks=20)
    one = book.submit(leg(6, 9, choices=(0, 1, 2)))
    book.step()
    tokens = [pb.Token(choice=c, token_id=7, finish_reason="stop" if c == 0 else "") for c in range(3)]
    book.do(book.legs.first_tokens(one.key, pb.FirstTokens(tokens=tokens).SerializeToString(), 0.0))
    book.do(book.legs.arrived(one.key, 0, 1, 1, 0.0))
    steps, _ = book.legs.plan()
    assert [step.draw.choices for step in steps if step.draw] == [(1,), (2,)]
    book.do(book.legs.cancel(one.key))
    assert book.pool.used == 0


def test_a_leg_whose_kv_is_withdrawn_fails_unless_it_has_all_of_it() -> None:
    book = DecodeBook()
    whole, reserved, lacking, waiting = (book.submit(leg(5, 6, first=20 * number)) for number in range(4))
    book.legs.intake.waiting.pop(waiting.key)
    book.step()
    book.legs.submit(1, waiting, 0.0)
    book.arrive(whole)
    book.do(book.legs.arrived(lacking.key, 0, 100, 2, 0.0))  # the first tokens did not come
    used = book.pool.used
    for one in (whole, reserved, lacking, waiting, whole, reserved):
        book.do(book.legs.withdrawn(one.key, TransferFailed("link lost")))
    lost = [reserved, lacking, waiting]
    assert [(failed.leg.request_id, failed.code, failed.message) for failed in book.of("failed")] == [
        (one.key[0], "transfer_failed", "link lost") for one in lost
    ]
    assert 0 < book.pool.used < used
    run_out(book)
    assert [list(book.finished()), book.pool.used] == [[(whole.key[0], 0)], 0]


@pytest.mark.parametrize("payload", [b"\xff\xff", pb.FirstTokens(tokens=[pb.Token(choice=5)]).SerializeToString()])
def test_first_tokens_that_are_not_the_legs_fail_it(payload: bytes) -> None:
    book = DecodeBook()
    one = book.submit(leg(5))
    book.step()
    book.do(book.legs.first_tokens(one.key, payload, 0.0))
    assert [failed.code for failed in book.of("failed")] == ["transfer_failed"]
    assert book.pool.used == 0


def test_what_a_sequence_wrote_can_be_found_again() -> None:
    book = DecodeBook()
    one = book.submit(leg(5, 6))
    book.step()
    book.arrive(one)
    run_out(book)  # 5 + 6 tokens, of which the last is not in the pool
    assert len(book.pool.match([*one.tokens, *[7] * 6], "")) == 2


def test_an_abandoned_leg_is_freed_in_silence() -> None:
    book = DecodeBook()
    one = book.submit(leg(5))
    book.step()
    book.do(book.legs.abandoned(one.key))
    book.do(book.legs.abandoned(one.key))
    assert [book.pool.used, [event.WhichOneof("event") for event in book.told]] == [0, []]


def test_a_failed_transfer_ends_the_leg_once() -> None:
    book = DecodeBook(ranks=2)
    one = book.submit(leg(5))
    book.step()
    for _ in range(2):
        book.do(book.legs.receive_failed(one.key, TransferFailed("checksum")))
    assert [(failed.code, failed.message) for failed in book.of("failed")] == [("transfer_failed", "checksum")]
    book.arrive(one, ranks=2)
    assert [book.pool.used, book.of("committed")] == [0, []]


def test_a_failure_after_the_commit_is_no_news() -> None:
    book = DecodeBook()
    one = book.submit(leg(5, 4))
    book.step()
    book.arrive(one)
    book.do(book.legs.receive_failed(one.key, TransferFailed("link lost")))
    book.do(book.legs.abandoned(one.key))
    run_out(book)
    assert [book.of("failed"), set(book.finished().values())] == [[], {1}]


def test_a_session_that_ends_takes_its_legs_and_no_others() -> None:
    book = DecodeBook(blocks=8)
    running, reserved = book.submit(leg(4, 6), session=1), book.submit(leg(4, 6, first=50), session=1)
    other = book.submit(leg(9, 12, first=90), session=2)
    waiting = book.submit(leg(4, 6), session=1)
    book.step()
    book.arrive(running)
    assert set(book.expected) == {reserved.key, other.key}
    assert waiting.key in book.legs.intake.waiting
    book.do(book.legs.session_ended(1))
    assert set(book.expected) == {other.key}
    load = book.legs.load()
    assert (load.running, load.waiting, load.held_legs, load.used_blocks) == (0, 0, 1, 4)


def test_sp_02_two_legs_that_fill_the_pool_can_both_begin() -> None:
    """Pool of 7: A needs 4 + 1, B needs 3 + 1. B is not admitted until A's blocks leave room for both to begin."""
    book = DecodeBook(blocks=7)
    a, b = book.submit(leg(16, 4)), book.submit(leg(12, 4, first=100))
    book.step()
    assert list(book.expected) == [a.key]
    book.arrive(a)
    run_out(book)
    assert list(book.expected) == [b.key]
    book.arrive(b)
    run_out(book)
    assert [book.legs.preemptions, len(book.finished())] == [0, 2]


def test_sp_02_joint_growth_beyond_the_pool_preempts_the_newest_once() -> None:
    book = DecodeBook(blocks=8)
    a, b = book.submit(leg(4, 20)), book.submit(leg(4, 20, first=100))
    book.step()
    book.arrive(a)
    book.arrive(b)
    run_out(book)
    (lost,) = book.of("preempted")
    assert (lost.leg.request_id, lost.choice) == (b.key[0], 0)
    said = [s.token.token_id for body in book.of("tokens") for s in body.tokens if s.request_id == b.key[0]]
    resumed = book.submit(leg(4, 20, first=100, generated=said))
    book.step()
    assert book.expected[resumed.key].cached >= 8  # what it had written is still here
    book.arrive(resumed)
    c = book.submit(leg(4, 20, first=200))
    book.step()
    assert c.key in book.expected  # beside the resumed one
    book.arrive(c)
    run_out(book)
    finished = book.finished()
    assert finished[resumed.key[0], 0] == 1
    assert [lost.leg.request_id for lost in book.of("preempted")] == [b.key[0]]  # nobody twice, not even for c
    assert book.pool.used == 0


def test_a_stalled_sequence_goes_on_when_a_reservation_is_given_up() -> None:
    book = DecodeBook(blocks=4)
    a, b = book.submit(leg(4, 12)), book.submit(leg(4, 12, first=100))
    book.step()
    book.arrive(a)
    for _ in range(6):
        book.step()
    assert book.legs.plan()[0] == []  # the other half of the pool is a reservation
    book.do(book.legs.cancel(b.key))
    run_out(book)
    assert book.finished()[a.key[0], 0] == 1


def test_nobody_is_admitted_while_a_sequence_stalls() -> None:
    book = DecodeBook(blocks=4)
    a, b = book.submit(leg(4, 12)), book.submit(leg(4, 12, first=100))
    book.step()
    book.arrive(a)
    for _ in range(6):
        book.step()
    book.do(book.legs.cancel(b.key))
    c = book.submit(leg(1, 2, first=200))
    steps, _ = book.legs.plan()
    assert len(steps) == 1  # a has its block
    book.do(book.legs.admit(0.0))
    assert c.key in book.expected  # and only then the line gets what is left


EVENTS = ("finish", "abort", "transfer_done")


@pytest.mark.parametrize("order", list(permutations(EVENTS)), ids="-".join)
@pytest.mark.parametrize("times", [1, 2])
def test_lc_03_finish_abort_and_transfer_done_in_any_order(order: tuple[str, ...], times: int) -> None:
    book = DecodeBook()
    one = book.submit(leg(5, 2))
    book.step()
    row = [[SampledToken(0, 7, None, ())]]
    for event in order:
        for _ in range(times):
            if event == "transfer_done":
                book.arrive(one)
            elif event == "abort":
                book.do(book.legs.cancel(one.key))
            elif steps := book.legs.plan()[0]:
                book.do(book.legs.computed(steps, row, 0.0))
                book.do(book.legs.computed(steps, row, 0.0))
    book.do(book.legs.cancel(one.key))
    assert book.pool.used == 0
    assert book.expected == {}
    assert max(book.finished().values(), default=0) <= 1
    assert book.of("failed") == []


def test_lc_05_waiting_reservations_are_cancelled_without_blocks() -> None:
    book = DecodeBook(seats=1)
    running = book.submit(leg(4, 5))
    queued = [book.submit(leg(4, 5)) for _ in range(5)]
    book.step()
    book.arrive(running)
    for one in queued:
        book.do(book.legs.cancel(one.key))
    book.do(book.legs.cancel(("never seen", 1, 0)))
    run_out(book)
    assert [book.legs.load().waiting, book.pool.used, len(book.finished())] == [0, 0, 1]
