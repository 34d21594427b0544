"""Forged, replayed, expired and foreign references over real sockets: each row ends in a clean refusal, none places."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from baton.kv_transfer import doorman
from baton.kv_transfer.events import RankComplete, ReceiveFailed, SendFailed, Sent
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.ticket import Ticket, TicketBook
from baton.kv_transfer.wire import WireError
from baton.proto.errors import TransferFailed
from baton.tests.harness.kv_raw_peer import PROMPT, QUICK, SHAPE, RawPeer
from baton.tests.harness.kv_rig import LEG, PARAMS, Events, Rig, TensorStore, rig
from baton.tests.harness.one_pair import until

OTHER = ("other", 1, 0)


def _resigned(ticket: Ticket, book: TicketBook, **changed: Any) -> Ticket:
    """What only a holder of that book's secret can make."""
    return replace(replace(ticket, **changed), mac=book._sign(replace(ticket, **changed)))


FORGED: dict[str, tuple[Callable[[Ticket, Rig], Ticket], str]] = {
    "unknown secret": (lambda t, _: _resigned(t, TicketBook(b"a secret of ours"), nonce=b"x" * 16), "not signed"),
    "another request": (lambda t, _: replace(t, request_id="other"), "not signed"),
    "a later attempt": (lambda t, _: replace(t, attempt=2), "not signed"),
    "another choice": (lambda t, _: replace(t, first_choice=1), "not signed"),
    "fewer cached tokens": (lambda t, _: replace(t, cached_tokens=1), "not signed"),
    "a longer life": (lambda t, _: replace(t, lifetime_s=1e9), "not signed"),
    "a later issue": (lambda t, _: replace(t, issued_at=t.issued_at + 60), "not signed"),
    "another worker": (lambda t, p: _resigned(t, p.book, worker_id="decode-1"), "is for decode-1"),
    "another incarnation": (lambda t, p: _resigned(t, p.book, incarnation="two"), "incarnation two"),
    "expired": (lambda t, p: _resigned(t, p.book, issued_at=t.issued_at - 61), "expired"),
}


@pytest.mark.parametrize(("forge", "reason"), FORGED.values(), ids=list(FORGED))
def test_a_forged_ticket_opens_no_link_and_no_leg(forge: Callable[[Ticket, Rig], Ticket], reason: str) -> None:
    with rig(SHAPE, SHAPE, QUICK) as pair:
        genuine = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        forged = forge(genuine, pair)
        stranger = RawPeer(pair, forged)
        assert isinstance(stranger.answer, dict)
        assert stranger.answer["kind"] == "refused"
        assert reason in stranger.answer["message"]
        stranger.wire.close()

        peer = RawPeer(pair, genuine)
        peer.open(forged)
        refusal = peer.wire.receive()
        assert isinstance(refusal, dict)
        assert refusal["kind"] == "leg_refused"
        assert reason in refusal["message"]
        assert peer.frame()["kind"] == "refuse"
        assert pair.targets[0].writes == 0
        assert not pair.received[0].seen, "the genuine reservation is untouched"
        peer.open(genuine)
        assert peer.frame()["kind"] == "ack"
        peer.wire.close()


@pytest.mark.parametrize("again", ["the same link", "another link", "after the end"])
def test_a_consumed_ticket_is_refused(again: str) -> None:
    with rig(SHAPE, SHAPE, QUICK) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        peer = RawPeer(pair, ticket)
        peer.open(ticket)
        for tokens in ((0, 4), (4, 8)):
            assert peer.frame(tokens=tokens)["kind"] == "ack"
        if again == "after the end":
            peer.wire.send("done", leg=LEG, first_tokens=b"first")
            peer.wire.receive()
        pair.received[0].wait(RankComplete)
        before = pair.targets[0].data.clone()
        replay = peer if again == "the same link" else RawPeer(pair, ticket)
        replay.open(ticket)
        refusal = replay.wire.receive()
        assert isinstance(refusal, dict)
        assert "used before" in refusal["message"]
        assert replay.frame()["kind"] == "refuse"
        assert torch.equal(pair.targets[0].data, before)
        for each in {peer, replay}:
            each.wire.close()


