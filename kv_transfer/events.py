"""What the transfer tells a worker: one value for each outcome of a leg.

Events are handed to the `on_event` callback from transfer threads (or from the caller's own thread inside `open`), one
at a time for each leg but not for different legs; the callback must not block and must not call back into transfer.
All times are seconds of `time.monotonic()`, sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..proto.errors import BatonError

LegKey = tuple[str, int, int]  # request_id, attempt, first_choice


@dataclass(frozen=True, slots=True)
class Sent:
    """All that this prefill rank had to send arrived and was acknowledged (bytes 0: it had nothing to send)."""

    leg: LegKey
    bytes: int
    frames: int
    started_at: float  # the first frame was announced
    ended_at: float


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The leg cannot reach its decode worker any more; nothing of it is being sent."""

    leg: LegKey
    error: BatonError


@dataclass(frozen=True, slots=True)
class RankComplete:
    """This decode rank holds all KV that the leg expects."""

    leg: LegKey
    rank: int
    bytes: int
    frames: int


@dataclass(frozen=True, slots=True)
class FirstTokensArrived:
    """Decode rank 0 got what prefill's `finish` carried. May come before or after RankComplete."""

    leg: LegKey
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """The leg can no longer complete on this decode rank; nothing more of it is placed."""

    leg: LegKey
    rank: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The first token ended the request: nothing more comes and nothing is wrong."""

    leg: LegKey


SendEvent = Sent | SendFailed
ReceiveEvent = RankComplete | FirstTokensArrived | ReceiveFailed | Abandoned
