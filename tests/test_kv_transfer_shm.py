"""The shared-memory carrier inside a link: what it moves, what it refuses, and going on without it."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from baton.kv_transfer import shm
from baton.kv_transfer.carriers import RING, CarrierFailed, InlineCarrier
from baton.kv_transfer.events import RankComplete, ReceiveFailed, SendFailed, Sent
from baton.kv_transfer.shm import Ring, ShmReceiver, ShmSender, build_shm
from baton.kv_transfer.wire import Wire, WireError
from baton.tests.harness.holdings import descriptors, mappings
from baton.tests.harness.kv_rig import LEG, PARAMS, heads_of, layout, rig

SHM = replace(PARAMS, transport="shm", frame_bytes=2048)
PROMPT = 32


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many frames each kind of carrier brought, the canary included."""
    counts = {"inline": 0, "shm": 0}

    def counting(kind: str, original: Any) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            counts[kind] += 1
            return original(self, *arguments)

        return call

    for kind, carrier in (("inline", InlineCarrier), ("shm", ShmReceiver)):
        monkeypatch.setattr(carrier, "receive", counting(kind, carrier.receive))
    return counts


@pytest.mark.parametrize("transport", ["shm", "auto"])
@pytest.mark.parametrize("checksum", [True, False])
def test_shm_moves_all_payloads_between_several_ranks(transport: Any, checksum: bool, used: dict[str, int]) -> None:
    params = replace(SHM, transport=transport, checksum=checksum)
    with rig(layout(heads_of(2, 2)), layout(heads_of(2, 1), block_size=3), params) as pair:
        pair.send(LEG, PROMPT, chunk=8, group=2)
        for events in pair.sent:
            events.wait(Sent)
        pair.assert_equal(PROMPT)
    assert used["inline"] == 0
    assert used["shm"] > 4


