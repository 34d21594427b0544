"""What a decode worker's book asks for: transfer and pool calls, made on all ranks in this order, and router events."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.step import SampledToken
from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError
from ..proto.leg import Leg, LegKey, ref_of
from ..proto.sampling import finish_reason


@dataclass(frozen=True, slots=True)
class Expect:
    """Issue a ticket, be ready to receive tokens [cached, tokens) of this leg, then tell the router."""

    session: int
    leg: LegKey
    blocks: tuple[int, ...]
    cached: int
    tokens: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Forget:
    """Receive nothing of this leg any more."""

    leg: LegKey


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy blocks: (source, destination)."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Send the KV of tokens [0, tokens), all of which is in the blocks, on all ranks; then what rank 0 adds to it."""

    leg: LegKey
    ticket: bytes
    blocks: tuple[int, ...]
    tokens: int
    first_tokens: bytes


@dataclass(frozen=True, slots=True)
class CancelSend:
    """Stop sending, on all ranks."""

    leg: LegKey


@dataclass(frozen=True, slots=True)
class Tell:
    """An event for the session's router."""

    session: int
    event: pb.WorkerEvent


Effect = Expect | Forget | Copy | Send | CancelSend | Tell


def failed(key: LegKey, error: BatonError) -> pb.WorkerEvent:
    """The end of a leg, with the reason."""
    return pb.WorkerEvent(
        failed=pb.Failed(
            leg=ref_of(key),
            code=error.code,
            message=error.message,
            field=error.field,
            retry_after_s=error.retry_after_s,
        )
    )


def unsent(key: LegKey, error: BatonError) -> pb.WorkerEvent:
    """The end of a transfer that brought nothing to its end; the blocks are kept."""
    return pb.WorkerEvent(unsent=pb.Unsent(leg=ref_of(key), code=error.code, message=error.message))


def token_message(leg: Leg, sampled: SampledToken, number: int) -> pb.Token:
    """Output number `number` (0-based) of its choice."""
    return pb.Token(
        choice=sampled.choice,
        index=number,
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        top_logprobs=[pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in sampled.top],
        finish_reason=finish_reason(leg.sampling, sampled.token_id, number + 1),
    )
