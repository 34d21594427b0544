"""Whole legs over real sockets: every byte arrives where it belongs, and what ends a leg is told to both sides."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from baton.kv_transfer.events import (
    Abandoned,
    FirstTokensArrived,
    RankComplete,
    ReceiveFailed,
    SendFailed,
    Sent,
)
from baton.kv_transfer.plan import length, shares
from baton.proto.errors import Incompatible, InternalError, TransferFailed
from baton.tests.harness.kv_rig import LEG, PARAMS, Rig, TensorStore, heads_of, layout, rig


def _finished(pair: Rig, bytes_due: int) -> None:
    """All ranks of both sides reported the end, once."""
    for rank, events in enumerate(pair.received):
        assert [event.rank for event in events.wait(RankComplete)] == [rank]
    for events in pair.sent:
        assert len(events.wait(Sent)) == 1
    assert pair.received[0].wait(FirstTokensArrived) == [FirstTokensArrived(LEG, b"first")]
    assert sum(events.of(Sent)[0].bytes for events in pair.sent) == bytes_due
    assert sum(events.of(RankComplete)[0].bytes for events in pair.received) == bytes_due
    everything = [event for events in (*pair.sent, *pair.received) for event in events.seen]
    assert not [event for event in everything if isinstance(event, SendFailed | ReceiveFailed)]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (2, 1), (1, 3), (3, 2), (4, 3), (2, 4), (4, 4)])
def test_kv_01_kv_02_any_parallelism_and_block_size(prefill_tp: int, decode_tp: int, kv_heads: int) -> None:
    """The byte counter equals the analytic value: each decode rank gets each of its heads once."""
    prompt = 23
    prefill = layout(heads_of(kv_heads, prefill_tp), kv_heads=kv_heads, block_size=4)
    decode = layout(heads_of(kv_heads, decode_tp), kv_heads=kv_heads, block_size=6)
    with rig(prefill, decode) as pair:
        pair.send(LEG, prompt, chunk=7, group=3)
        heads = sum(length(span) for span in decode.head_ranges)
        _finished(pair, prompt * heads * prefill.layers * 2 * prefill.head_dim * 4)
        pair.assert_equal(prompt)


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("cached", [0, 1, 4])
def test_kv_05_block_edges_and_the_part_that_decode_lacks(prompt: int, cached: int) -> None:
    if cached > prompt:
        return
    shape = layout([(0, 2)])
    with rig(shape, shape) as pair:
        pair.send(LEG, prompt, chunk=3, group=2, cached=cached)
        _finished(pair, (prompt - cached) * 2 * shape.layers * 2 * shape.head_dim * 4)
        pair.assert_equal(prompt, cached)


@pytest.mark.parametrize("tp", [1, 2])
def test_nothing_to_send_completes_at_the_end(tp: int) -> None:
    shape = layout(heads_of(2, tp))
    with rig(shape, shape) as pair:
        pair.send(LEG, 8, cached=8)
        _finished(pair, 0)
        assert all(target.writes == 0 for target in pair.targets)


def test_a_rank_without_heads_to_send_has_sent_at_once() -> None:
    prefill, decode = layout([(0, 1)] * 3), layout([(0, 1)])
    assert set(shares(prefill.head_ranges, decode.head_ranges, 1)) == {(0, 0)}
    with rig(prefill, decode) as pair:
        ticket = pair.reserve(LEG, 8, 0, pair.target_blocks(8))
        pair.open(LEG, ticket, 8, pair.source_blocks(8))
        assert [pair.sent[rank].seen[0].bytes for rank in (1, 2)] == [0, 0]
        assert pair.sent[0].seen == []


def test_a_link_serves_many_legs_and_closes_when_idle() -> None:
    shape = layout([(0, 2)])
    with rig(shape, shape, replace(PARAMS, idle_close_s=0.3)) as pair:
        for number in range(5):
            leg = (f"r{number}", 1, 0)
            pair.send(leg, 9)
            pair.sent[0].wait(Sent, number + 1)
            pair.receivers[0].forget(leg)
        assert len(pair.senders[0].open_links) == 1
        deadline = time.monotonic() + 5
        while pair.senders[0].open_links and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not pair.senders[0].open_links
        pair.send(("again", 1, 0), 9)
        pair.sent[0].wait(Sent, 6)


def test_kv_15_queued_ranges_travel_in_few_frames() -> None:
    """What is queued while a frame is on its way joins, up to about `frame_bytes`."""
    shape = layout([(0, 2)], layers=16)
    with rig(shape, shape, replace(PARAMS, frame_bytes=64 << 10)) as pair:
        pair.send(LEG, 64, chunk=16, group=1)  # 64 calls, 128 KiB
        _finished(pair, 64 * 2 * 16 * 2 * 8 * 4)
        pair.assert_equal(64)
        assert pair.sent[0].of(Sent)[0].frames <= 10


def test_kv_03_differences_are_named() -> None:
    shape = layout([(0, 2)])
    changes: dict[str, Any] = {
        "fingerprint": "other",
        "layers": 5,
        "head_dim": 4,
        "rope": "linear",
    }
    for name, value in changes.items():
        with rig(shape, replace(shape, **{name: value})) as pair:
            ticket = pair.reserve(LEG, 8, 0, pair.target_blocks(8))
            pair.open(LEG, ticket, 8, pair.source_blocks(8))
            [failure] = pair.sent[0].wait(SendFailed)
            assert isinstance(failure.error, Incompatible)
            assert f"{name}: prefill has" in failure.error.message


def test_abandon_frees_decode_at_once() -> None:
    shape = layout(heads_of(2, 2))
    with rig(shape, shape) as pair:
        ticket = pair.reserve(LEG, 8, 0, pair.target_blocks(8))
        pair.open(LEG, ticket, 8, pair.source_blocks(8))
        pair.computed(LEG, (0, 8), (0, 2))
        for sender in pair.senders:
            sender.abandon(LEG)
        for events in pair.received:
            assert events.wait(Abandoned) == [Abandoned(LEG)]
            assert not events.of(ReceiveFailed)


def test_cancel_by_prefill_is_told_to_decode() -> None:
    shape = layout([(0, 2)])
    with rig(shape, shape) as pair:
        ticket = pair.reserve(LEG, 8, 0, pair.target_blocks(8))
        pair.open(LEG, ticket, 8, pair.source_blocks(8))
        pair.computed(LEG, (0, 4), (0, 4))
        pair.senders[0].cancel(LEG)
        pair.senders[0].computed(LEG, (4, 8), (0, 4))
        [failure] = pair.received[0].wait(ReceiveFailed)
        assert isinstance(failure.error, TransferFailed)
        assert pair.sent[0].seen == []


def test_nothing_is_written_after_forget() -> None:
    shape = layout([(0, 2)])
    with rig(shape, shape) as pair:
        ticket = pair.reserve(LEG, 8, 0, pair.target_blocks(8))
        pair.open(LEG, ticket, 8, pair.source_blocks(8))
        pair.computed(LEG, (0, 4), (0, 4))
        pair.receivers[0].forget(LEG)
        before = pair.targets[0].data.clone()
        pair.computed(LEG, (4, 8), (0, 4))
        [failure] = pair.sent[0].wait(SendFailed)
        assert isinstance(failure.error, TransferFailed)
        assert torch.equal(pair.targets[0].data, before)
        with pytest.raises(ValueError, match="expected before"):
            pair.receivers[0].expect(LEG, ticket.nonce, pair.target_blocks(8), (0, 8))


def test_an_order_that_comes_after_the_first_frame_is_waited_for() -> None:
    """The worker's followers may hear of a reservation later than the prefill worker."""
    shape = layout([(0, 2)])
    with rig(shape, shape) as pair:
        ticket = pair.reserve(LEG, 8, 0, [], expect=False)
        pair.open(LEG, ticket, 8, pair.source_blocks(8))
        pair.computed(LEG, (0, 8), (0, 4))
        pair.senders[0].finish(LEG, b"first")
        time.sleep(0.2)
        pair.receivers[0].expect(LEG, ticket.nonce, pair.target_blocks(8), (0, 8))
        _finished(pair, 8 * 2 * 4 * 2 * 8 * 4)
        pair.assert_equal(8)


