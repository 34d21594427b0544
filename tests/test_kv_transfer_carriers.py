"""The gloo carrier inside a link, and how a link goes on inline when the carrier fails on either end."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from baton.kernels.process_group import make_group
from baton.kv_transfer import torch_carrier
from baton.kv_transfer.carriers import CarrierFailed, InlineCarrier
from baton.kv_transfer.events import RankComplete, ReceiveFailed, SendFailed, Sent
from baton.kv_transfer.torch_carrier import TorchCarrier
from baton.tests.harness.kv_rig import LEG, PARAMS, heads_of, layout, rig

GLOO = replace(PARAMS, transport="gloo", frame_bytes=2048)
PROMPT = 32


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many frames each kind of carrier received (the start-up probe of gloo included)."""
    counts = {"inline": 0, "gloo": 0}

    def counting(kind: str, original: Any) -> Any:
        def receive(self: Any, size: int) -> Any:
            frame = original(self, size)
            counts[kind] += 1
            return frame

        return receive

    for kind, carrier in (("inline", InlineCarrier), ("gloo", TorchCarrier)):
        monkeypatch.setattr(carrier, "receive", counting(kind, carrier.receive))
    return counts


def test_gloo_moves_all_payloads_between_several_ranks(used: dict[str, int]) -> None:
    with rig(layout(heads_of(2, 2)), layout(heads_of(2, 1), block_size=3), GLOO) as pair:
        pair.send(LEG, PROMPT, chunk=8, group=2)
        for events in pair.sent:
            events.wait(Sent)
        pair.assert_equal(PROMPT)
    assert used["inline"] == 0
    assert used["gloo"] > 4


def test_ends_that_want_different_carriers_meet_inline(used: dict[str, int]) -> None:
    shape = layout([(0, 2)])
    with rig(shape, shape, GLOO, decode_params=PARAMS) as pair:
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)
    assert used["gloo"] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_carrier_that_cannot_be_built_leaves_the_link_inline(
    rank: int, used: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(backend: str, store: Any, own: int, size: int, timeout_s: float, host: str) -> Any:
        if own == rank:
            raise RuntimeError("no device")
        return make_group(backend, store, own, size, timeout_s, host)

    monkeypatch.setattr(torch_carrier, "make_group", failing)
    shape = layout([(0, 2)])
    with rig(shape, shape, GLOO) as pair:
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)
    assert used["gloo"] == 0


@pytest.mark.parametrize("method", ["send", "receive"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", [2, 3, 4, 6])
def test_a_carrier_that_fails_later_is_replaced_within_the_request(
    method: str, late: bool, at: int, used: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`late`: the bytes did arrive and only this end thinks that they did not. Uses 1 and 2 are the start-up's."""
    original = getattr(TorchCarrier, method)
    calls, lock = [0], threading.Lock()

    def failing(self: TorchCarrier, *arguments: Any) -> Any:
        with lock:
            calls[0] += 1
            fails = calls[0] >= at
        if fails and not late:
            raise CarrierFailed("out of order")
        result = original(self, *arguments)
        if fails:
            raise CarrierFailed("out of order")
        return result

    monkeypatch.setattr(TorchCarrier, method, failing)
    shape = layout([(0, 2)])
    with rig(shape, shape, GLOO) as pair:
        began = time.monotonic()
        pair.send(LEG, PROMPT, group=1)
        pair.sent[0].wait(Sent)
        assert time.monotonic() - began < 2 * GLOO.frame_timeout_s
        assert len(pair.received[0].wait(RankComplete)) == 1
        pair.assert_equal(PROMPT)
        assert not pair.received[0].of(ReceiveFailed)
        assert not pair.sent[0].of(SendFailed)
    assert used["inline"] > 0


def test_kv_06_gloo_bytes_are_verified_too(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TorchCarrier.send
    calls = [0]

    def flipping(self: TorchCarrier, payload: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 4:
            payload = payload.clone()
            payload[17] ^= 1
        original(self, payload)

    monkeypatch.setattr(TorchCarrier, "send", flipping)
    shape = layout([(0, 2)])
    with rig(shape, shape, GLOO) as pair:
        pair.send(LEG, PROMPT, group=1)
        assert "corrupt" in pair.sent[0].wait(SendFailed)[0].error.message
        assert "corrupt" in pair.received[0].wait(ReceiveFailed)[0].error.message
