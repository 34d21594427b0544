"""A prefill rank by hand: says on the wire exactly what a test tells it to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.kv_transfer.canary import send_canary
from baton.kv_transfer.carrier_build import build_carrier
from baton.kv_transfer.carriers import Carrier, InlineCarrier
from baton.kv_transfer.frames import FrameHeader, checksum
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
        base = FrameHeader(
            *LEG, self.sequence, (0, 4), (0, 4), (0, 2), "float32", "raw", 4 * 2 * 2 * 4 * 8 * 4, True, 0
        )
        header = replace(base, **changed)
        self.sequence += 1
        content = bytes(header.bytes % (1 << 20)) if payload is None else payload
        header = replace(header, checksum=checksum(header, memoryview(content if sealed is None else sealed)))
        self.wire.send("frame", header=header.pack())
        answer = self.wire.receive()
        if isinstance(answer, dict) and answer["kind"] == "accept":
            self.wire.send_payload(memoryview(content))
            answer = self.wire.receive()
        return answer
