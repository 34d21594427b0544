"""The parcels that a decode rank has accepted on one link, and the carrier that brings their frames.

Each frame is read into a small buffer, verified there, and copied into the pool while the processor's cache still has
it. After a bad frame nothing more of its parcel is placed, and the leg ends. A carrier that fails is replaced by
`inline`: the prefill rank is told which frame comes next, and announces again from that one on.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from ..proto.errors import BatonError, TransferFailed
from ..proto.failpoints import reach
from .carriers import INLINE, Carrier, CarrierFailed, InlineCarrier
from .events import LegKey
from .frames import TRAILER_BYTES, Parcel
from .placement import ExpectedLeg, Placement
from .receive_legs import ReceiveLegs
from .wire import Wire, WireError

_log = logging.getLogger(__name__)
_MAX_ACCEPTED = 64


@dataclass(slots=True, eq=False)
class _Coming:
    """A parcel that was accepted."""

    parcel: Parcel
    leg: ExpectedLeg
    seed: int
    taken: int = 0  # frames that came
    failure: BatonError | None = None


class ReceiveWindow:
    """The link's thread alone uses it. `source` is the prefill rank."""

    def __init__(self, wire: Wire, placement: Placement, legs: ReceiveLegs, source: int) -> None:
        self.carrier: Carrier = InlineCarrier(wire)
        self.broken = False  # the carrier is, and the prefill rank has not said `switch`
        self._wire = wire
        self._placement = placement
        self._legs = legs
        self._source = source
        self._coming: deque[_Coming] = deque()
        self._announced = 0  # the number of the next frame to be announced
        self._done = 0  # the number of the next frame to be taken from a carrier

    @property
    def busy(self) -> bool:
        """Whether frames are due."""
        return bool(self._coming)

    @property
    def beside(self) -> bool:
        """Whether frames are due that do not come on the wire, so that `step` has to be called for them."""
        return bool(self._coming) and self.carrier.name != INLINE

    def due(self, key: LegKey) -> bool:
        """Whether frames of this leg are, likewise."""
        return self.beside and any(coming.parcel.leg == key for coming in self._coming)

    def on_frames(self, message: dict[str, Any]) -> None:
        """A parcel is announced: judge it, and accept or refuse it. Raises WireError."""
        try:
            parcel = Parcel.unpack(message)
        except ValueError as error:
            raise WireError(str(error)) from error
        if parcel.sequence != self._announced:
            raise WireError(f"frame {parcel.sequence} came when {self._announced} was due")
        self._announced += len(parcel.frames)
        if self.broken:
            return  # they will be announced again
        if len(self._coming) >= _MAX_ACCEPTED:
            raise WireError("too many parcels at once")
        try:
            leg = self._legs.expected(parcel.leg)
            if leg is None:
                self._wire.send("later", sequence=parcel.sequence)
                return
            self._placement.judge(parcel, leg)
        except TransferFailed as error:
            self._refuse(parcel, error)
            return
        self._coming.append(_Coming(parcel, leg, parcel.seed()))
        try:
            for frame in parcel.frames:
                self.carrier.expect(frame.bytes + TRAILER_BYTES)
        except CarrierFailed as error:
            self._give_up_carrier(error)
            return
        self._wire.send("accept", sequence=parcel.sequence)

    def on_payload(self, size: int) -> None:
        """The frames of a parcel follow on the wire. Raises WireError."""
        if not self._coming or size != self._coming[0].parcel.bytes or self.carrier.name != INLINE:
            raise WireError(f"a payload of {size} bytes that was not announced")
        coming = self._coming[0]
        while coming.taken < len(coming.parcel.frames):
            self.step()

    def step(self) -> None:
        """Take the next frame of those that are due: verify and place it. Raises WireError."""
        coming = self._coming[0]
        if not coming.taken:
            try:
                reach("decode.mid_frame")
            except BatonError as error:
                coming.failure = error
        try:
            whole = self.carrier.receive(coming.parcel.frames[coming.taken].bytes + TRAILER_BYTES)
            try:
                if coming.failure is None and self._placement.place(
                    coming.parcel, coming.seed, coming.taken, coming.leg, whole
                ):
                    self._legs.covered(coming.leg)
            except BatonError as error:
                coming.failure = error
            coming.taken += 1
            self._done = coming.parcel.sequence + coming.taken
            if coming.taken == len(coming.parcel.frames):
                self._coming.popleft()
                self._answer(coming)
            self.carrier.release()
        except CarrierFailed as error:
            self._give_up_carrier(error)

    def use_inline(self) -> None:
        """Go on without the carrier, and without what was accepted."""
        self.carrier.close()  # its peer then fails at once too
        self.carrier = InlineCarrier(self._wire)
        self._coming.clear()

    def on_switch(self) -> None:
        """The prefill rank asks to go on inline: what was accepted and did not come will be announced again."""
        self.use_inline()
        self.broken = False
        self._wire.send("switched", sequence=self._done)

    def _answer(self, coming: _Coming) -> None:
        if coming.failure is not None:
            self._refuse(coming.parcel, coming.failure)
        else:
            self._wire.send("ack", sequence=coming.parcel.sequence)

    def _give_up_carrier(self, error: CarrierFailed) -> None:
        """Go on inline, once the prefill rank has heard of it."""
        _log.warning("the link from prefill rank %d goes on inline: %s", self._source, error)
        self.use_inline()
        self.broken = True
        self._wire.send("carrier_failed", reason=str(error))

    def _refuse(self, parcel: Parcel, error: BatonError) -> None:
        self._wire.send("refuse", sequence=parcel.sequence, code=error.code, message=error.message)
        self._legs.fail(parcel.leg, error)
