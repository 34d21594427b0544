"""One leg as a prefill worker's book keeps it, and what routers are told about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..engine.step import SampledToken
from ..kv_transfer.send_reports import SendReports
from ..proto import worker_pb2 as pb
from ..proto.leg import Leg, ref_of
from ..proto.sampling import finish_reason


class Phase(Enum):
    """Where a leg is; a leg that is gone is in no phase."""

    QUEUED = "queued"
    FETCHING = "fetching"
    COMPUTING = "computing"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Order:
    """A Handover that waits for the step boundary."""

    session: int
    leg: Leg
    ticket: bytes


@dataclass(slots=True)
class Entry:
    """A leg. Times are monotonic seconds."""

    leg: Leg
    session: int
    ticket: bytes  # empty: no decode worker takes part
    arrived: float
    reports: SendReports
    phase: Phase = Phase.QUEUED
    blocks: list[int] = field(default_factory=list)
    cached: int = 0  # leading tokens found in the prefix cache here
    fetched: int = 0  # tokens behind them that came from the decode worker
    fetch_stop: int = 0  # while fetching: where the computing would begin
    fetch_until: float = 0.0
    arriving: set[int] = field(default_factory=set)  # while fetching: ranks that lack something
    admitted: float = 0.0
    computed_at: float = 0.0
    chunks: int = 0
    sending: bool = False  # the transfer may still read the blocks
    unsent: bool = False  # it broke: the blocks wait for a Handover
    released: bool = False
    idle_since: float | None = None  # held, and nothing happens: since when
    first: pb.FirstTokens | None = None

    @property
    def idle(self) -> bool:
        """Whether the blocks only wait for what the router decides."""
        return self.phase is Phase.HELD and not self.sending


def first_event(entry: Entry, row: Sequence[SampledToken], now: float) -> pb.FirstTokens:
    """What the last chunk of a leg drew."""
    return pb.FirstTokens(
        leg=ref_of(entry.leg.key),
        tokens=[_token(entry.leg, sampled) for sampled in row],
        cached_tokens=entry.cached,
        queue_s=entry.admitted - entry.arrived,
        prefill_s=now - entry.admitted,
        chunks=entry.chunks,
        fetched_tokens=entry.fetched,
        drawn_at=now,
    )


def repeated(first: pb.FirstTokens, leg: Leg) -> pb.FirstTokens:
    """The same tokens under the leg that goes on with them; their computing is not counted again."""
    return pb.FirstTokens(
        leg=ref_of(leg.key),
        tokens=[token for token in first.tokens if token.choice in leg.choices],
        cached_tokens=first.cached_tokens,
        fetched_tokens=first.fetched_tokens,
        drawn_at=first.drawn_at,
    )


def _token(leg: Leg, sampled: SampledToken) -> pb.Token:
    number = len(leg.generated)
    return pb.Token(
        choice=sampled.choice,
        index=number,
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        top_logprobs=[pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in sampled.top],
        finish_reason=finish_reason(leg.sampling, sampled.token_id, number + 1),
    )
