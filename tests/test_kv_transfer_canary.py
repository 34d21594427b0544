"""KV-06 at start-up: a carrier that changes, swaps or reinterprets anything is found out before the first frame."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from baton.kv_transfer.canary import BOX, canary_fault, canary_payload
from baton.kv_transfer.carriers import CarrierFailed, InlineCarrier
from baton.kv_transfer.events import ReceiveFailed, SendFailed, Sent
from baton.kv_transfer.frames import payload_shape
from baton.kv_transfer.torch_carrier import TorchCarrier
from baton.kv_transfer.wire import WireError
from baton.tests.harness.kv_raw_peer import PROMPT, QUICK, SHAPE, RawPeer
from baton.tests.harness.kv_rig import LEG, PARAMS, layout, rig

_BLOCK = payload_shape(BOX, SHAPE.head_dim)


def _bytes_swapped(payload: torch.Tensor) -> torch.Tensor:
    return payload.view(-1, 4).flip(1).reshape(-1)


def _another_dtype(payload: torch.Tensor) -> torch.Tensor:
    """Read as bfloat16, written as float16: the same number of bytes."""
    return payload.view(torch.bfloat16).to(torch.float16).view(torch.uint8)


def _tokens_before_heads(payload: torch.Tensor) -> torch.Tensor:
    block = payload.view(torch.float32).view(_BLOCK).transpose(2, 3)
    return block.contiguous().view(-1).view(torch.uint8)


def _k_and_v_exchanged(payload: torch.Tensor) -> torch.Tensor:
    return payload.view(torch.float32).view(_BLOCK).flip(1).contiguous().view(-1).view(torch.uint8)


def _one_bit(payload: torch.Tensor) -> torch.Tensor:
    payload = payload.clone()
    payload[700] ^= 4
    return payload


def _tail_missing(payload: torch.Tensor) -> torch.Tensor:
    payload = payload.clone()
    payload[-1] = 0
    return payload


DAMAGES = [_bytes_swapped, _another_dtype, _tokens_before_heads, _k_and_v_exchanged, _one_bit, _tail_missing]


def _damaging(carrier: type, damage: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = carrier.send  # type: ignore[attr-defined]

    def send(self: Any, payload: torch.Tensor) -> None:
        large = payload.numel() > 8  # leave the probe of gloo alone
        original(self, damage(payload) if large else payload)

    monkeypatch.setattr(carrier, "send", send)


@pytest.mark.parametrize("damage", DAMAGES)
def test_kv_06_a_wrong_inline_carrier_refuses_the_link(
    damage: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checksums, so that nothing else would notice."""
    _damaging(InlineCarrier, damage, monkeypatch)
    with rig(SHAPE, SHAPE, replace(PARAMS, checksum=False)) as pair:
        pair.send(LEG, PROMPT)
        reason = pair.sent[0].wait(SendFailed)[0].error.message
        assert "refused" in reason
        assert "canary block arrived wrong" in reason
        assert pair.targets[0].writes == 0
        assert not pair.received[0].of(ReceiveFailed)


@pytest.mark.parametrize("damage", DAMAGES)
def test_kv_06_a_wrong_gloo_carrier_is_replaced_by_inline(
    damage: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _damaging(TorchCarrier, damage, monkeypatch)
    with rig(SHAPE, SHAPE, replace(PARAMS, transport="gloo", checksum=False)) as pair:
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)
    assert "goes on inline" in caplog.text


@pytest.mark.parametrize("damage", DAMAGES)
def test_kv_06_a_wrong_inline_carrier_is_found_when_another_fails_later(
    damage: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary went over gloo; nothing else would notice. The link ends, and so does the leg, without a frame of it
    placed."""
    original, calls = TorchCarrier.send, [0]

    def failing(self: TorchCarrier, payload: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] > 2:  # the probe, the canary
            raise CarrierFailed("out of order")
        original(self, payload)

    monkeypatch.setattr(TorchCarrier, "send", failing)
    _damaging(InlineCarrier, damage, monkeypatch)
    with rig(SHAPE, SHAPE, replace(PARAMS, transport="gloo", checksum=False)) as pair:
        pair.send(LEG, PROMPT)
        assert "canary" in pair.sent[0].wait(SendFailed)[0].error.message
        assert pair.received[0].wait(ReceiveFailed)
        assert pair.targets[0].writes == 0


def test_after_a_change_of_carrier_nothing_is_taken_before_a_good_canary() -> None:
    with rig(SHAPE, SHAPE, QUICK) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        peer = RawPeer(pair, ticket)
        peer.open(ticket)
        peer.wire.send("switch")
        answer = peer.wire.receive()
        assert isinstance(answer, dict)
        assert (answer["kind"], answer["sequence"]) == ("switched", 0)
        with pytest.raises(WireError):
            peer.frame()
        assert "canary" in pair.received[0].wait(ReceiveFailed)[0].error.message
        peer.wire.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("codec", ["raw", "int8", "fp8"])
def test_the_block_is_exact_under_every_codec(dtype: str, codec: str) -> None:
    nonce = os.urandom(16)
    payload = canary_payload(nonce, 64, dtype, codec)
    assert canary_fault(payload, nonce, 64, dtype, codec) == ""
    assert canary_fault(payload, os.urandom(16), 64, dtype, codec)
    for at in range(0, payload.numel(), 97):
        wrong = payload.clone()
        wrong[at] ^= 1
        assert canary_fault(wrong, nonce, 64, dtype, codec), at


def test_nothing_is_taken_before_a_good_canary() -> None:
    with rig(SHAPE, SHAPE, QUICK) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        peer = RawPeer(pair, ticket, canary=False)
        peer.open(ticket)
        with pytest.raises(WireError):
            peer.wire.receive()
        peer.wire.close()

        peer = RawPeer(pair, ticket, canary=False)
        peer.wire.send("canary", carrier="inline", dtype="bfloat16", codec="raw", bytes=768)
        answer = peer.wire.receive()
        assert isinstance(answer, dict)
        assert "768 bytes of bfloat16" in answer["reason"]
        peer.wire.close()
        assert pair.targets[0].writes == 0
        pair.senders[0].open(LEG, ticket.pack(), pair.source_blocks(PROMPT), PROMPT)
        pair.computed(LEG, (0, PROMPT), (0, 4))
        pair.senders[0].finish(LEG, b"first")
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)


def test_the_canary_speaks_the_links_codec() -> None:
    shape = layout([(0, 2)])
    with rig(shape, shape, replace(PARAMS, wire="int8")) as pair:
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
