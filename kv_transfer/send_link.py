"""One link of a prefill rank: a thread that dials a decode rank and pushes the frames of any number of legs to it.

The thread alone touches the socket. Whatever goes wrong with the link ends it, and with it all legs on it; the sender
opens a new one for the next leg.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import ssl
import threading
import time
from collections import deque
from typing import Any, Protocol

from ..proto.errors import BatonError, InternalError, TransferFailed, from_wire
from .canary import send_canary
from .carrier_build import build_carrier
from .carriers import INLINE, Carrier, InlineCarrier
from .codec import wire_cell_bytes, wire_dtype
from .events import LegKey
from .frames import MAX_FRAME_TARGET
from .handshake import HelloSender, say_hello
from .send_leg import LegPart, frame_target, worth_cells
from .send_window import SendWindow, WindowOwner
from .ticket import Ticket
from .wire import Wire, WireError, field, leg_of

_log = logging.getLogger(__name__)


class LinkOwner(WindowOwner, HelloSender, Protocol):
    """What a link needs of its sender."""

    @property
    def tls(self) -> ssl.SSLContext | None: ...
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

    def unused(self, link: SendLink) -> None:
        """The link has nothing to do for a moment."""
        ...

    def link_ended(self, link: SendLink, error: BatonError) -> None:
        """The link is of no use any more; its legs cannot go on."""
        ...

    def link_closed(self, link: SendLink) -> None:
        """Its descriptors are closed."""
        ...


class SendLink:
    """A link and its thread. Methods without underscore, but `join`, are called with the owner's lock held."""

    def __init__(self, owner: LinkOwner, address: str, incarnation: str, ticket: bytes) -> None:
        self.key = (address, incarnation)
        self.parts: dict[LegKey, LegPart] = {}
        self._owner = owner
        self._params = owner.params
        self._ticket = ticket
        self._dtype = wire_dtype(owner.layout.dtype, Ticket.unpack(ticket).layout.dtype, owner.params.wire)
        self._cell_bytes = wire_cell_bytes(owner.layout.head_dim, self._dtype, owner.params.wire)
        self._frame_bytes = min(owner.params.frame_bytes, MAX_FRAME_TARGET)
        self._wire: Wire | None = None
        self._outbox: deque[tuple[str, dict[str, Any]]] = deque()
        self._ready: deque[LegPart] = deque()  # parts that may have something to send, each once
        self._stopped = False
        self._resting: SendWindow | None = None  # while the thread sleeps; only with the lock does it go on
        self._busy_at = self.used_at = time.monotonic()  # used: when a leg last needed it
        self._window: SendWindow | None = None
        self._clocks_at = 0.0  # when they were last looked at
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{address}", daemon=True)

    @property
    def idle(self) -> bool:
        """Whether no leg needs the link, nor has a frame on its way."""
        return not (self.parts or self._outbox or (self._window is not None and self._window.busy))

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def add(self, part: LegPart, ticket: bytes) -> None:
        """Serve one more leg."""
        if not self.parts:
            self._busy_at = time.monotonic()
        self.parts[part.leg.key] = part
        part.frame_bytes = frame_target(part.due, self._cell_bytes, self._frame_bytes)
        part.worth = worth_cells(part.due, self._cell_bytes, part.frame_bytes)
        self.post("open", leg=part.leg.key, ticket=ticket)

    def post(self, kind: str, **fields: Any) -> None:
        """Queue a control message."""
        self._outbox.append((kind, fields))
        self._wake()

    def offer(self, part: LegPart) -> None:
        """The part has something to send, a frame or its end."""
        if (part.ready or part.promising) and part not in self._ready:
            self._ready.append(part)
        self._wake()

    def offer_end(self, part: LegPart) -> None:
        """The part's end is known. The decode rank waits for it: the caller says it, if the link's thread sleeps and no
        payload travels on the wire."""
        window = self._resting
        if window is None or window.inline or self._outbox or self._ready or not _may_end(part, window):
            self.offer(part)
        elif self._wire is not None and self._wire.send_at_once("done", **_end_of(part)):
            part.done_sent_at = time.monotonic()
        else:
            self.offer(part)

    def remove(self, part: LegPart) -> None:
        """Start no more frames of this part."""
        part.drop()
        self.parts.pop(part.leg.key, None)
        self.used_at = time.monotonic()
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
        try:
            wire, window = self._connect()
            self._window = window
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
        if self._window is not None:
            self._window.close()
        with self._owner.lock:
            if self._wire is not None:
                self._wire.close()
            os.close(self._wake_write)
            self._wake_write = -1
        os.close(self._wake_read)
        self._owner.link_closed(self)

    def _connect(self) -> tuple[Wire, SendWindow]:
        """Dial, shake hands, build the carrier. Raises WireError, or what the decode rank refused with."""
        params = self._params
        wire = Wire.connect(self.key[0], params.connect_timeout_s, self._owner.tls)
        with self._owner.lock:
            self._wire = wire
        welcome = say_hello(wire, self._owner, self.key[1], self._ticket)
        wire.limit_s = params.frame_timeout_s
        carrier = self._proved(wire, self._carrier(wire, welcome.carrier), welcome.nonce)
        return wire, SendWindow(
            self._owner,
            wire,
            carrier,
            welcome.checked,
            params.max_outstanding,
            self._dtype,
            params.wire,
            welcome.nonce,
        )

    def _carrier(self, wire: Wire, agreed: str) -> Carrier:
        carrier, reason = build_carrier(agreed, wire, 0, self._params)
        if reason:
            _log.warning("the link to %s stays inline: %s", self.key[0], reason)
        return carrier

    def _proved(self, wire: Wire, carrier: Carrier, nonce: bytes) -> Carrier:
        """The carrier, or inline in its place, after it brought the canary over unharmed. Raises TransferFailed."""
        what = (nonce, self._owner.layout.head_dim, self._dtype, self._params.wire)
        try:
            reason = send_canary(wire, carrier, *what)
            if reason and carrier.name != INLINE:
                _log.warning("the link to %s goes on inline: %s", self.key[0], reason)
                carrier.close()
                carrier = InlineCarrier(wire)
                reason = send_canary(wire, carrier, *what)
        except BaseException:
            carrier.close()
            raise
        if reason:
            raise TransferFailed(f"link to {self.key[0]} refused: {reason}")
        return carrier

    def _turn(self, wire: Wire, window: SendWindow) -> None:
        """Do one thing: read a message, or write one, or a frame, or wait for either."""
        self._check_clocks(wire, window)
        if wire.readable(0):
            self._handle(window, wire.receive())
            return
        if not window.writing and (self._send_control(wire, window) or self._announce(window)):
            return
        if not (window.step() or self._send_done(wire, window)):
            self._wait(wire, window)

    def _check_clocks(self, wire: Wire, window: SendWindow) -> None:
        """Heartbeat, and the limits on silence and on the oldest frame. Raises WireError."""
        now, limit = time.monotonic(), self._params.frame_timeout_s
        if now - self._clocks_at < limit / 64:
            return
        self._clocks_at = now
        with self._owner.lock:
            ending = [part.done_sent_at for part in self.parts.values() if part.done_sent_at is not None]
            if not (self.parts or window.busy):
                return
        if window.busy:
            window.check(now, limit)
        elif now - max(wire.last_received, self._busy_at) > limit:
            raise WireError(f"nothing from the decode rank for {limit:g} s")
        if ending and not window.busy and now - min(ending) > limit:
            raise WireError(f"no answer to the end of a leg for {limit:g} s")
        if now - wire.last_sent > limit / 4 and not window.writing:
            wire.send("beat")

    def _idle_too_long(self, wire: Wire, window: SendWindow) -> bool:
        if window.busy:
            return False
        unused_s = time.monotonic() - max(wire.last_sent, wire.last_received)
        return unused_s >= self._params.idle_close_s and self._owner.retire(self)

    def _send_control(self, wire: Wire, window: SendWindow) -> bool:
        if not self._outbox:
            return False
        with self._owner.lock:
            kind, fields = self._outbox.popleft()
        if kind != "open":
            window.forget(fields["leg"])
        wire.send(kind, **fields)
        return True

    def _announce(self, window: SendWindow) -> bool:
        """Start a few frames; legs take turns."""
        if not (self._ready and window.room):
            return False
        with self._owner.lock:
            if not self._ready:
                return False
            part = next((part for part in self._ready if part.ready), self._ready[0])  # computed before promised
            self._ready.remove(part)
            ahead = not part.ready
            if ahead and not part.promising:  # held meanwhile
                return True
            take = part.promise if ahead else part.take_parcel
            boxes = take(self._cell_bytes, part.frame_bytes)
            if part.ready or part.promising:
                self._ready.append(part)
        if boxes:
            window.announce(part, boxes, ahead)
        return True

    def _send_done(self, wire: Wire, window: SendWindow) -> bool:
        """Say that a leg's last payload is on its way."""
        with self._owner.lock:
            part = next((part for part in self.parts.values() if _may_end(part, window)), None)
            if part is None:
                return False
            part.done_sent_at = time.monotonic()
        wire.send("done", **_end_of(part))
        return True

    def _end_again(self) -> None:
        """The decode rank changed carrier: it took no notice of any end of a leg that it has not answered."""
        with self._owner.lock:
            for part in self.parts.values():
                part.done_sent_at = None

    def _handle(self, window: SendWindow, message: Any) -> None:
        if not isinstance(message, dict):
            raise WireError("a payload came the wrong way")
        kind = message["kind"]
        if kind == "beat":
            return
        if window.on_message(message):
            if kind == "switched":
                self._end_again()
            return
        with self._owner.lock:
            part = self.parts.get(leg_of(message))
        if kind == "done":
            if part is not None:
                window.forget(part.leg.key)
                self._owner.part_acknowledged(part)
        elif kind == "expected":
            with self._owner.lock:
                if part is not None:
                    part.held = False
                    self.offer(part)
        elif kind == "leg_refused":
            reason = from_wire(field(message, "code", str), field(message, "message", str))
            self._owner.leg_failed(leg_of(message), reason)
        else:
            raise WireError(f"unexpected {kind} message")

    def _wait(self, wire: Wire, window: SendWindow) -> None:
        """Sleep until there is a message, a wake-up, or a clock to look at."""
        with self._owner.lock:
            busy = bool(self.parts) or window.busy
        if not busy:
            self._owner.unused(self)
        poll = select.poll()
        poll.register(wire, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        with self._owner.lock:
            self._resting = window
        ready = poll.poll(1000 * (self._params.frame_timeout_s / 8 if busy else self._params.idle_close_s))
        with self._owner.lock:
            self._resting = None
        if any(descriptor == self._wake_read for descriptor, _ in ready):
            os.read(self._wake_read, 4096)


def _may_end(part: LegPart, window: SendWindow) -> bool:
    """Whether the end of the part may be said: all its payload is on its way."""
    return part.finished and not (window.writing or window.owes(part))


def _end_of(part: LegPart) -> dict[str, Any]:
    """The fields of `done`."""
    return {"leg": part.leg.key, "first_tokens": part.first_tokens}
