"""A hostile prefill rank that goes on for as long as a test wants: every message of it is wrong in another way.

Some frames in between are right, so that there is something to overwrite; `shadow` holds what only those wrote.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import torch
from baton.kv_transfer.events import LegKey
from baton.kv_transfer.frames import MAX_FRAME_BYTES, TRAILER_BYTES, Frame, Parcel
from baton.kv_transfer.plan import Box
from baton.kv_transfer.topology import place_here
from baton.kv_transfer.wire import PREFIX_BYTES, WireError, packed
from baton.tests.harness.kv_raw_peer import PROMPT, SHAPE, RawPeer, as_sent, send_payload
from baton.tests.harness.kv_rig import Rig

_HALF = PROMPT // 2  # tokens of one frame, a block
_FRAME_BYTES = SHAPE.layers * 2 * 2 * _HALF * SHAPE.head_dim * 4


PICKLE_LEAVES = os.path.join(tempfile.gettempdir(), f"pickle-was-loaded-{os.getpid()}")


class _Canary:
    """Tells when somebody unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (PICKLE_LEAVES,))


class Fuzzer:
    """`run(count)` sends so many wrong things; `counts` says what of each kind, `placed` how many right ones."""

    def __init__(self, pair: Rig, seed: int, carrier: str) -> None:
        self.counts: dict[str, int] = {}
        self.placed = 0
        self.shadow = pair.targets[0].data.clone()
        self._pair = pair
        self._carrier = carrier
        self._chance = random.Random(seed)
        self._legs = 0
        self._peer: RawPeer | None = None
        self._leg: LegKey = ("", 0, 0)
        self._blocks: list[int] = []
        self._half_done = False
        self._kinds: list[Callable[[], None]] = [
            self._random_bytes,
            self._before_any_hello,
            self._flipped_bit_of_a_message,
            self._flipped_header,
            self._flipped_header,
            self._wrong_field,
            self._wrong_field,
            self._damaged_payload,
            self._damaged_payload,
            self._exchanged,
            self._exchanged,
            self._cut_short,
            self._oversized,
            self._pickle,
            self._replayed,
            self._placed_twice,
            self._nonsense_message,
            self._another_leg,
            self._damaged_parcel,
            self._damaged_parcel,
            self._wrong_parcel,
        ]

    def run(self, count: int) -> None:
        """Raises AssertionError as soon as anything wrong was placed."""
        for number in range(count):
            kind = self._chance.choice(self._kinds)
            self.counts[kind.__name__] = self.counts.get(kind.__name__, 0) + 1
            try:
                self._ready()
                if not self._half_done and self._chance.random() < 0.1:
                    self._right_frame()
                kind()
            except WireError:
                self._hang_up()
            assert self._pair.targets[0].writes == self.placed, f"{kind.__name__} was placed"
            if number % 100 == 0:
                self.compare()
        self.compare()
        self._hang_up()
        self._pair.receivers[0].forget(self._leg)

    def compare(self) -> None:
        """The pool holds what right frames wrote, bit for bit."""
        data = self._pair.targets[0].data
        assert torch.equal(data.view(torch.int32), self.shadow.view(torch.int32))

    # ---- the honest part ----------------------------------------------------------------------------------------

    def _ready(self) -> None:
        """A link with an open leg on it."""
        if self._peer is None or self._pair.receivers[0].known_leg(self._leg) is None or not self._open():
            self._renew()

    def _open(self) -> bool:
        leg = self._pair.receivers[0].known_leg(self._leg)
        return leg is not None and leg.handoff.open

    def _renew(self) -> None:
        receiver = self._pair.receivers[0]
        receiver.forget(self._leg)
        self._legs += 1
        self._leg = (f"fuzz{self._legs}", 1, 0)
        self._blocks = self._chance.sample(range(16), 2)
        self._half_done = False
        ticket = self._pair.reserve(self._leg, PROMPT, 0, self._blocks)
        if self._peer is None:
            place = place_here("cpu").pack()
            self._peer = RawPeer(self._pair, ticket, carrier=self._carrier, place=place)
            assert self._peer.carrier.name == self._carrier
            self._peer.wire.limit_s = 30.0
        self._peer.open(ticket)

    @property
    def _wire(self) -> Any:
        assert self._peer is not None
        return self._peer.wire

    def _hang_up(self) -> None:
        if self._peer is not None:
            self._peer.carrier.close()
            self._peer.wire.close()
        self._peer = None

    def _frame(self, tokens: tuple[int, int] | None = None, **changed: Any) -> Frame:
        """The next one that is missing, or whatever the changed fields make of it."""
        if tokens is None:
            tokens = (_HALF, PROMPT) if self._half_done else (0, _HALF)
        box = Box(tokens, changed.pop("layers", (0, SHAPE.layers)), changed.pop("heads", (0, 2)))
        return Frame(box, changed.pop("bytes", _FRAME_BYTES))

    def _parcel(self, *frames: Frame, **changed: Any) -> Parcel:
        assert self._peer is not None
        whole = Parcel(*self._leg, self._peer.sequence, SHAPE.dtype, "raw", True, frames or [self._frame()])
        return replace(whole, **changed)

    def _content(self) -> bytes:
        return self._chance.randbytes(_FRAME_BYTES)

    def _right_frame(self) -> None:
        content = torch.randn(SHAPE.layers, 2, 2, _HALF, SHAPE.head_dim)
        assert self._announce(self._parcel(), [content.numpy().tobytes()]) == ["ack"]
        self.placed += 1
        self.shadow[:, :, self._blocks[0]] = content
        self._half_done = True

    def _announce(self, parcel: Parcel, contents: list[bytes], sealed: list[bytes] | None = None) -> list[str]:
        """Frames and their payload, with checksums for `sealed`; the kinds of all answers but `accept`.

        Raises WireError.
        """
        return self._deliver(packed("frames", **parcel.pack()), as_sent(parcel, contents, sealed), len(parcel.frames))

    def _deliver(self, raw: bytes, payload: bytes, frames: int = 1) -> list[str]:
        return [kind for kind in self._say(raw, payload, frames) if kind != "accept"]

    def _bring(self, payload: bytes, frames: int) -> None:
        """Send a payload that was accepted, through the carrier: frames of one size, each with its trailer."""
        assert self._peer is not None
        carrier = self._peer.carrier
        if carrier.name == "inline":
            send_payload(self._wire, payload)
            return
        size = len(payload) // frames
        for start in range(0, len(payload), size):
            part = torch.frombuffer(bytearray(payload[start : start + size]), dtype=torch.uint8)
            carrier.send(carrier.buffer(part.numel()).copy_(part))

    def _say(self, raw: bytes, payload: bytes = b"", frames: int = 1) -> list[str]:
        """Send bytes that keep the framing, and the payload if the frame is accepted; the kinds of all answers.

        Raises WireError when the link ended.
        """
        assert self._peer is not None
        self._peer.sequence += frames
        self._wire._socket.sendall(raw + packed("beat"))
        kinds: list[str] = []
        brought = False
        while True:
            answer = self._wire.receive()
            assert isinstance(answer, dict)
            if answer["kind"] == "beat":
                if kinds[-1:] != ["accept"]:
                    return kinds
                if not brought:
                    self._bring(payload, frames)
                    brought = True
                self._wire._socket.sendall(packed("beat"))  # it may pass frames on their way: till there is an answer
            else:
                kinds.append(answer["kind"])

    def _say_all(self, raw: bytes) -> None:
        """Send bytes that may break the framing, and no more; the link is over after that."""
        connection: socket.socket = self._wire._socket
        _last_words(connection, raw)
        self._hang_up()

    # ---- what is wrong ------------------------------------------------------------------------------------------

    def _random_bytes(self) -> None:
        self._say_all(self._chance.randbytes(self._chance.randrange(1, 300)))

    def _before_any_hello(self) -> None:
        host, port = self._pair.receivers[0].address.split(":")
        with socket.create_connection((host, int(port)), 30) as connection:
            hello = packed("hello", version=1, ticket=self._chance.randbytes(99), incarnation="one")
            wrong = self._chance.choice([self._chance.randbytes(40), self._flipped(hello), hello, hello[:-3]])
            _last_words(connection, wrong)

    def _flipped(self, data: bytes, start: int = 0) -> bytes:
        changed = bytearray(data)
        changed[self._chance.randrange(start, len(data))] ^= 1 << self._chance.randrange(8)
        return bytes(changed)

    def _flipped_bit_of_a_message(self) -> None:
        content, parcel = self._content(), self._parcel()
        raw = packed("frames", **parcel.pack())
        self._say_all(self._flipped(raw) + as_sent(parcel, [content]))

    def _flipped_header(self) -> None:
        """Somewhere behind the prefix, so that the framing holds."""
        content, parcel = self._content(), self._parcel()
        raw = self._flipped(packed("frames", **parcel.pack()), PREFIX_BYTES)
        assert "ack" not in self._deliver(raw, as_sent(parcel, [content]))

    def _wrong_field(self) -> None:
        """One field of the announcement has another value of any type; the checksum is right for it if there is one."""
        values: tuple[Any, ...] = (None, -1, 0, 1, 3, 1 << 31, (1 << 64) - 1, "", "fp8", "float16", b"x", [], {}, 0.5)
        more: tuple[Any, ...] = ([0, 1], [0, "1"], [-1, 3], True, False, 7, 9, _FRAME_BYTES - 1, _FRAME_BYTES // 2)
        content, parcel = self._content(), self._parcel()
        fields = parcel.pack()
        name = self._chance.choice(["header", "frames"])
        target = fields[name] if name == "header" else fields[name][0]
        at = self._chance.randrange(len(target))
        changed = self._chance.choice([*values, *more])
        if type(changed) is type(target[at]) and changed == target[at]:
            changed = "nothing"
        target[at] = changed
        with contextlib.suppress(ValueError):
            parcel = Parcel.unpack(msgpack.unpackb(msgpack.packb(fields)))
        assert "ack" not in self._deliver(packed("frames", **fields), as_sent(parcel, [content]))

    def _damaged_payload(self) -> None:
        """A bit of the bytes, or of what follows them."""
        content, parcel = self._content(), self._parcel()
        whole = as_sent(parcel, [content])
        damaged = self._chance.choice([self._flipped(whole), self._flipped(whole, _FRAME_BYTES)])
        while damaged[_FRAME_BYTES + 1 : _FRAME_BYTES + 8] != bytes(7):  # nobody looks at these
            damaged = self._flipped(whole)
        assert self._deliver(packed("frames", **parcel.pack()), damaged) == ["refuse"]

    def _exchanged(self) -> None:
        """Blocks of tokens, K and V, heads or layers exchanged: the same bytes elsewhere."""
        shape = (SHAPE.layers, 2, 2, _HALF, SHAPE.head_dim)
        content = self._content()
        block = torch.frombuffer(bytearray(content), dtype=torch.int32).view(shape)
        wrong = block.flip(self._chance.randrange(4)).contiguous().numpy().tobytes()
        assert self._announce(self._parcel(), [wrong], [content]) == ["refuse"]

    def _cut_short(self) -> None:
        parcel = self._parcel()
        raw = packed("frames", **parcel.pack()) + as_sent(parcel, [self._content()])
        self._say_all(raw[: self._chance.randrange(1, len(raw))])

    def _oversized(self) -> None:
        size = self._chance.choice([_FRAME_BYTES + 4, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, (1 << 32) - 1])
        kind = bytes([self._chance.choice([0, 1, 2, 3, 255])])
        self._say_all(b"bKV" + kind + size.to_bytes(4, "big") + self._chance.randbytes(64))

    def _pickle(self) -> None:
        data = pickle.dumps(_Canary(), protocol=self._chance.choice([2, 3, 4, 5]))
        framed = b"bKV\x01" + len(data).to_bytes(4, "big") + data
        self._say_all(self._chance.choice([data, framed, packed("frames", header=data), packed("open", ticket=data)]))

    def _replayed(self) -> None:
        assert self._peer is not None
        wrong = self._chance.choice([self._peer.sequence + 1, self._peer.sequence - 1, 0, 1 << 40])
        if wrong in (self._peer.sequence, -1):
            wrong = self._peer.sequence + 2
        assert "ack" not in self._announce(self._parcel(sequence=wrong), [self._content()])

    def _placed_twice(self) -> None:
        """What is there already, whole and with a right checksum, with other bytes."""
        if not self._half_done:
            self._right_frame()
        frame = self._frame(self._chance.choice([(0, _HALF), (1, _HALF + 1)]))
        assert self._announce(self._parcel(frame), [self._content()]) == ["refuse"]

    def _nonsense_message(self) -> None:
        kinds = ["hello", "welcome", "canary", "ack", "accept", "store", "carrier", "later", "expected", "", "close"]
        values = [None, 0, -1, "x", b"x", list(self._leg), [1, 2, 3], {"a": 1}]
        fields = {
            name: self._chance.choice(values) for name in ("leg", "header", "frames", "ticket", "sequence", "carrier")
        }
        assert "ack" not in self._say(packed(self._chance.choice(kinds), **fields))

    def _another_leg(self) -> None:
        name, attempt, choice = self._leg
        leg = self._chance.choice([(name, attempt + 1, choice), (name, 0, choice), (name, attempt, 1), ("fuzz1", 9, 0)])
        changed = dict(zip(("request", "attempt", "first_choice"), leg, strict=True))
        assert self._announce(self._parcel(**changed), [self._content()]) == ["refuse"]

    def _two(self, **changed: Any) -> list[Frame]:
        """Two frames that are announced together, the second one changed."""
        if self._half_done:
            self._renew()
        return [self._frame((0, _HALF)), self._frame(**{"tokens": (_HALF, PROMPT), **changed})]

    def _damaged_parcel(self) -> None:
        """Of two frames that travel together the first is placed if it is right, and the second never."""
        kind = self._chance.choice(["first", "second", "both", "exchanged", "twice"])
        block = torch.randn(SHAPE.layers, 2, 2, _HALF, SHAPE.head_dim)
        first, second = block.numpy().tobytes(), self._content()
        parcel = self._parcel(*self._two(**({"tokens": (0, _HALF)} if kind == "twice" else {})))
        if kind in ("second", "twice"):
            self.placed += 1
            self.shadow[:, :, self._blocks[0]] = block
        sent = {
            "first": [self._flipped(first), second],
            "second": [first, self._flipped(second)],
            "both": [self._flipped(first), self._flipped(second)],
            "exchanged": [second, first],
            "twice": [first, second],
        }[kind]
        assert self._announce(parcel, sent, [first, second]) == ["refuse"]

    def _wrong_parcel(self) -> None:
        changed: dict[str, Any] = self._chance.choice(
            [{"tokens": (_HALF, PROMPT + 1)}, {"bytes": 1 << 40}, {"heads": (1, 3)}, {"layers": (1, SHAPE.layers + 1)}]
        )
        fields = self._parcel(*self._two(**changed)).pack()
        if self._chance.random() < 0.5:
            frames = fields["frames"]
            fields["frames"] = self._chance.choice([[None], {}, 7, [[]], frames * 300, [], [b"x"], [frames]])
        payload = self._chance.randbytes(2 * (_FRAME_BYTES + TRAILER_BYTES))
        assert "ack" not in self._deliver(packed("frames", **fields), payload, 2)


def _last_words(connection: socket.socket, raw: bytes) -> None:
    """Send bytes and no more, and wait for the receiver to leave."""
    try:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        raise AssertionError("the receiver neither answers nor leaves") from None
    except OSError:  # it left before it had read all
        pass
