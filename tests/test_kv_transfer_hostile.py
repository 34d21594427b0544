"""A peer that speaks the protocol wrongly: nothing of it is ever placed, and honest legs beside it are untouched."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from baton.kv_transfer.events import RankComplete, ReceiveFailed, SendFailed
from baton.kv_transfer.frames import MAX_FRAME_BYTES
from baton.kv_transfer.wire import WireError
from baton.proto.kv_layout import KVLayout
from baton.tests.harness.kv_raw_peer import PROMPT, QUICK, SHAPE, RawPeer, as_sent, one_frame, send_payload
from baton.tests.harness.kv_rig import LEG, Rig, TensorStore, rig


@contextmanager
def _hostile() -> Iterator[tuple[Rig, RawPeer]]:
    with rig(SHAPE, SHAPE, QUICK) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        peer = RawPeer(pair, ticket)
        assert isinstance(peer.answer, dict)
        assert peer.answer["kind"] == "welcome"
        peer.open(ticket)
        try:
            yield pair, peer
        finally:
            peer.wire.close()


def _untouched(pair: Rig) -> None:
    assert pair.targets[0].writes == 0
    assert not pair.targets[0].data.any()


REFUSED: dict[str, dict[str, Any]] = {
    "an older attempt": {"attempt": 0},
    "another request": {"request": "other"},
    "tokens outside": {"tokens": (4, 9), "bytes": 5 * 512},
    "layers outside": {"layers": (1, 5)},
    "heads outside": {"heads": (1, 3)},
    "too few bytes": {"bytes": 2044},
    "too many bytes": {"bytes": 2052},
    "enormous": {"bytes": MAX_FRAME_BYTES * 1024},
    "another dtype": {"dtype": "bfloat16"},
    "another codec": {"codec": "fp8"},
    "without a checksum": {"checked": False},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=list(REFUSED))
def test_kv_11_a_wrong_header_is_refused_before_its_payload(change: dict[str, Any]) -> None:
    with _hostile() as (pair, peer):
        answer = peer.frame(b"", **change)
        assert answer["kind"] == "refuse"
        assert answer["message"]
        _untouched(pair)
        if "attempt" not in change and "request" not in change:
            assert answer["message"] in pair.received[0].wait(ReceiveFailed)[0].error.message


def _flip(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


def _swap_blocks(data: bytes) -> bytes:
    return data[128:256] + data[:128] + data[256:]


def _swap_k_and_v(data: bytes) -> bytes:
    return data[256:512] + data[:256] + data[512:]


@pytest.mark.parametrize("damage", [_flip, _swap_blocks, _swap_k_and_v])
def test_kv_06_a_damaged_payload_is_caught(damage: Callable[[bytes], bytes]) -> None:
    content = random.Random(3).randbytes(2048)
    with _hostile() as (pair, peer):
        answer = peer.frame(damage(content), sealed=content)
        assert answer["kind"] == "refuse"
        assert "corrupt" in answer["message"]
        pair.received[0].wait(ReceiveFailed)
        _untouched(pair)


def test_kv_06_a_header_changed_on_the_way_is_caught() -> None:
    """The checksum holds for the ranges too: the right bytes in the wrong place are refused."""
    content = random.Random(3).randbytes(2048)
    with _hostile() as (pair, peer):
        peer.wire.send("frames", **one_frame(0, tokens=(4, 8)).pack())
        assert peer.wire.receive() == {"kind": "accept", "sequence": 0}
        send_payload(peer.wire, as_sent(one_frame(0), [content]))
        answer = peer.wire.receive()
        assert isinstance(answer, dict)
        assert "corrupt" in answer["message"]
        _untouched(pair)


def test_duplicated_and_overlapping_frames_are_never_placed() -> None:
    with _hostile() as (pair, peer):
        assert peer.frame(random.Random(1).randbytes(2048))["kind"] == "ack"
        before = pair.targets[0].data.clone()
        assert "overlaps" in peer.frame(random.Random(2).randbytes(2048))["message"]
        assert torch.equal(pair.targets[0].data.view(torch.uint8), before.view(torch.uint8))


def test_a_leg_that_ends_early_fails_at_once() -> None:
    with _hostile() as (pair, peer):
        assert peer.frame()["kind"] == "ack"
        peer.wire.send("done", leg=LEG, first_tokens=b"first")
        assert "of 64 cells" in pair.received[0].wait(ReceiveFailed)[0].error.message


def test_a_complete_leg_is_not_hurt_by_what_comes_late() -> None:
    with _hostile() as (pair, peer):
        assert peer.frame()["kind"] == "ack"
        assert peer.frame(tokens=(4, 8))["kind"] == "ack"
        pair.received[0].wait(RankComplete)
        peer.wire.send("done", leg=LEG, first_tokens=b"first")
        assert peer.wire.receive() == {"kind": "done", "leg": list(LEG)}
        before = pair.targets[0].data.clone()
        assert peer.frame(random.Random(2).randbytes(2048))["kind"] == "refuse"
        peer.wire.send("fail", leg=LEG, code="internal", message="late")
        peer.wire.close()
        time.sleep(0.1)
        assert torch.equal(pair.targets[0].data.view(torch.uint8), before.view(torch.uint8))
        assert not pair.received[0].of(ReceiveFailed)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"version": 99}, "version"),
        ({"ticket": b"junk"}, "not a ticket"),
        ({"incarnation": "gone"}, "incarnation gone"),
        ({"rank": 7}, "rank 7"),
        ({"layout": replace(SHAPE, layers=5).pack()}, "layers: prefill has 5, decode has 4"),
        ({"layout": replace(SHAPE, kv_heads=10**12).pack()}, "kv_heads"),
        ({"layout": replace(SHAPE, dtype="float8").pack()}, "prefill: dtype is 'float8', not one of float32"),
        ({"codec": "int8"}, "kv.wire: prefill has 'int8', decode has 'raw'"),
        ({"layout": replace(SHAPE, head_ranges=((0, 1),)).pack()}, "1 of 2 kv heads"),
        ({"layout": b"\x01"}, "not a KV layout"),
    ],
)
def test_kv_03_the_handshake_refuses_with_a_reason(hello: dict[str, Any], reason: str) -> None:
    with rig(SHAPE, SHAPE, QUICK) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        peer = RawPeer(pair, ticket, **hello)
        assert isinstance(peer.answer, dict)
        assert peer.answer["kind"] == "refused"
        assert reason in peer.answer["message"]
        peer.wire.close()


def test_a_payload_that_was_not_announced_ends_the_link() -> None:
    with _hostile() as (pair, peer):
        send_payload(peer.wire, bytes(2048 + 16))
        with pytest.raises(WireError):
            peer.wire.receive()
        pair.received[0].wait(ReceiveFailed)
        _untouched(pair)


def test_a_silent_peer_is_given_up() -> None:
    with _hostile() as (pair, _):
        began = time.monotonic()
        assert "nothing from the peer" in pair.received[0].wait(ReceiveFailed)[0].error.message
        assert time.monotonic() - began < 10 * QUICK.frame_timeout_s


def test_a_decode_rank_that_never_answers_is_given_up() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with rig(SHAPE, SHAPE, QUICK) as pair, listener:
        port = listener.getsockname()[1]
        ticket = pair.book.issue(
            LEG,
            worker_id="decode-0",
            incarnation="one",
            layout=SHAPE,
            addresses=(f"127.0.0.1:{port}",),
            cached_tokens=0,
            prompt_tokens=PROMPT,
            carrier="inline",
            lifetime_s=60.0,
        )
        began = time.monotonic()
        pair.open(LEG, ticket, PROMPT, pair.source_blocks(PROMPT))
        pair.sent[0].wait(SendFailed)
        assert time.monotonic() - began < 10 * QUICK.frame_timeout_s


class _LateStore(TensorStore):
    """Says when a write begins and lets the test go on in the middle of it."""

    def __init__(self, shape: KVLayout, rank: int, blocks: int) -> None:
        super().__init__(shape, rank, blocks)
        self.during: Callable[[], None] = lambda: None

    def scatter(self, blocks, layers, heads, tokens, payload):  # type: ignore[no-untyped-def]
        self.during()
        super().scatter(blocks, layers, heads, tokens, payload)


def test_forget_waits_for_the_write_that_is_in_progress() -> None:
    with rig(SHAPE, SHAPE, store=_LateStore) as pair:
        target = pair.targets[0]
        assert isinstance(target, _LateStore)
        target.during = lambda: time.sleep(0.3)
        pair.send(LEG, PROMPT)
        time.sleep(0.15)
        pair.receivers[0].forget(LEG)
        after = target.data.clone()
        time.sleep(0.5)
        assert torch.equal(target.data, after)
