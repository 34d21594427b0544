"""Frames announced together by a peer that does it wrongly: what is bad is never placed, nor what follows it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from baton.kv_transfer.events import ReceiveFailed
from baton.kv_transfer.frames import MAX_PARCEL_FRAMES, TRAILER, TRAILER_BYTES, VOID_TRAILER, Frame, Parcel
from baton.kv_transfer.plan import Box
from baton.kv_transfer.wire import WireError
from baton.tests.harness.kv_raw_peer import PROMPT, QUICK, SHAPE, RawPeer, as_sent, send_payload
from baton.tests.harness.kv_rig import LEG, Rig, rig

_SIZE = 512  # bytes of a frame: 2 layers, 2 tokens, 2 heads


@contextmanager
def _hostile() -> Iterator[tuple[Rig, RawPeer]]:
    with rig(SHAPE, SHAPE, QUICK) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        peer = RawPeer(pair, ticket)
        peer.open(ticket)
        try:
            yield pair, peer
        finally:
            peer.wire.close()


def _content(seed: int) -> bytes:
    """Small numbers of which none is 0."""
    return torch.randint(1, 99, (_SIZE // 4,), generator=torch.Generator().manual_seed(seed)).float().numpy().tobytes()


def _parcel(spans: list[tuple[int, int]]) -> Parcel:
    frames = [Frame(Box(span, (0, 2), (0, 2)), _SIZE) for span in spans]
    return Parcel(*LEG, 0, "float32", "raw", True, frames)


def _announce(peer: RawPeer, parcel: Parcel) -> Any:
    peer.wire.send("frames", **parcel.pack())
    return peer.wire.receive()


def test_frames_that_travel_together_are_answered_once() -> None:
    contents = [_content(1), _content(2), _content(3)]
    with _hostile() as (pair, peer):
        parcel = _parcel([(0, 2), (2, 4), (4, 6)])
        assert _announce(peer, parcel) == {"kind": "accept", "sequence": 0}
        send_payload(peer.wire, as_sent(parcel, contents))
        assert peer.wire.receive() == {"kind": "ack", "sequence": 0}
        assert pair.targets[0].writes == 3


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("at", [40, _SIZE, _SIZE + TRAILER_BYTES - 1], ids=["bytes", "state", "sum"])
def test_nothing_is_placed_after_the_first_corrupt_frame(bad: int, at: int) -> None:
    contents = [_content(1), _content(2), _content(3)]
    with _hostile() as (pair, peer):
        parcel = _parcel([(0, 2), (2, 4), (4, 6)])
        _announce(peer, parcel)
        payload = bytearray(as_sent(parcel, contents))
        payload[bad * (_SIZE + TRAILER_BYTES) + at] ^= 1
        send_payload(peer.wire, bytes(payload))
        answer = peer.wire.receive()
        assert isinstance(answer, dict)
        assert (answer["kind"], answer["sequence"]) == ("refuse", 0)
        assert "corrupt" in pair.received[0].wait(ReceiveFailed)[0].error.message
        assert pair.targets[0].writes == bad
        peer.wire.send("beat")  # the link goes on, at the right byte
        assert peer.wire.receive() == {"kind": "beat"}


def test_frames_of_one_message_that_overlap_are_placed_once() -> None:
    contents = [_content(1), _content(2)]
    with _hostile() as (pair, peer):
        parcel = _parcel([(0, 2), (1, 3)])
        _announce(peer, parcel)
        send_payload(peer.wire, as_sent(parcel, contents))
        answer = peer.wire.receive()
        assert isinstance(answer, dict)
        assert "overlaps" in answer["message"]
        assert pair.targets[0].writes == 1


def test_one_frame_in_the_wrong_place_refuses_all_before_the_payload() -> None:
    with _hostile() as (pair, peer):
        answer = _announce(peer, _parcel([(0, 2), (7, 9)]))
        assert answer["kind"] == "refuse"
        assert "outside" in answer["message"]
        assert pair.targets[0].writes == 0


def test_void_frames_are_dropped_whatever_is_in_them_and_do_not_count() -> None:
    contents = [_content(1), _content(2), _content(3)]
    with _hostile() as (pair, peer):
        parcel = _parcel([(0, 2), (2, 4), (4, 6)])
        _announce(peer, parcel)
        payload = bytearray(as_sent(parcel, contents))
        payload[_SIZE : _SIZE + TRAILER_BYTES] = VOID_TRAILER
        send_payload(peer.wire, bytes(payload))
        assert peer.wire.receive() == {"kind": "ack", "sequence": 0}
        assert pair.targets[0].writes == 2
        peer.wire.send("done", leg=LEG, first_tokens=b"first")
        assert "of 64 cells" in pair.received[0].wait(ReceiveFailed)[0].error.message


@pytest.mark.parametrize("state", [0, 1, 0x4A, 0xB5, 0xFF])
def test_a_state_that_does_not_exist_is_refused(state: int) -> None:
    with _hostile() as (pair, peer):
        parcel = _parcel([(0, 2)])
        _announce(peer, parcel)
        payload = bytearray(as_sent(parcel, [_content(1)]))
        _, total = TRAILER.unpack_from(payload, _SIZE)
        TRAILER.pack_into(payload, _SIZE, state, total)
        send_payload(peer.wire, bytes(payload))
        answer = peer.wire.receive()
        assert isinstance(answer, dict)
        assert "corrupt" in answer["message"]
        assert pair.targets[0].writes == 0


def _broken() -> dict[str, dict[str, Any]]:
    good = _parcel([(0, 2), (2, 4)]).pack()
    header, frames = good["header"], good["frames"]
    return {
        "no list": {"header": header, "frames": {"a": 1}},
        "nothing": {"header": header, "frames": []},
        "no frames at all": {"header": header},
        "not frames": {"header": header, "frames": [1, 2]},
        "a number too few": {"header": header, "frames": [frames[0], frames[1][:-1]]},
        "a number that is none": {"header": header, "frames": [frames[0], [*frames[1][:-1], True]]},
        "too many": {"header": header, "frames": [frames[0]] * (MAX_PARCEL_FRAMES + 1)},
        "another number than is due": {"header": [*header[:3], 1, *header[4:]], "frames": frames},
        "a field too few": {"header": header[:-1], "frames": frames},
    }


@pytest.mark.parametrize("fields", _broken().values(), ids=list(_broken()))
def test_a_list_of_headers_that_makes_no_sense_ends_the_link(fields: dict[str, Any]) -> None:
    with _hostile() as (pair, peer):
        peer.wire.send("frames", **fields)
        with pytest.raises(WireError):
            peer.wire.receive()
        assert pair.targets[0].writes == 0


@pytest.mark.parametrize("off", [-1, 1, 64])
def test_a_payload_of_another_size_than_announced_ends_the_link(off: int) -> None:
    with _hostile() as (pair, peer):
        parcel = _parcel([(0, 2), (2, 4)])
        _announce(peer, parcel)
        send_payload(peer.wire, random.Random(1).randbytes(parcel.bytes + off))
        with pytest.raises(WireError):
            peer.wire.receive()
        assert pair.targets[0].writes == 0


def test_frames_too_large_together_end_the_link() -> None:
    huge = Frame(Box((0, 2), (0, 2), (0, 2)), 60 << 20)
    with _hostile() as (pair, peer):
        peer.wire.send("frames", **replace(_parcel([(0, 2)]), frames=[huge] * 3).pack())
        with pytest.raises(WireError):
            peer.wire.receive()
        assert pair.targets[0].writes == 0
