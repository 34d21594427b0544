"""Frames that are copied out of prefill's pool before the decode rank has answered: what becomes of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from baton.kv_transfer.carriers import RING
from baton.kv_transfer.events import RankComplete, SendFailed, Sent
from baton.kv_transfer.frames import TRAILER_BYTES, VOID, WHOLE
from baton.kv_transfer.receive_window import ReceiveWindow
from baton.kv_transfer.shm import ShmSender
from baton.tests.harness.kv_rig import LEG, PARAMS, WAIT_S, Rig, TensorStore, layout, rig

SHM = replace(PARAMS, transport="shm", frame_bytes=2048)
PROMPT = 32
SHAPE = layout([(0, 2)])
NEXT = ("next", 1, 0)


class Gate:
    """Holds the decode rank before it answers an announcement."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.gathers = 0
        answer, gather = ReceiveWindow.on_frames, TensorStore.gather

        def held(window: ReceiveWindow, message: dict[str, Any]) -> None:
            assert self.open.wait(WAIT_S)
            answer(window, message)

        def counted(*arguments: Any) -> Any:
            self.gathers += 1
            return gather(*arguments)

        monkeypatch.setattr(ReceiveWindow, "on_frames", held)
        monkeypatch.setattr(TensorStore, "gather", counted)

    def reached(self, count: int) -> None:
        """Wait until so many frames were gathered, and a little longer for one too many."""
        _until(lambda: self.gathers >= count)
        time.sleep(0.05)
        assert self.gathers == count


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Closed by the test; open again at its end."""
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def _begin(pair: Rig, gate: Gate) -> None:
    """A link that was used, and a leg whose first frames are gathered and not accepted."""
    pair.send(("first", 1, 0), 4)
    pair.sent[0].wait(Sent)
    gate.gathers = 0
    gate.open.clear()
    pair.send(LEG, PROMPT)
    gate.reached(RING)


def test_as_many_frames_as_there_are_slots_are_ready_for_the_answer(gate: Gate) -> None:
    with rig(SHAPE, SHAPE, SHM) as pair:
        _begin(pair, gate)
        writes = pair.targets[0].writes
        assert len(pair.received[0].of(RankComplete)) == 1  # of the leg before
        time.sleep(0.05)
        assert pair.targets[0].writes == writes  # nothing is placed before the answer
        gate.open.set()
        assert pair.sent[0].wait(Sent, 2)[1].frames > RING
        pair.receivers[0].forget(LEG)
        pair.assert_equal(PROMPT)


def test_frames_of_a_leg_that_was_cancelled_before_the_answer_are_void(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[int] = []
    send = ShmSender.send

    def noted(carrier: ShmSender, frame: torch.Tensor) -> None:
        states.append(int(frame[-TRAILER_BYTES]))
        send(carrier, frame)

    monkeypatch.setattr(ShmSender, "send", noted)
    with rig(SHAPE, SHAPE, SHM) as pair:
        _begin(pair, gate)
        writes = pair.targets[0].writes
        states.clear()
        pair.senders[0].cancel(LEG)
        pair.sources[0].data += 1  # the blocks are another request's
        gate.open.set()
        pair.send(NEXT, PROMPT)
        (_, following) = pair.sent[0].wait(Sent, 2)
        pair.assert_equal(PROMPT)
        assert pair.targets[0].writes - writes == following.frames
        assert states == [VOID] * (len(states) - following.frames) + [WHOLE] * following.frames
        assert len(states) - following.frames > RING


def test_a_leg_that_decode_forgot_leaves_its_frames_unsent(gate: Gate) -> None:
    with rig(SHAPE, SHAPE, SHM) as pair:
        _begin(pair, gate)
        pair.receivers[0].forget(LEG)
        writes = pair.targets[0].writes
        gate.open.set()
        pair.sent[0].wait(SendFailed)
        assert pair.targets[0].writes == writes
        pair.send(NEXT, PROMPT)
        pair.sent[0].wait(Sent, 2)
        pair.assert_equal(PROMPT)


@pytest.mark.parametrize("transport", ["inline", "gloo"])
def test_other_carriers_wait_for_the_answer(transport: Any, gate: Gate) -> None:
    with rig(SHAPE, SHAPE, replace(SHM, transport=transport)) as pair:
        pair.send(("first", 1, 0), 4)
        pair.sent[0].wait(Sent)
        gate.gathers = 0
        gate.open.clear()
        pair.send(LEG, PROMPT)
        gate.reached(0)
        gate.open.set()
        pair.sent[0].wait(Sent, 2)
        pair.assert_equal(PROMPT)
