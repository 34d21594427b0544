"""A prefill rank by hand: says on the wire exactly what a test tells it to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baton.kv_transfer.canary import send_canary
from baton.kv_transfer.carrier_build import build_carrier
from baton.kv_transfer.carriers import Carrier, InlineCarrier
from baton.kv_transfer.frames import Frame, Parcel, trailer
from baton.kv_transfer.plan import Box
from baton.kv_transfer.ticket import Ticket
from baton.kv_transfer.wire import VERSION, Wire
from baton.tests.harness.kv_rig import LEG, PARAMS, Rig, layout

SHAPE = layout([(0, 2)])
PROMPT = 8
QUICK = replace(PARAMS, frame_timeout_s=0.5, connect_timeout_s=0.5)


def hello_fields(ticket: Ticket) -> dict[str, Any]:
    """A right hello."""
    return {
        "version": VERSION,
        "ticket": ticket.pack(),
        "layout": SHAPE.pack(),
        "rank": 0,
        "incarnation": "one",
        "carrier": "inline",
        "place": ["elsewhere", "cpu"],
        "codec": "raw",
        "checksum": True,
    }


class RawPeer:
    """A prefill rank by hand."""

    def __init__(self, pair: Rig, genuine: Ticket, *, canary: bool = True, **hello: Any) -> None:
        self.wire = Wire.connect(pair.receivers[0].address, 2.0)
        self.wire.send("hello", **{**hello_fields(genuine), **hello})
        self.answer = self.wire.receive()
        self.sequence = 0
        if isinstance(self.answer, dict) and self.answer["kind"] == "welcome" and canary:
            what = (self.answer["canary"], SHAPE.head_dim, SHAPE.dtype, hello.get("codec", "raw"))
            self.carrier: Carrier = InlineCarrier(self.wire)
            if (agreed := self.answer["carrier"]) != "inline":
                self.carrier, reason = build_carrier(agreed, self.wire, 0, pair.receivers[0].params)
                assert reason == ""
            assert send_canary(self.wire, self.carrier, *what) == ""

    def open(self, ticket: Ticket) -> None:
        self.wire.send("open", leg=ticket.leg, ticket=ticket.pack())

    def frame(self, payload: bytes | None = None, sealed: bytes | None = None, **changed: Any) -> Any:
        """Announce a frame (a right one where nothing is changed), send its payload if accepted; the last answer."""
        parcel = one_frame(self.sequence, **changed)
        self.sequence += 1
        content = bytes(parcel.frames[0].bytes % (1 << 20)) if payload is None else payload
        return self.parcel(parcel, [content], None if sealed is None else [sealed])

    def parcel(self, parcel: Parcel, contents: Sequence[bytes], sealed: Sequence[bytes] | None = None) -> Any:
        """Announce frames, send their payload if accepted; the last answer."""
        self.wire.send("frames", **parcel.pack())
        answer = self.wire.receive()
        if isinstance(answer, dict) and answer["kind"] == "accept":
            send_payload(self.wire, as_sent(parcel, contents, sealed))
            answer = self.wire.receive()
        return answer


def one_frame(sequence: int, **changed: Any) -> Parcel:
    """The first half of the prompt of LEG, or whatever the changed fields of frame and parcel make of it."""
    ranges = {"tokens": (0, 4), "layers": (0, 4), "heads": (0, 2)}
    box = Box(**{name: changed.pop(name, value) for name, value in ranges.items()})
    frame = Frame(box, changed.pop("bytes", 4 * 2 * 2 * 4 * 8 * 4))
    return replace(Parcel(*LEG, sequence, "float32", "raw", True, [frame]), **changed)


def as_sent(parcel: Parcel, contents: Sequence[bytes], sealed: Sequence[bytes] | None = None) -> bytes:
    """The payload of a parcel. sealed: what its checksums are for, where that is not what is sent."""
    payload, seed = b"", parcel.seed()
    for number, (frame, content) in enumerate(zip(parcel.frames, contents, strict=True)):
        summed = memoryview(content if sealed is None else sealed[number])
        payload += content + trailer(seed, parcel.sequence + number, frame, summed if parcel.checked else None)
    return payload


def send_payload(wire: Wire, payload: bytes) -> None:
    """A payload message."""
    wire.begin_payload(len(payload))
    wire.send_bytes(memoryview(payload))
