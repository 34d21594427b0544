"""One link of a prefill rank: a thread that dials a decode rank and pushes the frames of any number of legs to it.

The thread alone touches the socket. Whatever goes wrong with the link ends it, and with it all legs on it; the sender
opens a new one for the next leg.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from typing import Any, Protocol

from ..proto.errors import BatonError, InternalError, TransferFailed, from_wire
from .carriers import INLINE, Carrier, InlineCarrier, Rendezvous, chosen
from .events import LegKey
from .frames import cell_bytes
from .params import TransferParams
from .send_leg import LegPart
from .send_window import SendWindow, WindowOwner
from .wire import VERSION, Wire, WireError, field, leg_of

_log = logging.getLogger(__name__)


class LinkOwner(WindowOwner, Protocol):
    """What a link needs of its sender."""

    @property
    def params(self) -> TransferParams: ...
    @property
    def lock(self) -> threading.Lock:
        """Guards legs, parts and every link's queues."""
        ...

    def part_acknowledged(self, part: LegPart) -> None:
        """The decode rank has all of its part."""
        ...

    def retire(self, link: SendLink) -> bool:
        """Take an idle link out of use, unless a leg was just added: then False."""
        ...

    def link_ended(self, link: SendLink, error: BatonError) -> None:
        """The link is gone; its legs cannot go on."""
        ...


