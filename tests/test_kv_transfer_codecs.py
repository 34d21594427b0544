"""Conversions through real senders, sockets and receivers: dtypes, codecs, what both ends must agree on, and faults."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from baton.kv_transfer.codec import encode, wire_bytes
from baton.kv_transfer.events import RankComplete, ReceiveFailed, SendFailed, Sent
from baton.kv_transfer.params import Codec
from baton.kv_transfer.plan import Box
from baton.proto.errors import Incompatible, InternalError
from baton.tests.harness.kv_convert import naive, same_bits
from baton.tests.harness.kv_raw_peer import PROMPT, QUICK, SHAPE, RawPeer
from baton.tests.harness.kv_rig import LEG, PARAMS, Rig, heads_of, layout, rig

Transport = Literal["inline", "shm", "gloo"]
PROMPT_TOKENS, CACHED = 27, 6


def _arrived(pair: Rig, codec: str, row_bytes: int) -> None:
    """Every decode rank holds the converted heads; both ends counted the analytic bytes."""
    for events in (*pair.sent, *pair.received):
        events.wait(Sent if events in pair.sent else RankComplete)
    span = (CACHED, PROMPT_TOKENS)
    for head in range(pair.prefill.kv_heads):
        source = pair.sequence("prefill", head, pair.source_blocks(PROMPT_TOKENS), span)[0]
        for got in pair.sequence("decode", head, pair.target_blocks(PROMPT_TOKENS), span):
            assert same_bits(got, naive(source, codec, pair.decode.dtype))
    held = [high - low for low, high in pair.decode.head_ranges]
    per_head = (PROMPT_TOKENS - CACHED) * pair.decode.layers * 2 * row_bytes
    assert [events.of(RankComplete)[0].bytes for events in pair.received] == [heads * per_head for heads in held]
    assert sum(events.of(Sent)[0].bytes for events in pair.sent) == sum(held) * per_head


@pytest.mark.parametrize(
    ("tp", "kv_heads", "dtypes", "codec", "transport", "row_bytes"),
    [
        ((1, 1), 2, ("float32", "bfloat16"), "raw", "inline", 16),
        ((2, 3), 3, ("bfloat16", "float32"), "raw", "inline", 16),
        ((1, 2), 1, ("bfloat16", "float16"), "raw", "inline", 16),
        ((3, 2), 3, ("float16", "bfloat16"), "int8", "inline", 12),
        ((2, 4), 2, ("float32", "float32"), "int8", "inline", 12),
        ((4, 1), 2, ("bfloat16", "bfloat16"), "fp8", "inline", 12),
        ((1, 2), 3, ("bfloat16", "float32"), "fp8", "gloo", 12),
        ((2, 1), 3, ("float32", "float16"), "raw", "gloo", 16),
        ((2, 3), 3, ("int8", "int8"), "raw", "inline", 12),
        ((1, 2), 3, ("bfloat16", "fp8"), "raw", "shm", 12),
        ((2, 1), 3, ("fp8", "bfloat16"), "raw", "gloo", 12),
    ],
)
def test_kv_01_kv_04_converted_on_the_way(
    tp: tuple[int, int], kv_heads: int, dtypes: tuple[str, str], codec: Codec, transport: Transport, row_bytes: int
) -> None:
    prefill, decode = (
        layout(heads_of(kv_heads, ranks), kv_heads=kv_heads, dtype=dtype, block_size=size)
        for ranks, dtype, size in zip(tp, dtypes, (4, 16), strict=True)
    )
    params = replace(PARAMS, wire=codec, transport=transport, frame_bytes=700)
    with rig(prefill, decode, params) as pair:
        pair.send(LEG, PROMPT_TOKENS, chunk=8, group=3, cached=CACHED)
        _arrived(pair, codec, row_bytes)


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8"])
@pytest.mark.parametrize("transport", ["inline", "shm", "gloo"])
def test_frames_of_any_size_share_a_payload(codec: Codec, transport: Transport) -> None:
    """Rows of 5 values: a frame's size is no multiple of anything, and the next one's scales must still be aligned."""
    prefill = layout(heads_of(3, 2), head_dim=5, dtype="bfloat16")
    decode = layout([(0, 2), (2, 3)], head_dim=5, dtype="float32", block_size=16)
    params = replace(PARAMS, wire=codec, transport=transport, frame_bytes=211)
    with rig(prefill, decode, params) as pair:
        pair.send(LEG, PROMPT_TOKENS, chunk=7, group=1, cached=CACHED)
        _arrived(pair, codec, 10 if codec == "raw" else 9)


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.permutations(["raw", "fp8", "int8"], 2)))
def test_kv_03_the_ends_must_have_the_same_codec(prefill: Codec, decode: Codec) -> None:
    with rig(SHAPE, SHAPE, replace(QUICK, wire=prefill), decode_params=replace(QUICK, wire=decode)) as pair:
        pair.send(LEG, PROMPT)
        [failure] = pair.sent[0].wait(SendFailed)
        assert isinstance(failure.error, Incompatible)
        assert f"kv.wire: prefill has '{prefill}', decode has '{decode}'" in failure.error.message
        assert pair.targets[0].writes == 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_kv_04_a_quantised_pool_takes_the_raw_wire_only(codec: Codec, side: str) -> None:
    shapes = [replace(SHAPE, dtype="int8") if name == side else SHAPE for name in ("prefill", "decode")]
    with rig(shapes[0], shapes[1], replace(QUICK, wire=codec)) as pair:
        pair.send(LEG, PROMPT)
        [failure] = pair.sent[0].wait(SendFailed)
        assert isinstance(failure.error, Incompatible)
        assert f"kv.wire: '{codec}' with a pool of int8, which is as small already; use 'raw'" in failure.error.message
        assert pair.targets[0].writes == 0


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_kv_04_what_a_codec_cannot_express_fails_the_leg_and_no_other(codec: Codec, value: float) -> None:
    with rig(SHAPE, SHAPE, replace(PARAMS, wire=codec)) as pair:
        spoiled = pair.source_blocks(8)[1]
        pair.sources[0].data[2, 1, spoiled, 1, 3, 5] = value
        pair.send(LEG, 8)
        [failure] = pair.sent[0].wait(SendFailed)
        assert isinstance(failure.error, InternalError)
        assert f"a value is not finite, which {codec} cannot express" in failure.error.message
        pair.received[0].wait(ReceiveFailed)
        other = ("other", 1, 0)
        pair.sources[0].data[2, 1, spoiled, 1, 3, 5] = 1.0
        pair.send(other, 8)
        assert pair.sent[0].wait(Sent)[0].leg == other
        assert pair.received[0].wait(RankComplete)[0].leg == other


def _payload(codec: Codec) -> bytearray:
    """A right payload of the raw peer's frame: 4 tokens, 4 layers, 2 heads of 8."""
    values = torch.randn(4, 2, 2, 4, 8)
    payload = torch.empty(wire_bytes(Box((0, 4), (0, 4), (0, 2)), 8, "float32", codec), dtype=torch.uint8)
    encode(values, payload, "float32", codec)
    return bytearray(bytes(payload.tolist()))


