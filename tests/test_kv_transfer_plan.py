"""Who sends what (pure), against a naive copy of heads and tokens."""

from __future__ import annotations

import pytest
import torch
from baton.kv_transfer.compat import differences
from baton.kv_transfer.handoff import SendLeg
from baton.kv_transfer.plan import Box, length, pieces, shares, split
from baton.kv_transfer.send_leg import LegPart, SendingLeg
from baton.proto.kv_layout import block_count
from baton.tests.harness.kv_rig import TensorStore, heads_of, layout
from hypothesis import given, settings
from hypothesis import strategies as st


@given(kv_heads=st.integers(1, 8), prefill=st.integers(1, 8), decode=st.integers(1, 8))
def test_every_decode_rank_gets_each_of_its_heads_once(kv_heads: int, prefill: int, decode: int) -> None:
    sources, targets = heads_of(kv_heads, prefill), heads_of(kv_heads, decode)
    plan = shares(sources, targets, kv_heads)
    for target, span in enumerate(targets):
        got = [
            head
            for (_, rank), ranges in sorted(plan.items())
            if rank == target
            for low, high in ranges
            for head in range(low, high)
        ]
        assert sorted(got) == list(range(*span))
    for (source, _), ranges in plan.items():
        assert all(sources[source][0] <= low < high <= sources[source][1] for low, high in ranges)


def test_replicas_share_the_work() -> None:
    assert shares([(0, 1)] * 4, [(0, 1)] * 4, 1) == {(rank, rank): ((0, 1),) for rank in range(4)}


def test_heads_that_nobody_holds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv heads \[1\]"):
        shares([(0, 1)], [(0, 2)], 2)
    with pytest.raises(ValueError, match="decode rank 0"):
        shares([(0, 2)], [(0, 3), (0, 2)], 2)


@given(
    tokens=st.integers(1, 300),
    layers=st.integers(1, 40),
    heads=st.integers(1, 4),
    cell=st.sampled_from([64, 256, 1024]),
    target=st.sampled_from([1, 4096, 1 << 19]),
)
def test_pieces_make_up_the_box_and_are_not_much_too_large(
    tokens: int, layers: int, heads: int, cell: int, target: int
) -> None:
    box = Box((5, 5 + tokens), (2, 2 + layers), (1, 1 + heads))
    parts = pieces(box, cell, target)
    assert sum(part.volume for part in parts) == box.volume
    for index, part in enumerate(parts):
        assert part.volume > 0
        assert not any(part.overlaps(other) for other in parts[index + 1 : index + 20])
    if len(parts) > 1:
        least = target / 4 - heads * cell if tokens * heads * cell > target else 0
        assert all(least <= part.volume * cell <= max(1.25 * target, heads * cell) for part in parts)
        assert len(parts) <= max(2 * -(-box.volume * cell // target), layers)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 12))
def test_split_is_even(start: int, size: int, count: int) -> None:
    parts = split((start, start + size), count)
    assert [edge for part in parts for edge in range(*part)] == list(range(start, start + size))
    assert not parts or max(map(length, parts)) - min(map(length, parts)) <= 1


@settings(max_examples=60)
@given(st.data())
def test_gather_cut_and_scatter_equal_a_naive_copy(data: st.DataObject) -> None:
    """TP {1..4} x {1..4}, kv heads {1..4}, block sizes and chunks at random: what each decode rank ends up with."""
    kv_heads, prefill_tp, decode_tp = (data.draw(st.integers(1, 4)) for _ in range(3))
    prompt, chunk, group = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    cached = data.draw(st.integers(0, prompt))
    frame_bytes = data.draw(st.sampled_from([1, 700, 5000, 1 << 20]))
    prefill = layout(heads_of(kv_heads, prefill_tp), kv_heads=kv_heads, block_size=data.draw(st.integers(1, 8)))
    decode = layout(heads_of(kv_heads, decode_tp), kv_heads=kv_heads, block_size=data.draw(st.integers(1, 8)))
    whole = 1 + torch.rand(prefill.layers, 2, prompt, kv_heads, prefill.head_dim)
    blocks = {side.block_size: list(range(block_count(prompt, side.block_size))) for side in (prefill, decode)}
    plan = shares(prefill.head_ranges, decode.head_ranges, kv_heads)
    targets = [TensorStore(decode, rank, len(blocks[decode.block_size])) for rank in range(decode_tp)]
    for source, held in enumerate(prefill.head_ranges):
        store = TensorStore(prefill, source, len(blocks[prefill.block_size]))
        values = whole[:, :, :, held[0] : held[1]].transpose(2, 3)
        store.scatter(blocks[prefill.block_size], (0, prefill.layers), (0, length(held)), (0, prompt), values)
        for target, own in enumerate(decode.head_ranges):
            leg = SendingLeg(("r", 1, 0), (), (cached, prompt), SendLeg([target]))
            part = LegPart(leg, target, plan.get((source, target), ()), due=0, wants_first_tokens=False)
            for start in range(0, prompt, chunk):
                for layer in range(0, prefill.layers, group):
                    part.queue((start, min(start + chunk, prompt)), (layer, min(layer + group, prefill.layers)))
            while part.ready:
                box = part.take(2 * prefill.head_dim * 4, frame_bytes)
                here = (box.heads[0] - held[0], box.heads[1] - held[0])
                there = (box.heads[0] - own[0], box.heads[1] - own[0])
                payload = store.gather(blocks[prefill.block_size], box.layers, here, box.tokens)
                targets[target].scatter(blocks[decode.block_size], box.layers, there, box.tokens, payload)
    for (low, high), store in zip(decode.head_ranges, targets, strict=True):
        if cached < prompt:
            got = store.gather(blocks[decode.block_size], (0, decode.layers), (0, high - low), (cached, prompt))
            assert torch.equal(got, whole[:, :, cached:, low:high].transpose(2, 3))
        cells = (prompt - cached) * decode.layers * 2 * decode.head_dim * (high - low)
        assert int((store.data != 0).sum()) == cells


def test_kv_03_what_converts_and_what_does_not() -> None:
    one = layout([(0, 3)])
    assert differences(one, layout([(0, 1), (1, 3)], block_size=16)) == []
    assert differences(one, layout([(0, 3)], dtype="float16")) == []
    assert differences(one, layout([(0, 3)], head_dim=7, layers=9)) == [
        "layers: prefill has 4, decode has 9",
        "head_dim: prefill has 8, decode has 7",
    ]
    assert differences(one, layout([(0, 3)], dtype="int4")) == [
        "decode: dtype is 'int4', not one of float32, bfloat16, float16, int8, fp8"
    ]
    assert differences(one, layout([(0, 1), (2, 3)])) == ["decode: 2 ranks hold 2 of 3 kv heads"]
