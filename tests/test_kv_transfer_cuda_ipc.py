"""The cuda_ipc carrier as far as it goes without a GPU: its handle, its slots, and how a link goes on without it."""

from __future__ import annotations

import threading
from dataclasses import astuple, replace
from typing import Any

import msgpack
import pytest
import torch
from baton.kv_transfer import handshake
from baton.kv_transfer.carriers import CarrierFailed
from baton.kv_transfer.cuda_ipc import CudaIpcCarrier, Handle, staging_bytes
from baton.kv_transfer.events import SendFailed, Sent
from baton.tests.harness.kv_raw_peer import PROMPT, SHAPE
from baton.tests.harness.kv_rig import LEG, PARAMS, rig

HANDLE = Handle("GPU-1", b"h" * 64, 1 << 20, 512, b"/torch_1_2_3", 8, b"e" * 64, True, 2, 4096)


def test_a_handle_travels_as_plain_fields() -> None:
    assert Handle.unpack(msgpack.unpackb(msgpack.packb(HANDLE.pack()))) == HANDLE


@pytest.mark.parametrize(
    "changed",
    [
        {"gpu": "G" * 101},
        {"handle": b""},
        {"handle": b"h" * 5000},
        {"size": -1},
        {"size": 1 << 60},
        {"size": staging_bytes(2, 4096) - 1},
        {"offset": -1},
        {"counter": b"/../etc/passwd"},
        {"counter": b""},
        {"counter_offset": 1 << 50},
        {"event": b"e" * 5000},
        {"slots": 0},
        {"slots": 1000},
        {"slot_bytes": 0},
    ],
)
def test_a_handle_that_cannot_be_right_is_never_opened(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="handle of CUDA memory"):
        Handle.unpack(replace(HANDLE, **changed).pack())


def test_a_field_of_another_type_is_refused() -> None:
    fields = list(astuple(HANDLE))
    for at in range(len(fields)):
        wrongs: tuple[Any, ...] = (None, [1], 1.5, {})
        for wrong in wrongs:
            with pytest.raises(ValueError, match="not a handle"):
                Handle.unpack([*fields[:at], wrong, *fields[at + 1 :]])
    for other in (None, b"\x80\x04pickle", fields[:-1], [*fields, 1]):
        with pytest.raises(ValueError, match="not a handle"):
            Handle.unpack(other)


def _ends(limit_s: float, gone: bool = False) -> tuple[CudaIpcCarrier, CudaIpcCarrier]:
    staging = torch.zeros(staging_bytes(2, 1000), dtype=torch.uint8)
    return CudaIpcCarrier(staging, 2, 1000, limit_s, lambda: gone), CudaIpcCarrier(
        staging, 2, 1000, limit_s, lambda: gone
    )


def test_slots_are_filled_in_turn_and_read_in_order() -> None:
    """The same memory in one process, on the CPU."""
    sender, receiver = _ends(20.0)
    payloads = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (1000, 1, 999, 500, 1000, 3)]
    got: list[torch.Tensor] = []

    def receive() -> None:
        for payload in payloads:
            receiver.expect(payload.numel())
            got.append(receiver.receive(payload.numel()).clone())
            receiver.release()

    thread = threading.Thread(target=receive)
    thread.start()
    for payload in payloads:
        sender.send(sender.buffer(payload.numel()).copy_(payload))
    thread.join(20)
    assert all(torch.equal(one, other) for one, other in zip(payloads, got, strict=True))


def test_waiting_ends_with_the_limit_or_the_peer_and_a_closed_end_is_of_no_use() -> None:
    for limit_s, gone in ((0.05, False), (60.0, True)):
        sender, receiver = _ends(limit_s, gone)
        with pytest.raises(CarrierFailed, match="no frame"):
            receiver.receive(8)
        with pytest.raises(CarrierFailed, match="slots have 1000"):
            sender.send(torch.empty(1001, dtype=torch.uint8))
        for end in (sender, receiver):
            end.close()
            with pytest.raises(CarrierFailed, match="closed"):
                end.send(torch.empty(8, dtype=torch.uint8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_the_link_goes_on_inline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handshake, "choose", lambda *_: ("cuda_ipc", ""))
    with rig(SHAPE, SHAPE, replace(PARAMS, transport="cuda_ipc")) as pair:
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)
        assert not pair.sent[0].of(SendFailed)
    assert "no CUDA device here" in caplog.text