@pytest.mark.parametrize(
    ("codec", "at", "damage", "reason"),
    [
        ("int8", 0, bytes.fromhex("0000c07f"), "a scale is not a positive finite number"),  # NaN
        ("fp8", 12, bytes.fromhex("00000080"), "a scale is not a positive finite number"),  # -0.0
        ("fp8", 4 * 64 + 9, b"\xff", "a code is not a number"),
    ],
)
def test_kv_11_wrong_bytes_under_a_right_checksum_are_not_placed(
    codec: Codec, at: int, damage: bytes, reason: str
) -> None:
    with rig(SHAPE, SHAPE, replace(QUICK, wire=codec)) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        peer = RawPeer(pair, ticket, codec=codec)
        peer.open(ticket)
        payload = _payload(codec)
        payload[at : at + len(damage)] = damage
        answer = peer.frame(bytes(payload), codec=codec, bytes=len(payload))
        assert answer["kind"] == "refuse"
        assert reason in answer["message"]
        pair.received[0].wait(ReceiveFailed)
        assert pair.targets[0].writes == 0
        peer.wire.close()


@pytest.mark.parametrize("change", [{"codec": "raw"}, {"dtype": "bfloat16"}, {"bytes": 4 * 2 * 2 * 4 * 12 + 1}])
def test_kv_11_a_frame_in_another_codec_than_agreed_is_refused(change: dict[str, Any]) -> None:
    with rig(SHAPE, SHAPE, replace(QUICK, wire="int8")) as pair:
        ticket = pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT))
        peer = RawPeer(pair, ticket, codec="int8")
        peer.open(ticket)
        payload = _payload("int8")
        answer = peer.frame(bytes(payload), **{"codec": "int8", "bytes": len(payload), **change})
        assert answer["kind"] == "refuse"
        assert pair.targets[0].writes == 0
        peer.wire.close()
