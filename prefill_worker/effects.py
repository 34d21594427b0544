"""What a prefill worker's book asks for: transfer calls, made on the ranks in this order, and events for routers."""

from __future__ import annotations

from dataclasses import dataclass

from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError
from ..proto.leg import LegKey, ref_of


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """Begin to send, on all ranks; the first `cached` tokens are in the pool already."""

    leg: LegKey
    ticket: bytes
    blocks: tuple[int, ...]
    tokens: int
    cached: int


@dataclass(frozen=True, slots=True)
class FinishTransfer:
    """The first tokens, for rank 0 to send with the last frame."""

    leg: LegKey
    first_tokens: bytes


@dataclass(frozen=True, slots=True)
class AbandonTransfer:
    """Nothing more is needed of the transfer, on all ranks."""

    leg: LegKey


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """Stop sending, on all ranks."""

    leg: LegKey


@dataclass(frozen=True, slots=True)
class ExpectPrefix:
    """Be ready to receive tokens [start, stop), on all ranks, and ask the leg's decode worker for them."""

    session: int
    leg: LegKey
    blocks: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ForgetPrefix:
    """Receive nothing of this leg any more, on all ranks."""

    leg: LegKey


@dataclass(frozen=True, slots=True)
class Tell:
    """An event for the session's router."""

    session: int
    event: pb.WorkerEvent


Effect = OpenTransfer | FinishTransfer | AbandonTransfer | CancelTransfer | ExpectPrefix | ForgetPrefix | Tell


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
