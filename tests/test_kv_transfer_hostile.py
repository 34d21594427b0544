"""A peer that speaks the protocol wrongly: nothing of it is ever placed, and honest legs beside it are untouched."""

from __future__ import annotations

import random
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
from baton.kv_transfer.events import RankComplete, ReceiveFailed, SendFailed, Sent
from baton.kv_transfer.frames import MAX_FRAME_BYTES, FrameHeader, checksum
from baton.kv_transfer.ticket import Ticket
from baton.kv_transfer.wire import VERSION, Wire, WireError
from baton.proto.kv_layout import KVLayout
from baton.tests.harness.kv_rig import LEG, PARAMS, Rig, TensorStore, layout, rig

SHAPE = layout([(0, 2)])
PROMPT = 8
QUICK = replace(PARAMS, frame_timeout_s=0.5, connect_timeout_s=0.5)


class RawPeer:
    """A prefill rank by hand."""

    def __init__(self, pair: Rig, genuine: Ticket, **hello: Any) -> None:
        self.wire = Wire.connect(pair.receivers[0].address, 2.0)
        fields = {
            "version": VERSION,
            "ticket": genuine.pack(),
            "layout": SHAPE.pack(),
            "rank": 0,
            "incarnation": "one",
            "carrier": "inline",
            "checksum": True,
        }
        self.wire.send("hello", **{**fields, **hello})
        self.answer = self.wire.receive()
        self.sequence = 0

    def open(self, ticket: Ticket) -> None:
        self.wire.send("open", leg=ticket.leg, ticket=ticket.pack())

    def frame(self, payload: bytes | None = None, sealed: bytes | None = None, **changed: Any) -> Any:
        """Announce a frame (a right one where nothing is changed), send its payload if accepted; the last answer."""
        base = FrameHeader(
            *LEG, self.sequence, (0, 4), (0, 4), (0, 2), "float32", "raw", 4 * 2 * 2 * 4 * 8 * 4, True, 0
        )
        header = replace(base, **changed)
        self.sequence += 1
        content = bytes(header.bytes % (1 << 20)) if payload is None else payload
        header = replace(header, checksum=checksum(header, memoryview(content if sealed is None else sealed)))
        self.wire.send("frame", header=header.pack())
        answer = self.wire.receive()
        if isinstance(answer, dict) and answer["kind"] == "accept":
            self.wire.send_payload(memoryview(content))
            answer = self.wire.receive()
        return answer


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
        header = FrameHeader(*LEG, 0, (0, 4), (0, 4), (0, 2), "float32", "raw", 2048, True, 0)
        moved = replace(header, tokens=(4, 8), checksum=checksum(header, memoryview(content)))
        peer.wire.send("frame", header=moved.pack())
        assert peer.wire.receive() == {"kind": "accept", "sequence": 0}
        peer.wire.send_payload(memoryview(content))
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
        ({"rank": 7}, "rank 7"),
        ({"layout": replace(SHAPE, layers=5).pack()}, "layers: prefill has 5, decode has 4"),
        ({"layout": replace(SHAPE, kv_heads=10**12).pack()}, "kv_heads"),
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


def _prefix(kind: int, size: int) -> bytes:
    return b"bKV" + bytes([kind]) + size.to_bytes(4, "big")


def _garbage(seed: int) -> bytes:
    chance = random.Random(seed)
    pickled = b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R."
    body = chance.randbytes(chance.randrange(1, 200))
    choices = [
        body,
        pickled,
        _prefix(1, len(body)) + body,
        _prefix(1, len(pickled)) + pickled,
        _prefix(1, 0xFFFFFFFF),
        _prefix(2, 0xFFFFFFFF),
        _prefix(2, MAX_FRAME_BYTES),
        _prefix(1, 50) + body[:20],
        _prefix(1, 3) + msgpack.packb([1, 2]),
        *(_control(chance.choice(["hello", "open", "frame", "done", "fail", "ack", "store", ""])) for _ in range(4)),
    ]
    return b"".join(chance.choice(choices) for _ in range(chance.randrange(1, 4)))


def _control(kind: str) -> bytes:
    data = bytes(msgpack.packb({"kind": kind, "leg": ["r", 1], "header": [1, 2, [3]], "ticket": 5}))
    return b"bKV\x01" + len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize("after_handshake", [False, True])
def test_random_bytes_end_the_link_quickly_and_allocate_nothing(after_handshake: bool) -> None:
    with rig(SHAPE, SHAPE, QUICK) as pair:
        tracemalloc.start()
        for seed in range(150):
            leg = (f"fuzz{seed}", 1, 0)
            ticket = pair.reserve(leg, PROMPT, 0, pair.target_blocks(PROMPT))
            if after_handshake:
                peer = RawPeer(pair, ticket)
                peer.open(ticket)
                connection = peer.wire._socket
            else:
                host, port = pair.receivers[0].address.split(":")
                connection = socket.create_connection((host, int(port)))
            try:
                connection.sendall(_garbage(seed))
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(5)
                while connection.recv(4096):
                    pass
            except OSError as error:  # refused so early that the rest of the bytes met a closed socket
                if isinstance(error, TimeoutError):
                    raise
            finally:
                connection.close()
            pair.receivers[0].forget(leg)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8 << 20
        _untouched(pair)
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)


def test_headers_survive_their_own_round_trip_only() -> None:
    header = FrameHeader(*LEG, 0, (0, 4), (0, 4), (0, 2), "float32", "raw", 2048, True, 0)
    packed = msgpack.unpackb(msgpack.packb(header.pack()))
    assert FrameHeader.unpack(packed) == header
    for index in range(len(packed)):
        wrongs: tuple[Any, ...] = (None, -1, 1 << 64, "", b"x", [1], [2, 1], [1, "2"], {}, 1.5)
        for wrong in wrongs:
            if type(wrong) is type(packed[index]) and wrong != [1] and wrong != [2, 1] and wrong != [1, "2"]:
                continue
            with pytest.raises(ValueError):
                FrameHeader.unpack([*packed[:index], wrong, *packed[index + 1 :]])
    with pytest.raises(ValueError):
        FrameHeader.unpack(packed[:-1])


def test_a_payload_that_was_not_announced_ends_the_link() -> None:
    with _hostile() as (pair, peer):
        peer.wire.send_payload(memoryview(bytes(2048)))
        with pytest.raises(WireError):
            peer.wire.receive()
        pair.received[0].wait(ReceiveFailed)
        _untouched(pair)


def test_a_silent_peer_is_given_up() -> None:
    with _hostile() as (pair, _):
        began = time.monotonic()
        assert "nothing from the peer" in pair.received[0].wait(ReceiveFailed)[0].error.message
        assert time.monotonic() - began < 3 * QUICK.frame_timeout_s


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
        )
        began = time.monotonic()
        pair.open(LEG, ticket, PROMPT, pair.source_blocks(PROMPT))
        pair.sent[0].wait(SendFailed)
        assert time.monotonic() - began < 2


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