@pytest.mark.parametrize("kept", [0, 1])
def test_kv_09_a_list_of_blocks_that_is_too_short_is_refused_at_either_end(kept: int) -> None:
    shape = layout([(0, 2)])
    with rig(shape, shape) as pair:
        with pytest.raises(ValueError, match=f"{kept} blocks of 4 for 8 tokens"):
            pair.receivers[0].expect(LEG, b"x" * 16, pair.target_blocks(8)[:kept], (0, 8))
        ticket = pair.reserve(LEG, 8, 0, pair.target_blocks(8))
        pair.open(LEG, ticket, 8, pair.source_blocks(8)[:kept])
        [failure] = pair.sent[0].wait(SendFailed)
        assert f"{kept} blocks of 4 for 8 prompt tokens" in failure.error.message


def test_kv_07_an_unknown_leg_fails_soon() -> None:
    shape = layout([(0, 2)])
    with rig(shape, shape, replace(PARAMS, frame_timeout_s=0.6)) as pair:
        ticket = pair.reserve(LEG, 8, 0, [], expect=False)
        pair.open(LEG, ticket, 8, pair.source_blocks(8))
        pair.computed(LEG, (0, 8), (0, 4))
        began = time.monotonic()
        [failure] = pair.sent[0].wait(SendFailed)
        assert time.monotonic() - began < 5
        assert "not expected" in failure.error.message


