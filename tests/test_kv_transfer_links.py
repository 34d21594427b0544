"""How many links there are: the sender's cap, idle close and re-open, strangers at the receiver's door, early legs."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from baton.kv_transfer.doorman import MAX_STRANGERS
from baton.kv_transfer.events import Abandoned, LegKey, RankComplete, ReceiveFailed, SendFailed, Sent
from baton.kv_transfer.link_pool import LinkPool
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.ticket import Ticket
from baton.kv_transfer.wire import packed
from baton.tests.harness.holdings import descriptors, threads
from baton.tests.harness.kv_raw_peer import PROMPT, QUICK, SHAPE, RawPeer, hello_fields
from baton.tests.harness.kv_rig import LEG, PARAMS, Events, Rig, TensorStore, heads_of, layout, rig


def _wait(what: str, condition: object, wait_s: float = 30.0) -> None:
    deadline = time.monotonic() + wait_s
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


# ---- the pool, pure ---------------------------------------------------------------------------------------------


class _FakeLink:
    def __init__(self, name: str, used_at: float) -> None:
        self.key = (name, "")
        self.idle = True
        self.used_at = used_at
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


def test_the_pool_gives_all_or_nothing_and_closes_the_least_recently_used() -> None:
    pool: LinkPool[_FakeLink] = LinkPool(3)
    ages = {"a": 3.0, "b": 1.0, "c": 2.0}

    def make(key: tuple[str, str]) -> _FakeLink:
        return _FakeLink(key[0], ages.get(key[0], 9.0))

    got = pool.obtain([(name, "") for name in "abc"], make)
    assert got is not None
    links, fresh = got
    assert len(links) == len(fresh) == 3
    assert pool.obtain([("a", "")], make) == ({("a", ""): links["a", ""]}, [])
    links["b", ""].idle = False
    assert pool.obtain([("c", ""), ("d", "")], make) is None  # c is wanted itself, b is in use
    assert [link.stopped for link in links.values()].count(True) == 1
    assert links["a", ""].stopped
    assert pool.obtain([("c", ""), ("d", "")], make) is None
    assert not links["c", ""].stopped, "one is leaving already"
    pool.gone(links["a", ""])
    got = pool.obtain([("c", ""), ("d", "")], make)
    assert got is not None
    assert [link.key for link in got[1]] == [("d", "")]
    assert len(pool) == 3
    assert sorted(pool.keys) == [("b", ""), ("c", ""), ("d", "")]


# ---- the pool, real ---------------------------------------------------------------------------------------------


class _Targets:
    """Several decode workers of one rank each, for the one sender of a rig."""

    def __init__(self, pair: Rig, stack: ExitStack, count: int) -> None:
        self.pair = pair
        self.events = [Events() for _ in range(count)]
        self.stores = [TensorStore(SHAPE, 0, 20) for _ in range(count)]
        self.receivers = [
            Receiver(pair.receivers[0].params, store, SHAPE, 0, "decode-0", "one", pair.book, events)
            for store, events in zip(self.stores, self.events, strict=True)
        ]
        for receiver in self.receivers:
            stack.callback(receiver.close)

    def ticket(self, leg: LegKey, target: int, lifetime_s: float = 60.0) -> Ticket:
        ticket = self.pair.book.issue(
            leg,
            worker_id="decode-0",
            incarnation="one",
            layout=SHAPE,
            addresses=(self.receivers[target].address,),
            cached_tokens=0,
            prompt_tokens=PROMPT,
            carrier="inline",
            lifetime_s=lifetime_s,
        )
        self.receivers[target].expect(leg, ticket.nonce, self.pair.target_blocks(PROMPT), (0, PROMPT))
        return ticket

    def open(self, leg: LegKey, target: int, lifetime_s: float = 60.0) -> None:
        self.pair.open(leg, self.ticket(leg, target, lifetime_s), PROMPT, self.pair.source_blocks(PROMPT))

    def compute(self, leg: LegKey) -> None:
        self.pair.computed(leg, (0, PROMPT), (0, 4))
        self.pair.senders[0].finish(leg, b"first")


@contextmanager
def _several(count: int, max_links: int) -> Iterator[_Targets]:
    with rig(SHAPE, SHAPE, replace(PARAMS, max_links=max_links)) as pair, ExitStack() as stack:
        yield _Targets(pair, stack, count)


def test_an_idle_link_makes_room_for_the_next() -> None:
    others = threads("kv-send")
    with _several(5, 2) as targets:
        for number in range(15):
            leg = (f"r{number}", 1, 0)
            targets.open(leg, number % 5)
            targets.compute(leg)
            targets.pair.sent[0].wait(Sent, number + 1)
            assert len(targets.pair.senders[0].open_links) <= 2
            assert len(threads("kv-send") - others) <= 2
        assert all(len(events.of(RankComplete)) == 3 for events in targets.events)
        assert not [event for events in targets.events for event in events.of(ReceiveFailed)]


def test_legs_wait_in_line_for_links_that_are_in_use() -> None:
    """Both places are taken by legs that are still being computed; what waits was computed before."""
    with _several(5, 2) as targets:
        first, second, *others = [(f"r{number}", 1, 0) for number in range(5)]
        targets.open(first, 0)
        targets.open(second, 1)
        for number, leg in enumerate(others, 2):
            targets.open(leg, number)
            targets.compute(leg)
        time.sleep(0.2)
        assert not targets.pair.sent[0].of(Sent)
        targets.compute(first)
        targets.pair.sent[0].wait(Sent, 4)
        targets.compute(second)
        targets.pair.sent[0].wait(Sent, 5)
        assert all(events.wait(RankComplete) for events in targets.events)
        assert not targets.pair.sent[0].of(SendFailed)


def test_a_leg_in_line_fails_when_its_ticket_dies_and_can_be_withdrawn_before() -> None:
    with _several(4, 1) as targets:
        sender, sent = targets.pair.senders[0], targets.pair.sent[0]
        holder, late, cancelled, abandoned = [(f"r{number}", 1, 0) for number in range(4)]
        targets.open(holder, 0)
        targets.open(late, 1, lifetime_s=0.3)
        targets.open(cancelled, 2)
        targets.open(abandoned, 3)
        sender.cancel(cancelled)
        sender.abandon(abandoned)
        [failure] = sent.wait(SendFailed)
        assert failure.leg == late
        assert "kv.max_links" in failure.error.message
        assert not targets.events[3].of(Abandoned)
        targets.compute(holder)
        sent.wait(Sent)
        targets.events[3].wait(Abandoned)
        assert len(sent.seen) == 2
        assert not targets.events[2].seen
        _wait("nobody watches an empty line", lambda: sender._watcher is None)


def test_two_legs_that_need_two_links_each_never_hold_one_and_wait_for_the_other() -> None:
    source, target = layout([(0, 2)]), layout(heads_of(2, 2))
    with rig(source, target, replace(PARAMS, max_links=2)) as pair, ExitStack() as stack:
        events = [Events(), Events()]
        others = []
        for rank in (0, 1):
            store = TensorStore(target, rank, 20)
            others.append(Receiver(PARAMS, store, target, rank, "decode-0", "one", pair.book, events[rank]))
            stack.callback(others[-1].close)
        workers = [pair.receivers, others]
        for number in range(12):
            leg = (f"r{number}", 1, 0)
            receivers = workers[number % 2]
            ticket = pair.book.issue(
                leg,
                worker_id="decode-0",
                incarnation="one",
                layout=target,
                addresses=tuple(receiver.address for receiver in receivers),
                cached_tokens=0,
                prompt_tokens=PROMPT,
                carrier="inline",
                lifetime_s=60.0,
            )
            for receiver in receivers:
                receiver.expect(leg, ticket.nonce, pair.target_blocks(PROMPT), (0, PROMPT))
            pair.open(leg, ticket, PROMPT, pair.source_blocks(PROMPT))
            pair.computed(leg, (0, PROMPT), (0, 4))
            pair.senders[0].finish(leg, b"first")
        pair.sent[0].wait(Sent, 12)


def test_a_leg_that_needs_more_links_than_there_may_be_fails_at_once() -> None:
    target = layout(heads_of(2, 2))
    with rig(layout([(0, 2)]), target, replace(PARAMS, max_links=1)) as pair:
        pair.send(LEG, PROMPT)
        assert "2 links" in pair.sent[0].wait(SendFailed)[0].error.message


def test_links_that_close_when_idle_race_with_new_legs_and_leave_nothing() -> None:
    """Each leg comes at about the moment when the link of the one before is closed for being idle."""
    with rig(SHAPE, SHAPE, replace(PARAMS, idle_close_s=0.005)) as pair:
        open_before, running_before = descriptors(), threads()
        for number in range(200):
            leg = (f"r{number}", 1, 0)
            pair.send(leg, PROMPT)
            pair.sent[0].wait(Sent, number + 1)
            pair.receivers[0].forget(leg)
            time.sleep(0.001 * (number % 10))
        assert not pair.sent[0].of(SendFailed)
        assert not pair.received[0].of(ReceiveFailed)
        assert len(pair.received[0].of(RankComplete)) == 200
        _wait("no link is left", lambda: not pair.senders[0].open_links)
        _wait("descriptors are closed", lambda: descriptors() <= open_before)
        _wait("threads have ended", lambda: threads() <= running_before)


# ---- strangers --------------------------------------------------------------------------------------------------


def _dial(pair: Rig) -> socket.socket:
    host, port = pair.receivers[0].address.split(":")
    return socket.create_connection((host, int(port)), 5)


def test_300_silent_strangers_cost_no_threads_and_keep_no_peer_out() -> None:
    with rig(SHAPE, SHAPE, replace(PARAMS, connect_timeout_s=5.0)) as pair, ExitStack() as stack:
        open_before, running_before = descriptors(), threads()
        strangers = [stack.enter_context(_dial(pair)) for _ in range(150)]
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)
        strangers += [stack.enter_context(_dial(pair)) for _ in range(150)]
        assert len(threads() - running_before) <= 2, "the link's two ends"
        _wait("few are kept", lambda: len(descriptors() - open_before) - 300 <= MAX_STRANGERS + 8)
        strangers[0].settimeout(30)
        assert b"without a hello" in strangers[0].recv(4096), "the oldest went first"
        pair.send(("next", 1, 0), PROMPT)
        pair.sent[0].wait(Sent, 2)
        strangers[-1].settimeout(30)
        assert b"no hello within" in strangers[-1].recv(4096), "the others had a short while"


def test_a_hello_may_come_in_pieces() -> None:
    with rig(SHAPE, SHAPE, PARAMS) as pair, _dial(pair) as connection:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        for byte in packed("hello", **hello_fields(ticket)):
            connection.send(bytes([byte]))
        connection.settimeout(30)
        assert b"welcome" in connection.recv(4096)


def test_more_links_than_a_rank_serves_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv_transfer.receiver._MAX_LINKS", 1)
    with rig(SHAPE, SHAPE, QUICK) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        first, second = RawPeer(pair, ticket), RawPeer(pair, ticket)
        assert isinstance(second.answer, dict)
        assert second.answer["kind"] == "refused"
        assert "links are open" in second.answer["message"]
        for peer in (first, second):
            peer.wire.close()


# ---- legs before their order ------------------------------------------------------------------------------------


def test_a_leg_that_came_too_early_holds_up_nobody_on_its_link() -> None:
    patient = replace(PARAMS, frame_timeout_s=30.0)
    with rig(SHAPE, SHAPE, patient) as pair:
        early, empty = ("early", 1, 0), ("empty", 1, 0)
        ticket = pair.reserve(early, PROMPT, 0, [], expect=False)
        nothing = pair.reserve(empty, PROMPT, PROMPT, [], expect=False)
        for leg, its in ((early, ticket), (empty, nothing)):
            pair.open(leg, its, PROMPT, pair.source_blocks(PROMPT))
            pair.computed(leg, (0, PROMPT), (0, 4))
            pair.senders[0].finish(leg, b"first")
        _wait("its frames were sent back", lambda: pair.senders[0]._legs[early].sending.parts[0].held)
        for number in range(3):
            leg = (f"r{number}", 1, 0)
            pair.send(leg, PROMPT)
            pair.sent[0].wait(Sent, number + 1)
            pair.receivers[0].forget(leg)
        assert len(pair.senders[0].open_links) == 1
        pair.targets[0].data.zero_()
        pair.receivers[0].expect(early, ticket.nonce, pair.target_blocks(PROMPT), (0, PROMPT))
        pair.receivers[0].expect(empty, nothing.nonce, pair.target_blocks(PROMPT), (PROMPT, PROMPT))
        pair.sent[0].wait(Sent, 5)
        pair.assert_equal(PROMPT)


@pytest.mark.parametrize("end", ["abandon", "cancel"])
def test_a_leg_that_ended_before_its_order_came_ends_when_it_comes(end: str) -> None:
    with rig(SHAPE, SHAPE) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, [], expect=False)
        pair.open(LEG, ticket, PROMPT, pair.source_blocks(PROMPT))
        pair.computed(LEG, (0, PROMPT), (0, 4))
        _wait("its frames were sent back", lambda: pair.senders[0]._legs[LEG].sending.parts[0].held)
        getattr(pair.senders[0], end)(LEG)
        pair.send(("other", 1, 0), PROMPT)
        pair.sent[0].wait(Sent)
        pair.receivers[0].forget(("other", 1, 0))
        pair.receivers[0].expect(LEG, ticket.nonce, pair.target_blocks(PROMPT), (0, PROMPT))
        pair.received[0].wait(Abandoned if end == "abandon" else ReceiveFailed)
