"""KV-15: few announcements however much there is to move, and little that is left to send at the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from baton.kv_transfer.events import Sent
from baton.kv_transfer.frames import MAX_PARCEL_BYTES, MAX_PARCEL_FRAMES, TRAILER_BYTES
from baton.kv_transfer.handoff import Coverage, SendLeg
from baton.kv_transfer.plan import Box
from baton.kv_transfer.send_leg import LegPart, SendingLeg, frame_target, worth_cells
from baton.kv_transfer.wire import Wire
from baton.tests.harness.kv_rig import LEG, PARAMS, heads_of, layout, rig

FRAME = 4 << 20
SMOL, LLAMA = (30, 3, 64), (32, 8, 128)
AROUND = 3  # open, done, done


def _part(layers: int, heads: int, dim: int, tokens: int) -> LegPart:
    leg = SendingLeg(LEG, (), (0, tokens), SendLeg([0]))
    due = tokens * layers * heads
    frame = frame_target(due, 4 * dim, FRAME)
    return LegPart(leg, 0, ((0, heads),), due, True, frame_bytes=frame, worth=worth_cells(due, 4 * dim, frame))


def _drained(part: LegPart, dim: int) -> list[list[Box]]:
    taken = []
    while part.ready:
        taken.append(part.take_parcel(4 * dim, part.frame_bytes))
    return taken


def _pushed(shape: tuple[int, int, int], tokens: int, chunk: int, group: int, cached: int) -> list[list[list[Box]]]:
    """What is announced after each push of the engine, were the link at leisure."""
    layers, heads, dim = shape
    part = _part(layers, heads, dim, tokens)
    steps = []
    if cached:
        part.queue((0, cached), (0, layers))
        steps.append(_drained(part, dim))
    for start in range(cached, tokens, chunk):
        for layer in range(0, layers, group):
            part.queue((start, min(start + chunk, tokens)), (layer, min(layer + group, layers)))
            steps.append(_drained(part, dim))
    assert part.queued == part.due
    return steps


@pytest.mark.parametrize("shape", [SMOL, LLAMA], ids=["SmolLM2", "Llama-3-8B"])
@pytest.mark.parametrize("tokens", [256, 300, 1024, 4096, 16384])
@pytest.mark.parametrize(("chunk", "group", "cached"), [(512, 4, 0), (256, 1, 0), (1 << 20, 4, 0), (512, 4, 240)])
def test_kv_15_a_hundred_messages_are_enough(
    shape: tuple[int, int, int], tokens: int, chunk: int, group: int, cached: int
) -> None:
    """Each parcel: announcement, acceptance, payload, acknowledgement."""
    layers, heads, dim = shape
    steps = _pushed(shape, tokens, chunk, group, cached)
    parcels = [parcel for step in steps for parcel in step]
    assert 4 * len(parcels) + AROUND <= 100
    coverage = Coverage(Box((0, tokens), (0, layers), (0, heads)))
    for parcel in parcels:
        sizes = [box.volume * 4 * dim for box in parcel]
        assert len(parcel) <= MAX_PARCEL_FRAMES
        assert sum(sizes) + len(sizes) * TRAILER_BYTES <= MAX_PARCEL_BYTES
        assert max(sizes) <= 1.25 * FRAME
        for box in parcel:
            assert not coverage.problem(box)
            coverage.add(box)
    assert coverage.complete


@pytest.mark.parametrize(("chunk", "group"), [(512, 4), (256, 1), (1 << 20, 4)])
@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
def test_only_the_last_push_is_left_when_all_is_computed(tokens: int, chunk: int, group: int) -> None:
    heads = SMOL[1]
    steps = _pushed(SMOL, tokens, chunk, group, 0)
    last = sum(box.volume for parcel in steps[-1] for box in parcel)
    final_chunk = tokens - (tokens - 1) // chunk * chunk
    assert last <= final_chunk * heads * group


@pytest.mark.parametrize("transport", ["inline", "gloo", "shm"])
def test_kv_15_messages_on_a_real_link(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 pushes of 4 KiB; canary and carrier are older than the count."""
    counted: list[str] = []

    def counting(name: str) -> None:
        original = getattr(Wire, name)

        def call(self: Wire, *arguments: Any, **fields: Any) -> Any:
            counted.append(name)
            return original(self, *arguments, **fields)

        monkeypatch.setattr(Wire, name, call)

    shape = layout(heads_of(2, 1), layers=32, head_dim=16)
    with rig(shape, shape, replace(PARAMS, transport=transport, frame_bytes=4096), tokens=256) as pair:
        pair.send(("first", 1, 0), 8)
        pair.sent[0].wait(Sent)
        for name in ("send", "begin_payload"):
            counting(name)
        pair.send(LEG, 256, chunk=16, group=1)
        pair.sent[0].wait(Sent, 2)
        pair.assert_equal(256)
    assert 8 < len(counted) <= 100


@pytest.mark.parametrize("shape", [SMOL, LLAMA], ids=["SmolLM2", "Llama-3-8B"])
@pytest.mark.parametrize(("tokens", "chunk", "group", "cached"), [(1024, 512, 4, 0), (300, 256, 1, 16), (64, 64, 2, 0)])
def test_the_last_push_is_announced_before_it_is_computed(
    shape: tuple[int, int, int], tokens: int, chunk: int, group: int, cached: int
) -> None:
    layers, heads, dim = shape
    part = _part(layers, heads, dim, tokens - cached)
    part.leg.needed = (cached, tokens)
    coverage = Coverage(Box((cached, tokens), (0, layers), (0, heads)))
    promised: list[Box] = []
    for start in range(cached, tokens, chunk):
        for layer in range(0, layers, group):
            part.queue((start, min(start + chunk, tokens)), (layer, min(layer + group, layers)))
            for box in (box for parcel in _drained(part, dim) for box in parcel):
                assert not promised, "nothing is left but what was promised"
                coverage.add(box)
            if part.promising:
                assert part.computing
                promised = part.promise(4 * dim, part.frame_bytes)
                assert part.last_taken
    last = layers % group or group
    assert sum(box.volume for box in promised) == (tokens - 1 - cached) % chunk * heads * last + heads * last
    for box in promised:
        assert not coverage.problem(box)
        coverage.add(box)
    assert coverage.complete
    assert not part.computing


def test_what_was_promised_and_is_not_expected_yet_waits_for_both() -> None:
    part = _part(4, 1, 8, 16)
    part.queue((0, 16), (0, 2))
    assert _drained(part, 8)
    boxes = part.promise(32, part.frame_bytes)
    part.held = True
    part.cut.extend(boxes)  # the decode rank said `later`
    part.held = False
    assert not _drained(part, 8)
    assert not part.promising
    part.queue((0, 16), (2, 4))
    assert _drained(part, 8) == [boxes]