def test_tickets_are_single_use_signed_and_of_this_incarnation() -> None:
    shape = layout([(0, 2)])
    with rig(shape, shape) as pair:
        ticket = pair.reserve(LEG, 8, 0, pair.target_blocks(8))
        pair.open(LEG, ticket, 8, pair.source_blocks(8))
        pair.senders[0].cancel(LEG)
        pair.received[0].wait(ReceiveFailed)
        pair.open(LEG, ticket, 8, pair.source_blocks(8))
        assert "used before" in pair.sent[0].wait(SendFailed, 1)[0].error.message

        forged = replace(ticket, nonce=b"x" * 16)
        pair.senders[0].open(LEG, forged.pack(), pair.source_blocks(8), 8)
        assert "not signed" in pair.sent[0].wait(SendFailed, 2)[1].error.message

        pair.incarnation = "two"
        other = pair.reserve(("r", 1, 0), 8, 0, pair.target_blocks(8), expect=False)
        pair.senders[0].open(("r", 1, 0), other.pack(), pair.source_blocks(8), 8)
        assert "incarnation" in pair.sent[0].wait(SendFailed, 3)[2].error.message

        pair.senders[0].open(("r", 2, 0), b"junk", [], 0)
        pair.senders[0].open(("r", 3, 0), ticket.pack(), pair.source_blocks(8), 8)
        assert [type(event.error) for event in pair.sent[0].of(SendFailed)[3:]] == [TransferFailed] * 2


def test_cf_05_a_frame_that_cannot_be_gathered_fails_both_ends_and_only_this_leg() -> None:
    class Failing(TensorStore):
        def gather(self, blocks, layers, heads, tokens, out=None):  # type: ignore[no-untyped-def]
            if tokens[1] > 8:
                raise RuntimeError("no such page")
            return super().gather(blocks, layers, heads, tokens, out)

    shape = layout([(0, 2)])
    with rig(shape, shape, store=Failing) as pair:
        ticket = pair.reserve(LEG, 12, 0, pair.target_blocks(12))
        pair.open(LEG, ticket, 12, pair.source_blocks(12))
        pair.computed(LEG, (0, 8), (0, 4))
        pair.computed(LEG, (8, 12), (0, 4))
        [failure] = pair.sent[0].wait(SendFailed)
        assert isinstance(failure.error, InternalError)
        [mirror] = pair.received[0].wait(ReceiveFailed)
        assert mirror.error.message == failure.error.message
        pair.send(("next", 1, 0), 8)
        pair.sent[0].wait(Sent)


def test_a_pool_that_refuses_a_write_fails_both_ends() -> None:
    class Failing(TensorStore):
        def scatter(self, blocks, layers, heads, tokens, payload):  # type: ignore[no-untyped-def]
            raise IndexError("no such block")

    shape = layout([(0, 2)])
    with rig(shape, shape, store=Failing) as pair:
        pair.send(LEG, 8)
        assert isinstance(pair.sent[0].wait(SendFailed)[0].error, InternalError)
        assert isinstance(pair.received[0].wait(ReceiveFailed)[0].error, InternalError)


def test_lc_08_nobody_listening_fails_within_the_connect_limit() -> None:
    shape = layout([(0, 2)])
    with rig(shape, shape) as pair:
        ticket = pair.reserve(LEG, 8, 0, pair.target_blocks(8))
        pair.receivers[0].close()
        began = time.monotonic()
        pair.open(LEG, ticket, 8, pair.source_blocks(8))
        [failure] = pair.sent[0].wait(SendFailed)
        assert isinstance(failure.error, TransferFailed)
        assert time.monotonic() - began < PARAMS.connect_timeout_s + 3


def test_the_receiver_leaving_fails_the_leg() -> None:
    shape = layout([(0, 2)])
    with rig(shape, shape) as pair:
        ticket = pair.reserve(LEG, 8, 0, pair.target_blocks(8))
        pair.open(LEG, ticket, 8, pair.source_blocks(8))
        pair.computed(LEG, (0, 4), (0, 4))
        time.sleep(0.1)
        pair.receivers[0].close()
        pair.sent[0].wait(SendFailed)


def test_the_sender_leaving_fails_the_leg() -> None:
    shape = layout([(0, 2)])
    with rig(shape, shape) as pair:
        ticket = pair.reserve(LEG, 8, 0, pair.target_blocks(8))
        pair.open(LEG, ticket, 8, pair.source_blocks(8))
        pair.computed(LEG, (0, 4), (0, 4))
        time.sleep(0.1)
        pair.senders[0].close()
        [failure] = pair.received[0].wait(ReceiveFailed)
        assert "closed the link" in failure.error.message