@pytest.mark.parametrize("frames", [1, 3, 4, 5, 9])
def test_slots_are_used_in_turn_by_many_parcels(frames: int, used: dict[str, int]) -> None:
    shape = layout(heads_of(2, 1), layers=16, head_dim=64)
    with rig(shape, shape, replace(SHM, frame_bytes=4096 * 32 // frames), tokens=2 * 128) as pair:
        for number, prompt in enumerate((4, 128, 4, 128)):
            pair.send((f"r{number}", 1, 0), prompt)
            pair.sent[0].wait(Sent, number + 1)
        pair.assert_equal(128)
    assert used["inline"] == 0
    assert used["shm"] > 4


def test_a_frame_that_fits_no_slot_goes_inline(used: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_LEAST_SLOT_BYTES", 4096)
    shape = layout(heads_of(8, 1), layers=2, head_dim=256)  # one token of one layer: 16 KiB
    with rig(shape, shape, replace(SHM, frame_bytes=512)) as pair:
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)
    assert used["inline"] > 0


def test_nothing_of_the_ring_is_left_when_a_link_is_closed() -> None:
    mapped, opened = mappings("baton-kv"), descriptors()

    def left() -> list[object]:
        sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "baton-kv" in line]
        doors = {f"socket:[{line[6]}]" for line in sockets}
        files = [one for one in descriptors() - opened if "baton-kv" in one[1] or one[1] in doors]
        return [*(mappings("baton-kv") - mapped), *files]

    shape = layout([(0, 2)])
    with rig(shape, shape, replace(SHM, idle_close_s=0.3)) as pair:
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        assert left()
        deadline = time.monotonic() + 10
        while left() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left()


@pytest.mark.parametrize("at", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("end", "method"),
    [
        (ShmReceiver, "receive"),
        (ShmReceiver, "release"),
        (ShmReceiver, "expect"),
        (ShmSender, "buffer"),
        (ShmSender, "send"),
    ],
)
def test_a_ring_that_fails_later_is_replaced_within_the_request(
    end: type, method: str, at: int, used: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(end, method)
    calls = [0]

    def failing(self: Any, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] > at:
            raise CarrierFailed("out of order")
        return original(self, *arguments)

    monkeypatch.setattr(end, method, failing)
    shape = layout([(0, 2)])
    with rig(shape, shape, SHM) as pair:
        pair.send(LEG, PROMPT, group=1)
        pair.sent[0].wait(Sent)
        assert len(pair.received[0].wait(RankComplete)) == 1
        pair.assert_equal(PROMPT)
        assert not pair.received[0].of(ReceiveFailed)
        assert not pair.sent[0].of(SendFailed)
    assert used["inline"] > 0


def _stranger(door: socket.socket) -> None:
    raise PermissionError("the peer's process belongs to user 12")


def _no_memory(*arguments: Any) -> int:
    raise OSError("no memory")


@pytest.mark.parametrize(
    ("name", "broken"),
    [("_check_user", _stranger), ("_take_over", _no_memory), ("_hand_over", _no_memory), ("_listen", _no_memory)],
)
def test_a_ring_that_cannot_be_shared_leaves_the_link_inline(
    name: str, broken: Callable[..., Any], used: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, name, broken)
    shape = layout([(0, 2)])
    with rig(shape, shape, SHM) as pair:
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)
    assert used["shm"] == 0
    assert used["inline"] > 0


def test_kv_06_bytes_in_the_ring_are_verified_too(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ShmReceiver.receive
    calls = [0]

    def flipping(self: ShmReceiver, size: int) -> torch.Tensor:
        calls[0] += 1
        payload = original(self, size)
        if calls[0] == 3:
            payload = payload.clone()
            payload[17] ^= 1
        return payload

    monkeypatch.setattr(ShmReceiver, "receive", flipping)
    shape = layout([(0, 2)])
    with rig(shape, shape, SHM) as pair:
        pair.send(LEG, PROMPT, group=1)
        assert "corrupt" in pair.sent[0].wait(SendFailed)[0].error.message
        assert "corrupt" in pair.received[0].wait(ReceiveFailed)[0].error.message


# ---- what the decode rank takes over ------------------------------------------------------------------------------


@pytest.fixture
def doors() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a Unix socket."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (near, far):
        end.settimeout(5.0)
    with near, far:
        yield near, far


def _file(size: int, seals: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    ("size", "seals", "announced", "reason"),
    [
        (8192, 0, 8192, "not sealed"),
        (8192, fcntl.F_SEAL_GROW, 8192, "not sealed"),
        (4096, fcntl.F_SEAL_SHRINK, 8192, "4096 bytes came"),
        (8192, fcntl.F_SEAL_SHRINK, 0, "8192 bytes came"),
        (0, fcntl.F_SEAL_SHRINK, 0, "0 bytes came"),
        (8190, fcntl.F_SEAL_SHRINK, 8190, "8190 bytes came"),
    ],
)
def test_a_file_that_could_end_the_reader_is_not_mapped(
    size: int, seals: int, announced: int, reason: str, doors: tuple[socket.socket, socket.socket]
) -> None:
    near, far = doors
    descriptor = _file(size, seals)
    socket.send_fds(near, [b"\0"], [descriptor])
    os.close(descriptor)
    before = descriptors("memfd")
    with pytest.raises(OSError, match=reason):
        shm._take_over(far, announced)
    assert descriptors("memfd") <= before


def test_other_things_than_one_memfd_are_refused(doors: tuple[socket.socket, socket.socket]) -> None:
    near, far = doors
    near.sendall(b"\0")
    with pytest.raises(OSError, match="sent no ring"):
        shm._take_over(far, 4096)
    good = _file(4096, fcntl.F_SEAL_SHRINK)
    socket.send_fds(near, [b"\0"], [good, good])
    os.close(good)
    with pytest.raises(OSError, match="sent no ring"):
        shm._take_over(far, 4096)
    with tempfile.TemporaryFile() as plain:
        plain.truncate(4096)
        socket.send_fds(near, [b"\0"], [plain.fileno()])
        with pytest.raises(OSError, match=r"\[Errno"):  # a plain file has no seals
            shm._take_over(far, 4096)
    near.close()
    with pytest.raises(OSError, match="sent no ring"):
        shm._take_over(far, 4096)


def test_a_ring_is_read_only_for_the_reader_and_cannot_shrink(doors: tuple[socket.socket, socket.socket]) -> None:
    near, far = doors
    listener = socket.create_server(("127.0.0.1", 0))
    earlier = mappings("baton-kv")
    with listener, socket.create_connection(listener.getsockname()) as here, listener.accept()[0] as there:
        ring = Ring(shm._LEAST_SLOT_BYTES)
        socket.send_fds(near, [b"\0"], [ring.descriptor])
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(ring.descriptor, 4096)
        receiver = ShmReceiver(Wire(there, 2.0), far, 0.2, shm._take_over(far, ring.size))
        sender = ShmSender(Wire(here, 2.0), near, 0.2, ring)
        assert sorted(access for _, access, _ in mappings("baton-kv") - earlier) == ["r--s", "rw-s"]
        for number in range(6):  # more than slots
            sender.send(sender.buffer(4096).fill_(number))
            receiver.expect(4096)
            frame = receiver.receive(4096)
            assert torch.equal(frame, torch.full((4096,), number, dtype=torch.uint8))
            receiver.release()
        ring.slots[5 % RING][0] = 9
        assert frame[0] == 9  # the same memory
        with pytest.raises(CarrierFailed, match="a frame of"):
            receiver.expect(ring.slot_bytes + 1)
        with pytest.raises(CarrierFailed, match=r"nothing from the peer for 0\.2 s"):
            receiver.receive(8)
        for _ in range(RING):
            sender.send(sender.buffer(8))
        with pytest.raises(CarrierFailed, match=r"nothing from the peer for 0\.2 s"):
            sender.buffer(8)
        receiver.close()
        with pytest.raises(CarrierFailed, match=r"closed|reset"):
            sender.buffer(8)
        sender.close()
        with pytest.raises(CarrierFailed, match="closed"):
            sender.send(frame)
        assert frame[0] == 9
        with pytest.raises(CarrierFailed):
            receiver.expect(8)


@pytest.mark.parametrize("name", ["x" * 32, "../../etc", "0" * 31, "0" * 33, "A" * 32])
def test_only_our_own_kind_of_name_is_dialled(name: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as near, listener.accept()[0] as far:
        hostile, honest = Wire(near, 2.0), Wire(far, 2.0)
        hostile.send("shm", name=name, bytes=4096, reason="")
        with pytest.raises(WireError, match="not one of ours"):
            build_shm(honest, False, 4096, 1.0)