def test_a_ticket_for_another_leg_than_named_is_refused() -> None:
    with rig(SHAPE, SHAPE, QUICK) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        victim = pair.reserve(OTHER, PROMPT, 0, [1, 2])
        peer = RawPeer(pair, victim)
        for named in (OTHER, (LEG[0], 2, 0)):
            peer.wire.send("open", leg=named, ticket=ticket.pack())
            refusal = peer.wire.receive()
            assert isinstance(refusal, dict)
            assert refusal["kind"] == "leg_refused"
        assert peer.frame(request="other")["kind"] == "refuse"
        assert pair.targets[0].writes == 0
        peer.wire.close()


def test_every_message_of_an_older_attempt_changes_nothing() -> None:
    with rig(SHAPE, SHAPE, QUICK) as pair:
        old = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        peer = RawPeer(pair, old)
        peer.open(old)
        assert peer.frame()["kind"] == "ack"
        pair.receivers[0].forget(LEG)
        pair.targets[0].data.zero_()
        renewed = (LEG[0], 2, 0)
        new = pair.reserve(renewed, PROMPT, 0, pair.target_blocks(PROMPT))
        for kind, fields in (("done", {"first_tokens": b"first"}), ("abandon", {}), ("cancel", {})):
            peer.wire.send(kind, leg=LEG, **fields)
        peer.wire.send("fail", leg=LEG, code="internal", message="late")
        assert peer.frame(tokens=(4, 8))["kind"] == "leg_refused"
        answer: Any = {"kind": ""}
        while answer["kind"] != "refuse":
            answer = peer.wire.receive()
        assert not pair.received[0].seen
        assert not pair.targets[0].data.any()
        peer.open(new)
        assert peer.frame(attempt=2)["kind"] == "ack"
        peer.wire.close()


def test_kv_08_a_lease_that_ran_out_places_nothing_in_blocks_that_another_request_has() -> None:
    """Lease 0.5 s; the transfer begins after 1 s, while another prompt goes through the freed blocks."""
    with rig(SHAPE, SHAPE) as pair:
        blocks = pair.target_blocks(PROMPT)
        issued = pair.book.issue(
            LEG,
            worker_id="decode-0",
            incarnation="one",
            layout=SHAPE,
            addresses=(pair.receivers[0].address,),
            cached_tokens=0,
            prompt_tokens=PROMPT,
            carrier="inline",
            lifetime_s=0.5,
        )
        pair.receivers[0].expect(LEG, issued.nonce, blocks, (0, PROMPT))
        time.sleep(1.0)
        pair.open(LEG, issued, PROMPT, pair.source_blocks(PROMPT))
        pair.computed(LEG, (0, PROMPT), (0, 4))
        assert "expired" in pair.sent[0].wait(SendFailed)[0].error.message
        pair.receivers[0].forget(LEG)
        pair.send(OTHER, PROMPT)
        pair.sent[0].wait(Sent)
        after = pair.targets[0].data.clone()
        pair.open((LEG[0], 1, 0), issued, PROMPT, pair.source_blocks(PROMPT))
        pair.sent[0].wait(SendFailed, 2)
        assert torch.equal(pair.targets[0].data, after)
        pair.assert_equal(PROMPT)


def test_kv_08_a_lease_that_ends_in_the_middle_places_nothing_more() -> None:
    with rig(SHAPE, SHAPE) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        pair.open(LEG, ticket, PROMPT, pair.source_blocks(PROMPT))
        pair.computed(LEG, (0, 4), (0, 4))
        deadline = time.monotonic() + 10
        while pair.senders[0]._legs[LEG].sending.handoff.frames < 1:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        pair.receivers[0].forget(LEG)
        pair.targets[0].data.zero_()
        pair.send(OTHER, PROMPT)
        pair.sent[0].wait(Sent)
        pair.computed(LEG, (4, 8), (0, 4))
        pair.sent[0].wait(SendFailed)
        pair.assert_equal(PROMPT)


