"""Frames are gathered when their turn comes: what happens to the rest of a parcel when its leg or carrier ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from baton.kv_transfer.carriers import CarrierFailed
from baton.kv_transfer.events import Abandoned, RankComplete, ReceiveFailed, SendFailed, Sent
from baton.kv_transfer.shm import ShmReceiver, ShmSender
from baton.kv_transfer.torch_carrier import TorchCarrier
from baton.kv_transfer.wire import Wire
from baton.proto.errors import InternalError
from baton.proto.kv_layout import KVLayout
from baton.tests.harness.kv_rig import LEG, PARAMS, WAIT_S, Rig, TensorStore, layout, rig

SHAPE = layout([(0, 2)], layers=16)
PROMPT = 64
NEXT = ("next", 1, 0)


class _Store(TensorStore):
    """Calls `at_gather` with the number of the gather that is about to begin."""

    def __init__(self, shape: KVLayout, rank: int, blocks: int) -> None:
        super().__init__(shape, rank, blocks)
        self.gathers = 0
        self.at_gather: Callable[[int], None] = lambda number: None

    def gather(
        self,
        blocks: Sequence[int],
        layers: tuple[int, int],
        heads: tuple[int, int],
        tokens: tuple[int, int],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.gathers += 1
        self.at_gather(self.gathers)
        return super().gather(blocks, layers, heads, tokens, out)


def _source(pair: Rig) -> _Store:
    source = pair.sources[0]
    assert isinstance(source, _Store)
    return source


def _goes_on(pair: Rig, gathers: int) -> None:
    """The leg ended after so many gathers, of which the last one does not count; the link serves the next leg.

    Beside the wire, its end may come before a frame that was sent earlier, which is not placed then.
    """
    assert _source(pair).gathers == gathers
    assert pair.targets[0].writes <= gathers - 1
    _source(pair).at_gather = lambda number: None
    pair.targets[0].data.zero_()
    pair.send(NEXT, PROMPT)
    pair.sent[0].wait(Sent)
    pair.assert_equal(PROMPT)
    assert len(pair.senders[0].open_links) == 1


@pytest.mark.parametrize("transport", ["inline", "shm", "gloo"])
def test_lc_06_a_leg_that_is_cancelled_in_the_middle_of_a_parcel_sends_no_more_of_its_blocks(transport: Any) -> None:
    """What a gather saw that was going on when `cancel` returned may be another request's by the time it is sent."""
    with rig(SHAPE, SHAPE, replace(PARAMS, transport=transport, frame_bytes=4096), store=_Store, tokens=PROMPT) as pair:
        _source(pair).at_gather = lambda number: pair.senders[0].cancel(LEG) if number == 3 else None
        pair.send(LEG, PROMPT)
        [failure] = pair.received[0].wait(ReceiveFailed)
        assert "cancelled" in failure.error.message
        _goes_on(pair, 3)
        assert not pair.sent[0].of(SendFailed)


@pytest.mark.parametrize("transport", ["inline", "shm", "gloo"])
def test_cf_05_a_fault_of_the_pool_in_the_middle_of_a_parcel_ends_the_leg_alone(transport: Any) -> None:
    def broken(number: int) -> None:
        if number == 3:
            raise RuntimeError("no such page")

    with rig(SHAPE, SHAPE, replace(PARAMS, transport=transport, frame_bytes=4096), store=_Store, tokens=PROMPT) as pair:
        _source(pair).at_gather = broken
        pair.send(LEG, PROMPT)
        assert isinstance(pair.sent[0].wait(SendFailed)[0].error, InternalError)
        assert "no such page" in pair.received[0].wait(ReceiveFailed)[0].error.message
        _goes_on(pair, 3)