class SendLink:
    """A link and its thread. Methods without underscore, but `join`, are called with the owner's lock held."""

    def __init__(self, owner: LinkOwner, address: str, incarnation: str, ticket: bytes) -> None:
        self.key = (address, incarnation)
        self.parts: dict[LegKey, LegPart] = {}
        self._owner = owner
        self._params = owner.params
        self._ticket = ticket
        self._cell_bytes = cell_bytes(owner.layout.head_dim, owner.layout.dtype)
        self._wire: Wire | None = None
        self._outbox: deque[tuple[str, dict[str, Any]]] = deque()
        self._ready: deque[LegPart] = deque()  # parts that may have something to send, each once
        self._stopped = False
        self._busy_at = time.monotonic()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{address}", daemon=True)

    @property
    def idle(self) -> bool:
        """Whether no leg needs the link."""
        return not (self.parts or self._outbox)

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def add(self, part: LegPart, ticket: bytes) -> None:
        """Serve one more leg."""
        if not self.parts:
            self._busy_at = time.monotonic()
        self.parts[part.leg.key] = part
        self.post("open", leg=part.leg.key, ticket=ticket)

    def post(self, kind: str, **fields: Any) -> None:
        """Queue a control message."""
        self._outbox.append((kind, fields))
        self._wake()

    def offer(self, part: LegPart) -> None:
        """The part has something to send, a frame or its end."""
        if part.ready and part not in self._ready:
            self._ready.append(part)
        self._wake()

    def remove(self, part: LegPart) -> None:
        """Start no more frames of this part."""
        part.drop()
        self.parts.pop(part.leg.key, None)
        with contextlib.suppress(ValueError):
            self._ready.remove(part)

    def stop(self) -> None:
        """End the link soon."""
        self._stopped = True
        if self._wire is not None:
            self._wire.interrupt()
        self._wake()

    def join(self, limit_s: float) -> None:
        """Wait for the thread; the lock must not be held."""
        self._thread.join(limit_s)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: it is gone
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        error: BatonError = TransferFailed("the link was closed")
        window: SendWindow | None = None
        try:
            wire, window = self._connect()
            while not self._stopped and not self._idle_too_long(wire, window):
                self._turn(wire, window)
        except WireError as fault:
            error = TransferFailed(f"link to {self.key[0]}: {fault}")
        except BatonError as fault:
            error = fault
        except Exception as fault:
            _log.exception("the link to %s failed", self.key[0])
            error = InternalError(f"link to {self.key[0]}: {fault}")
        self._owner.link_ended(self, error)
        if window is not None:
            window.close()
        with self._owner.lock:
            if self._wire is not None:
                self._wire.close()
            os.close(self._wake_write)
            self._wake_write = -1
        os.close(self._wake_read)

    def _connect(self) -> tuple[Wire, SendWindow]:
        """Dial, shake hands, build the carrier. Raises WireError, or what the decode rank refused with."""
        params = self._params
        wire = Wire.connect(self.key[0], params.connect_timeout_s)
        with self._owner.lock:
            self._wire = wire
        wanted = chosen(params.transport)
        wire.send(
            "hello",
            version=VERSION,
            ticket=self._ticket,
            layout=self._owner.layout.pack(),
            rank=self._owner.rank,
            incarnation=self.key[1],
            carrier=wanted,
            checksum=params.checksum,
        )
        answer = wire.receive()
        kind = answer["kind"] if isinstance(answer, dict) else "payload"
        if not isinstance(answer, dict) or kind not in ("welcome", "refused"):
            raise WireError(f"a {kind} message came before the handshake")
        if kind == "refused":
            raise from_wire(field(answer, "code", str), field(answer, "message", str))
        wire.limit_s = params.frame_timeout_s
        carrier = self._carrier(wire, wanted, field(answer, "carrier", str))
        checked = params.checksum or field(answer, "checksum", bool)
        return wire, SendWindow(self._owner, wire, carrier, checked, params.max_outstanding)

    def _carrier(self, wire: Wire, wanted: str, agreed: str) -> Carrier:
        if agreed not in (wanted, INLINE):
            raise WireError(f"the peer chose carrier {agreed!r}")
        if agreed != INLINE:
            built, reason = Rendezvous(wire, agreed, 0, self._params.host, self._params.frame_timeout_s / 2).run()
            if built is not None:
                return built
            _log.warning("the link to %s stays inline: %s", self.key[0], reason)
        return InlineCarrier(wire)

    def _turn(self, wire: Wire, window: SendWindow) -> None:
        """Do one thing: read a message, or write one, or wait for either."""
        self._check_clocks(wire, window)
        if wire.readable(0):
            self._handle(window, wire.receive())
        elif not (self._send_control(wire, window) or self._announce(window) or self._send_done(wire, window)):
            self._wait(wire, window)

    def _check_clocks(self, wire: Wire, window: SendWindow) -> None:
        """Heartbeat, and the limits on silence and on the oldest frame. Raises WireError."""
        now, limit = time.monotonic(), self._params.frame_timeout_s
        with self._owner.lock:
            ending = [part.done_sent_at for part in self.parts.values() if part.done_sent_at is not None]
            if not (self.parts or window.busy):
                return
        window.check(now, limit)
        if ending and not window.busy and now - min(ending) > limit:
            raise WireError(f"no answer to the end of a leg for {limit:g} s")
        if now - max(wire.last_received, self._busy_at) > limit:
            raise WireError(f"nothing from the decode rank for {limit:g} s")
        if now - wire.last_sent > limit / 4:
            wire.send("beat")

    def _idle_too_long(self, wire: Wire, window: SendWindow) -> bool:
        unused_s = time.monotonic() - max(wire.last_sent, wire.last_received)
        return not window.busy and unused_s >= self._params.idle_close_s and self._owner.retire(self)

    def _send_control(self, wire: Wire, window: SendWindow) -> bool:
        with self._owner.lock:
            if not self._outbox:
                return False
            kind, fields = self._outbox.popleft()
        if kind != "open":
            window.forget(fields["leg"])
        wire.send(kind, **fields)
        return True

    def _announce(self, window: SendWindow) -> bool:
        """Start one frame; legs take turns."""
        if not window.room:
            return False
        with self._owner.lock:
            if not self._ready:
                return False
            part = self._ready.popleft()
            box = part.take(self._cell_bytes, self._params.frame_bytes)
            if part.ready:
                self._ready.append(part)
        window.announce(part, box)
        return True

    def _send_done(self, wire: Wire, window: SendWindow) -> bool:
        """Say that a leg's last payload is on its way."""
        with self._owner.lock:
            part = next((part for part in self.parts.values() if part.finished and not window.owes(part)), None)
            if part is None:
                return False
            part.done_sent_at = time.monotonic()
        wire.send("done", leg=part.leg.key, first_tokens=part.first_tokens)
        return True

    def _handle(self, window: SendWindow, message: Any) -> None:
        if not isinstance(message, dict):
            raise WireError("a payload came the wrong way")
        kind = message["kind"]
        if kind == "beat" or window.on_message(message):
            return
        with self._owner.lock:
            part = self.parts.get(leg_of(message))
        if kind == "done":
            if part is not None:
                window.forget(part.leg.key)
                self._owner.part_acknowledged(part)
        elif kind == "leg_refused":
            reason = from_wire(field(message, "code", str), field(message, "message", str))
            self._owner.leg_failed(leg_of(message), reason)
        else:
            raise WireError(f"unexpected {kind} message")

    def _wait(self, wire: Wire, window: SendWindow) -> None:
        """Sleep until there is a message, a wake-up, or a clock to look at."""
        with self._owner.lock:
            busy = bool(self.parts) or window.busy
        poll = select.poll()
        poll.register(wire, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        for descriptor, _ in poll.poll(
            1000 * (self._params.frame_timeout_s / 8 if busy else self._params.idle_close_s)
        ):
            if descriptor == self._wake_read:
                os.read(self._wake_read, 4096)