@pytest.mark.parametrize("blocks", [3, 5])
def test_kv_11_a_payload_of_another_size_than_announced_ends_the_link(blocks: int) -> None:
    """4 blocks are announced."""
    with rig(SHAPE, SHAPE, QUICK) as pair:
        ticket = pair.reserve(LEG, 16, 0, pair.target_blocks(16))
        neighbour = pair.reserve(OTHER, PROMPT, 0, [10, 11])
        peer, other = RawPeer(pair, ticket), RawPeer(pair, neighbour)
        peer.open(ticket)
        other.open(neighbour)
        size = 16 * 512
        with pytest.raises(WireError):
            peer.frame(bytes(size * blocks // 4), tokens=(0, 16), bytes=size)
        [failure] = pair.received[0].wait(ReceiveFailed)
        assert failure.leg == LEG
        assert "prefill rank 0" in failure.error.message
        assert "not announced" in failure.error.message
        assert pair.targets[0].writes == 0
        assert other.frame(request="other")["kind"] == "ack", "other links go on"
        for each in (peer, other):
            each.wire.close()


def test_kv_11_bfloat16_where_float16_is_due_is_refused_by_name() -> None:
    half = replace(SHAPE, dtype="float16")
    with rig(half, half, QUICK) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        pair.open(LEG, ticket, PROMPT, pair.source_blocks(PROMPT))
        pair.senders[0]._legs[LEG].links[0]._dtype = "bfloat16"
        pair.computed(LEG, (0, PROMPT), (0, 4))
        failed = pair.sent[0].wait(SendFailed)[0].error.message
        assert "bfloat16" in failed
        assert "float16" in failed
        assert pair.targets[0].writes == 0


def test_kv_11_both_ends_in_one_process_with_one_pool() -> None:
    """Prefill and decode rank 0 are the same process, and their pool the same memory."""
    store = TensorStore(SHAPE, 0, 8)
    store.data[:, :, :2] = torch.randn_like(store.data[:, :, :2])
    book, sent, received = TicketBook(b"secret of the decode worker"), Events(), Events()
    receiver = Receiver(PARAMS, store, SHAPE, 0, "decode-0", "one", book, received)
    sender = Sender(PARAMS, store, SHAPE, 0, sent)
    try:
        ticket = book.issue(
            LEG,
            worker_id="decode-0",
            incarnation="one",
            layout=SHAPE,
            addresses=(receiver.address,),
            cached_tokens=0,
            prompt_tokens=PROMPT,
            carrier="inline",
            lifetime_s=60.0,
        )
        receiver.expect(LEG, ticket.nonce, [4, 5], (0, PROMPT))
        sender.open(LEG, ticket.pack(), [0, 1], PROMPT)
        sender.computed(LEG, (0, PROMPT), (0, 4))
        sender.finish(LEG, b"first")
        sent.wait(Sent)
        assert torch.equal(store.data[:, :, 4:6], store.data[:, :, :2])
    finally:
        sender.close()
        receiver.close()


def test_cf_01_a_new_worker_at_the_same_address_is_served_and_knows_no_old_ticket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = 0

    def at_the_same_address(host: str) -> socket.socket:
        listener = socket.create_server((host, port))
        listener.setblocking(False)
        return listener

    monkeypatch.setattr(doorman, "listen", at_the_same_address)
    with rig(SHAPE, SHAPE) as pair:
        first = pair.receivers[0]
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        stale = pair.reserve(OTHER, PROMPT, 0, pair.target_blocks(PROMPT))
        port = int(first.address.rpartition(":")[2])
        first.close()
        renewed = TensorStore(SHAPE, 0, 20)
        news = Events()
        book = TicketBook(b"secret of the next incarnation")
        second = Receiver(PARAMS, renewed, SHAPE, 0, "decode-0", "two", book, news)
        try:
            assert second.address == first.address
            until(lambda: not pair.senders[0].open_links, "the old link is still in use")
            pair.open(OTHER, stale, PROMPT, pair.source_blocks(PROMPT))
            error = pair.sent[0].wait(SendFailed)[0].error
            assert isinstance(error, TransferFailed)
            assert "incarnation one, this is decode-0 two" in error.message
            assert renewed.writes == 0
            pair.book, pair.receivers, pair.incarnation, pair.targets = book, [second], "two", [renewed]
            pair.send(("new", 1, 0), PROMPT)
            pair.sent[0].wait(Sent, 2)
            pair.assert_equal(PROMPT)
            assert not news.of(ReceiveFailed)
        finally:
            second.close()
