"""The handoff tables: terminal once, illegal events change nothing, and coverage against a set of cells."""

from __future__ import annotations

import itertools

import pytest
from baton.kv_transfer.handoff import RECEIVE, SEND, Coverage, Handoff, ReceiveLeg, SendLeg
from baton.kv_transfer.plan import Box
from baton.kv_transfer.ticket import Ticket, TicketBook
from baton.proto.errors import TransferFailed
from baton.tests.harness.kv_rig import layout
from hypothesis import given
from hypothesis import strategies as st

TERMINAL = {"complete", "failed", "abandoned", "forgotten", "sent", "cancelled"}
EXPECTED = Box((2, 6), (0, 2), (0, 2))


def test_no_table_leaves_a_terminal_state() -> None:
    for table in (RECEIVE, SEND):
        assert not [state for state, _ in table if state in TERMINAL]


@given(st.lists(st.sampled_from(["covered", "finished", "fail", "abandon", "forget", "acknowledged", "cancel", "?"])))
def test_a_random_walk_reaches_at_most_one_terminal_state(events: list[str]) -> None:
    for table, initial in ((RECEIVE, "expecting"), (SEND, "sending")):
        handoff = Handoff(table, initial)
        ends = []
        for event in events:
            before = repr(handoff)
            changed = handoff.on(event)
            assert changed == (repr(handoff) != before)
            if changed and handoff.state in TERMINAL:
                ends.append(handoff.state)
        assert len(ends) <= 1


def test_lc_03_finish_abort_and_transfer_in_any_order_end_once() -> None:
    """Also with each event doubled."""
    for order in itertools.permutations(["placed", "first", "forget"] * 2):
        leg = ReceiveLeg(EXPECTED, wants_first_tokens=True)
        ends = 0
        for event in order:
            was_open = leg.open
            if event == "placed":
                leg.placed(EXPECTED, 0, 1)
            elif event == "first":
                leg.first_tokens()
            else:
                leg.end("forget")
            ends += was_open and not leg.open
        assert ends == 1


@given(
    st.lists(
        st.tuples(*(st.tuples(st.integers(0, 7), st.integers(0, 7)) for _ in range(3))),
        max_size=30,
    )
)
def test_coverage_equals_a_set_of_cells(boxes: list[tuple[tuple[int, int], ...]]) -> None:
    coverage, cells = Coverage(EXPECTED), set[tuple[int, int, int]]()

    def cells_of(box: Box) -> set[tuple[int, int, int]]:
        return set(itertools.product(range(*box.tokens), range(*box.layers), range(*box.heads)))

    for tokens, layers, heads in boxes:
        box = Box(tokens, layers, heads)
        mine = cells_of(box)
        legal = bool(mine) and mine <= cells_of(EXPECTED) and not mine & cells
        assert (coverage.problem(box) == "") == legal
        if legal:
            coverage.add(box)
            cells |= mine
        assert coverage.cells == len(cells)
        assert coverage.complete == (cells == cells_of(EXPECTED))


def test_kv_09_a_source_that_ends_early_is_named() -> None:
    leg = ReceiveLeg(EXPECTED, wants_first_tokens=False)
    assert not leg.placed(Box((2, 6), (0, 2), (0, 1)), 0, 10)
    assert leg.source_done(0, 1) == ("", False)
    assert leg.source_done(1, 1) == ("prefill rank 1 ended the leg after 0 of 8 cells", False)
    assert leg.placed(Box((2, 6), (0, 2), (1, 2)), 1, 10)
    assert leg.state == "complete"
    assert (leg.bytes, leg.frames) == (20, 2)


def test_an_empty_range_completes_when_a_source_is_done() -> None:
    leg = ReceiveLeg(Box((6, 6), (0, 2), (0, 2)), wants_first_tokens=True)
    assert leg.first_tokens()
    assert leg.source_done(0, 2) == ("", True)
    assert leg.state == "complete"


def test_a_send_is_over_when_all_links_have_acknowledged() -> None:
    leg = SendLeg([0, 1])
    assert not leg.acknowledged(0)
    assert not leg.acknowledged(0)
    assert leg.acknowledged(1)
    assert not leg.end("cancel")
    assert leg.state == "sent"


def _ticket(book: TicketBook) -> Ticket:
    return book.issue(
        ("r", 1, 0),
        worker_id="d",
        incarnation="i",
        layout=layout([(0, 2)]),
        addresses=("127.0.0.1:1",),
        cached_tokens=3,
        prompt_tokens=9,
        carrier="inline",
        lifetime_s=60.0,
    )


def test_tickets_survive_the_way_and_no_change() -> None:
    book = TicketBook(b"0123456789abcdef")
    ticket = _ticket(book)
    data = ticket.pack()
    assert Ticket.unpack(data) == ticket
    assert TicketBook(b"0123456789abcdef").verify(data, "d", "i") == ticket
    for index in range(len(data)):
        with pytest.raises(TransferFailed):
            book.verify(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :], "d", "i")
    for wrong in (b"", data[:40], data + b"x", b"x" * 40_000):
        with pytest.raises(TransferFailed):
            book.verify(wrong, "d", "i")
    with pytest.raises(TransferFailed, match="incarnation j"):
        book.verify(data, "d", "j")
    with pytest.raises(TransferFailed, match="not signed"):
        TicketBook(b"another secret 16").verify(data, "d", "i")
    with pytest.raises(ValueError, match="16 bytes"):
        TicketBook(b"short")


def test_a_ticket_serves_each_pair_of_ranks_once() -> None:
    book = TicketBook(b"0123456789abcdef")
    data = _ticket(book).pack()
    book.redeem(data, "d", "i", (0, 0))
    book.redeem(data, "d", "i", (1, 0))
    with pytest.raises(TransferFailed, match="used before by prefill rank 1"):
        book.redeem(data, "d", "i", (1, 0))
