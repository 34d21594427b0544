"""One link of a decode rank: a thread that reads what a prefill rank sends, judges it, and has it placed.

What is announced is judged before any byte of it comes; a frame is verified before it is copied into the pool. A frame
that is refused ends its leg; bytes that are not our protocol, and silence while a leg is open, end the link and all
legs that have not come to their end on it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from typing import Any, Protocol

from ..proto.errors import BatonError, InternalError, TransferFailed
from .canary import NONCE_BYTES, receive_canary
from .carrier_build import build_carrier
from .carriers import INLINE
from .events import LegKey
from .handshake import Agreement
from .placement import Placement
from .receive_legs import EARLY_LOOK_S, ENDING_S, LegsOwner, ReceiveLegs
from .receive_window import ReceiveWindow
from .wire import Payload, Wire, WireError, field, leg_of

_log = logging.getLogger(__name__)


class ReceiveOwner(LegsOwner, Protocol):
    """What a link needs of its receiver."""

    def link_ended(self, link: ReceiveLink) -> None:
        """The link's thread is about to end."""
        ...


class ReceiveLink:
    """A link and its thread; only `start`, `stop` and `join` are for others."""

    def __init__(self, owner: ReceiveOwner, wire: Wire, agreement: Agreement) -> None:
        self._owner = owner
        self._params = owner.params
        self._wire = wire
        self._agreement = agreement
        self._source = agreement.source  # the prefill rank
        placement = Placement(
            owner, self._source, agreement.heads, agreement.checked, agreement.dtype, owner.params.wire
        )
        self._legs = ReceiveLegs(owner, wire, self._source, agreement.heads)
        self._window = ReceiveWindow(wire, placement, self._legs, self._source)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._canaries = 0  # how many came
        self._proved = False  # the last one was right
        self._changed = False  # the carrier, and no canary has come over the new one
        self._thread = threading.Thread(target=self._run, name="kv-receive", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """End the link soon."""
        self._wire.interrupt()

    def join(self, limit_s: float) -> None:
        """Wait for the thread."""
        self._thread.join(limit_s)

    def _run(self) -> None:
        reason: BatonError = TransferFailed("the link was closed")
        try:
            self._shake_hands()
            while True:
                self._turn()
        except WireError as error:
            reason = TransferFailed(f"link from prefill rank {self._source}: {error}")
        except Exception as error:
            _log.exception("a KV link failed")
            reason = InternalError(f"link from prefill rank {self._source}: {error}")
        _log.info("a KV link ended: %s", reason)
        self._legs.fail_all(reason)
        self._window.carrier.close()
        self._wire.close()
        self._owner.link_ended(self)

    def _shake_hands(self) -> None:
        """Answer the hello, and build the carrier. Raises WireError."""
        agreed = self._agreement.carrier
        self._wire.send("welcome", carrier=agreed, checksum=self._agreement.checked, canary=self._nonce)
        self._wire.limit_s = self._params.frame_timeout_s
        self._window.carrier, reason = build_carrier(agreed, self._wire, 1, self._params)
        if reason := self._agreement.reason or reason:
            _log.warning("the link from prefill rank %d stays inline: %s", self._source, reason)

    def _on_canary(self, message: dict[str, Any]) -> None:
        """Take the synthetic block in, or say what is wrong with it. Raises WireError when no other may come."""
        name = field(message, "carrier", str)
        self._canaries += 1
        usual = not len(self._legs) and self._canaries <= 2 and name in (self._window.carrier.name, INLINE)
        if not (usual or (self._changed and name == INLINE)):
            raise WireError(f"an unexpected canary over {name!r}")
        if name != self._window.carrier.name:
            self._window.use_inline()
        what = (self._owner.layout.head_dim, self._agreement.dtype, self._params.wire)
        reason = receive_canary(self._wire, self._window.carrier, message, self._nonce, *what)
        self._proved, self._changed = not reason, False
        if reason and name == INLINE:
            raise WireError(f"the canary over inline failed: {reason}")
        if reason:
            _log.warning("the link from prefill rank %d cannot use %s: %s", self._source, name, reason)

    def _turn(self) -> None:
        """Handle the next message, or a frame. Raises WireError when nothing comes while something is due."""
        window, legs = self._window, self._legs
        if window.beside and not self._wire.readable(0):
            window.step()
            return
        limit = self._params.frame_timeout_s
        if not (len(legs) or window.busy or window.broken):
            limit += self._params.idle_close_s
        elif window.broken:
            limit *= 0.5  # the first half went by before the carrier was given up
        if legs.waiting:
            legs.look_again()
            limit = EARLY_LOOK_S
        if legs.ending:
            legs.ending = False
            self._wire.soon_readable(ENDING_S)
        if not self._wire.readable(limit):
            if legs.waiting or limit == EARLY_LOOK_S:
                return
            raise WireError(f"nothing from the peer for {limit:g} s")
        self._handle(self._wire.receive())

    def _handle(self, message: dict[str, Any] | Payload) -> None:
        if isinstance(message, Payload):
            self._window.on_payload(message.size)
            return
        kind = message["kind"]
        if kind == "frames":
            if self._changed:
                raise WireError("a frame came before the canary over another carrier")
            self._window.on_frames(message)
        elif kind == "beat":
            self._wire.send("beat")
        elif kind == "switch":
            self._window.on_switch()
            self._changed = True
        elif kind == "canary":
            self._on_canary(message)
        elif kind in ("open", "done", "cancel", "abandon", "fail"):
            if kind == "open" and not self._proved:
                raise WireError("a leg came before the canary")
            with self._wire.together():  # the last frames and the end of a leg are answered in one write
                self._on_leg(kind, leg_of(message), message)
        else:
            raise WireError(f"unexpected {kind} message")

    def _on_leg(self, kind: str, key: LegKey, message: dict[str, Any]) -> None:
        while kind == "done" and self._window.due(key):  # what was sent before comes first
            self._window.step()
        if kind != "done" or not self._window.broken:  # then it is said again after the switch
            self._legs.on_message(kind, key, message)
