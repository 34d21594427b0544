"""Random bytes, pickles, broken headers, damaged payloads: always refused, never placed, nothing allocated or left."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from baton.kv_transfer.events import Sent
from baton.kv_transfer.frames import MAX_FRAME_BYTES, Parcel
from baton.tests.harness.holdings import descriptors, threads
from baton.tests.harness.kv_fuzzer import PICKLE_LEAVES, Fuzzer
from baton.tests.harness.kv_raw_peer import PROMPT, QUICK, SHAPE, RawPeer, one_frame
from baton.tests.harness.kv_rig import LEG, PARAMS, rig


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
        *(_control(chance.choice(["hello", "open", "frames", "done", "fail", "ack", "store", ""])) for _ in range(4)),
    ]
    return b"".join(chance.choice(choices) for _ in range(chance.randrange(1, 4)))


def _control(kind: str) -> bytes:
    data = bytes(msgpack.packb({"kind": kind, "leg": ["r", 1], "header": [1, 2, [3]], "frames": [[1]], "ticket": 5}))
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
        assert pair.targets[0].writes == 0
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)


def test_announcements_survive_their_own_round_trip_only() -> None:
    parcel = one_frame(0)
    packed = msgpack.unpackb(msgpack.packb(parcel.pack()))
    assert Parcel.unpack(packed) == parcel
    wrongs: tuple[Any, ...] = (None, -1, 1 << 63, "", b"x", [1], [2, 1], {}, 1.5, True)
    header, frame = packed["header"], packed["frames"][0]
    for index in range(len(header)):
        for wrong in wrongs:
            if type(wrong) is not type(header[index]) or wrong in (-1, 1 << 63):
                with pytest.raises(ValueError):
                    Parcel.unpack({**packed, "header": [*header[:index], wrong, *header[index + 1 :]]})
    for index in range(len(frame)):
        for wrong in wrongs:
            with pytest.raises(ValueError):
                Parcel.unpack({**packed, "frames": [[*frame[:index], wrong, *frame[index + 1 :]]]})
    shorts: tuple[dict[str, Any], ...] = (
        {"header": header[:-1]},
        {"frames": [frame[:-1]]},
        {"frames": []},
        {"frames": None},
    )
    for short in shorts:
        with pytest.raises(ValueError):
            Parcel.unpack({**packed, **short})


@pytest.mark.parametrize(
    ("carrier", "count"),
    [
        ("inline", 2_000),
        ("shm", 1_000),
        pytest.param("inline", 100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param("shm", 50_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_wrong_frames_and_messages_are_never_placed(carrier: str, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Against the real receive path over real sockets; the receiver serves a good leg afterwards."""
    caplog.set_level(logging.ERROR)
    patient = replace(PARAMS, frame_timeout_s=30.0, connect_timeout_s=10.0, transport="auto")
    with rig(SHAPE, SHAPE, patient) as pair:
        open_before, running_before = descriptors(), threads()
        fuzzer = Fuzzer(pair, count, carrier)
        fuzzer.run(count)
        assert sum(fuzzer.counts.values()) == count
        assert fuzzer.placed > count / 100
        assert min(fuzzer.counts.values()) > count / 50
        assert not os.path.exists(PICKLE_LEAVES)
        assert not caplog.records, "the receiver had to expect all of this"
        deadline = time.monotonic() + 15
        while left := [*(threads() - running_before), *(descriptors() - open_before)]:
            assert time.monotonic() < deadline, f"a thread or a descriptor is left: {left}"
            time.sleep(0.02)
        pair.targets[0].data.zero_()
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)
