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
from baton.kv_transfer.frames import MAX_PARCEL_FRAMES, FrameHeader, offsets, sealed
from baton.kv_transfer.wire import WireError
from baton.tests.harness.kv_raw_peer import PROMPT, QUICK, SHAPE, RawPeer
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


def _headers(spans: list[tuple[int, int]], contents: list[bytes]) -> list[FrameHeader]:
    base = FrameHeader(*LEG, 0, (0, 2), (0, 2), (0, 2), "float32", "raw", _SIZE, True, 0)
    return [
        sealed(replace(base, tokens=span), number, memoryview(content))
        for number, (span, content) in enumerate(zip(spans, contents, strict=True))
    ]


def _announce(peer: RawPeer, headers: list[FrameHeader]) -> Any:
    first, *more = [header.pack() for header in headers]
    peer.wire.send("frame", header=first, more=more)
    return peer.wire.receive()


def _payload(contents: list[bytes]) -> bytearray:
    starts, total = offsets([len(content) for content in contents])
    payload = bytearray(total)
    for start, content in zip(starts, contents, strict=True):
        payload[start : start + len(content)] = content
    return payload


def test_frames_that_travel_together_are_answered_once() -> None:
    contents = [_content(1), _content(2), _content(3)]
    with _hostile() as (pair, peer):
        assert _announce(peer, _headers([(0, 2), (2, 4), (4, 6)], contents)) == {"kind": "accept", "sequence": 0}
        peer.wire.send_payload(memoryview(_payload(contents)))
        assert peer.wire.receive() == {"kind": "ack", "sequence": 0}
        assert pair.targets[0].writes == 3


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_nothing_is_placed_after_the_first_corrupt_frame(bad: int) -> None:
    contents = [_content(1), _content(2), _content(3)]
    with _hostile() as (pair, peer):
        _announce(peer, _headers([(0, 2), (2, 4), (4, 6)], contents))
        payload = _payload(contents)
        payload[bad * _SIZE + 40] ^= 1
        peer.wire.send_payload(memoryview(payload))
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
        _announce(peer, _headers([(0, 2), (1, 3)], contents))
        peer.wire.send_payload(memoryview(_payload(contents)))
        answer = peer.wire.receive()
        assert isinstance(answer, dict)
        assert "overlaps" in answer["message"]
        assert pair.targets[0].writes == 1


def test_one_frame_in_the_wrong_place_refuses_all_before_the_payload() -> None:
    contents = [_content(1), _content(2)]
    with _hostile() as (pair, peer):
        answer = _announce(peer, _headers([(0, 2), (7, 9)], contents))
        assert answer["kind"] == "refuse"
        assert "outside" in answer["message"]
        assert pair.targets[0].writes == 0


def _broken() -> dict[str, dict[str, Any]]:
    good = [header.pack() for header in _headers([(0, 2), (2, 4)], [_content(1), _content(2)])]
    other = [*good[1][:0], "other", *good[1][1:]]
    late = [*good[1][:3], 2, *good[1][4:]]
    return {
        "no list": {"header": good[0], "more": {"a": 1}},
        "not headers": {"header": good[0], "more": [1, 2]},
        "too many": {"header": good[0], "more": [good[1]] * MAX_PARCEL_FRAMES},
        "two legs": {"header": good[0], "more": [other]},
        "a number left out": {"header": good[0], "more": [late]},
        "the same number": {"header": good[0], "more": [good[0]]},
    }


@pytest.mark.parametrize("fields", _broken().values(), ids=list(_broken()))
def test_a_list_of_headers_that_makes_no_sense_ends_the_link(fields: dict[str, Any]) -> None:
    with _hostile() as (pair, peer):
        peer.wire.send("frame", **fields)
        with pytest.raises(WireError):
            peer.wire.receive()
        assert pair.targets[0].writes == 0


@pytest.mark.parametrize("off", [-1, 1, 64])
def test_a_payload_of_another_size_than_announced_ends_the_link(off: int) -> None:
    contents = [_content(1), _content(2)]
    with _hostile() as (pair, peer):
        _announce(peer, _headers([(0, 2), (2, 4)], contents))
        peer.wire.send_payload(memoryview(random.Random(1).randbytes(2 * _SIZE + off)))
        with pytest.raises(WireError):
            peer.wire.receive()
        assert pair.targets[0].writes == 0


def test_frames_too_large_together_end_the_link() -> None:
    huge = replace(_headers([(0, 2)], [_content(1)])[0], bytes=60 << 20)
    with _hostile() as (pair, peer):
        frames = [replace(huge, sequence=number).pack() for number in range(3)]
        peer.wire.send("frame", header=frames[0], more=frames[1:])
        with pytest.raises(WireError):
            peer.wire.receive()
        assert pair.targets[0].writes == 0