@pytest.mark.parametrize("at", range(2, 22, 3))
@pytest.mark.parametrize(
    ("transport", "end", "method"),
    [
        ("shm", ShmSender, "send"),
        ("shm", ShmReceiver, "receive"),
        ("shm", ShmReceiver, "release"),
        ("gloo", TorchCarrier, "send"),
        ("gloo", TorchCarrier, "receive"),
        ("gloo", TorchCarrier, "release"),
    ],
)
def test_a_carrier_may_fail_at_any_frame(
    transport: Any, end: type, method: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every frame is placed once, and counted once, whichever end noticed."""
    original, calls, lock = getattr(end, method), [0], threading.Lock()

    def failing(self: Any, *arguments: Any) -> Any:
        with lock:
            calls[0] += 1
            fails = calls[0] == at
        if fails:
            raise CarrierFailed("out of order")
        return original(self, *arguments)

    monkeypatch.setattr(end, method, failing)
    with rig(SHAPE, SHAPE, replace(PARAMS, transport=transport, frame_bytes=4096), store=_Store, tokens=PROMPT) as pair:
        pair.send(LEG, PROMPT)
        [sent] = pair.sent[0].wait(Sent)
        [complete] = pair.received[0].wait(RankComplete)
        pair.assert_equal(PROMPT)
        assert calls[0] >= at
        assert pair.targets[0].writes == sent.frames == complete.frames
        assert sent.bytes == complete.bytes == PROMPT * 2 * 16 * 2 * 8 * 4


def _wait_for_writes(pair: Rig, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while pair.targets[0].writes < count and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("transport", ["inline", "shm", "gloo"])
def test_what_is_announced_before_it_is_computed_is_gathered_after(transport: Any) -> None:
    """Also when the carrier or another leg has time to go on meanwhile."""
    with rig(SHAPE, SHAPE, replace(PARAMS, transport=transport, frame_bytes=4096), store=_Store, tokens=PROMPT) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        pair.open(LEG, ticket, PROMPT, pair.source_blocks(PROMPT))
        late = pair.sources[0].data[12:].clone()
        pair.sources[0].data[12:] = 7.0  # what the last layers' blocks held before
        for layer in range(0, 12, 4):
            pair.computed(LEG, (0, PROMPT), (layer, layer + 4))
        _wait_for_writes(pair, 24)  # two frames a layer
        pair.settle()
        assert pair.targets[0].writes == 24
        pair.sources[0].data[12:] = late
        pair.computed(LEG, (0, PROMPT), (12, 16))
        pair.senders[0].finish(LEG, b"first")
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)


@pytest.mark.parametrize("transport", ["inline", "shm", "gloo"])
@pytest.mark.parametrize("end", ["cancel", "abandon"])
def test_a_leg_that_ends_before_what_it_announced_is_computed_leaves_the_link_usable(transport: Any, end: str) -> None:
    with rig(SHAPE, SHAPE, replace(PARAMS, transport=transport, frame_bytes=4096), store=_Store, tokens=PROMPT) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        pair.open(LEG, ticket, PROMPT, pair.source_blocks(PROMPT))
        for layer in range(0, 12, 4):
            pair.computed(LEG, (0, PROMPT), (layer, layer + 4))
        _wait_for_writes(pair, 24)  # two frames a layer
        pair.settle()
        getattr(pair.senders[0], end)(LEG)
        pair.received[0].wait(ReceiveFailed if end == "cancel" else Abandoned)
        assert _source(pair).gathers == 24
        pair.targets[0].data.zero_()
        pair.send(NEXT, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)
        assert len(pair.senders[0].open_links) == 1


@pytest.mark.parametrize("transport", ["inline", "shm"])
def test_the_end_is_said_by_its_giver_where_the_link_sleeps_and_the_wire_has_no_payloads(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(wire: Wire, kind: str, **fields: Any) -> Any:
            if kind == "done" and "first_tokens" in fields:
                said.append(threading.current_thread().name)
            return original(wire, kind, **fields)

        return call

    for name in ("send", "send_at_once"):
        monkeypatch.setattr(Wire, name, noting(getattr(Wire, name)))
    with rig(SHAPE, SHAPE, replace(PARAMS, transport=transport, frame_bytes=4096), store=_Store, tokens=PROMPT) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        pair.open(LEG, ticket, PROMPT, pair.source_blocks(PROMPT))
        pair.computed(LEG, (0, PROMPT), (0, 16))
        pair.received[0].wait(RankComplete)
        (link,) = pair.senders[0]._pool.all
        deadline = time.monotonic() + WAIT_S
        while (link._resting is None or link._resting.busy) and time.monotonic() < deadline:
            time.sleep(0.01)
        pair.senders[0].finish(LEG, b"first")
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)
    (name,) = said
    assert (name == threading.current_thread().name) is (transport == "shm"), name
