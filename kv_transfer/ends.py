"""Both ends of the transfer on one rank of a worker, since either pool may send and receive, and their news as messages
from a rank to its leader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..proto.errors import from_wire
from ..proto.kv_layout import KVLayout
from .block_store import BlockStore
from .events import (
    Abandoned,
    FirstTokensArrived,
    LegKey,
    RankComplete,
    ReceiveEvent,
    ReceiveFailed,
    SendEvent,
    SendFailed,
    Sent,
)
from .params import TransferParams
from .receiver import Receiver
from .sender import Sender
from .ticket import Ticket, TicketBook

News = SendEvent | ReceiveEvent
IssueTicket = Callable[[LegKey, int, int], Ticket]  # leg, tokens that are here, tokens in all


class Ends:
    """One rank's sender and receiver over one pool. `on_news` gets what both report; see their classes for errors."""

    def __init__(
        self,
        params: TransferParams,
        store: BlockStore,
        layout: KVLayout,
        rank: int,
        worker_id: str,
        incarnation: str,
        secret: bytes,
        on_news: Callable[[News], None],
    ) -> None:
        self._transport = params.transport
        self._tickets = TicketBook(secret)
        self.receiver = Receiver(params, store, layout, rank, worker_id, incarnation, self._tickets, on_news)
        self.sender = Sender(params, store, layout, rank, on_news)

    def issuer(self, addresses: Sequence[str], lifetime_s: float) -> IssueTicket:
        """Issues tickets of this worker, whose ranks listen at `addresses`; see TicketBook.issue."""
        receiver = self.receiver

        def issue(leg: LegKey, cached: int, tokens: int) -> Ticket:
            return self._tickets.issue(
                leg,
                worker_id=receiver.worker_id,
                incarnation=receiver.incarnation,
                layout=receiver.layout,
                addresses=tuple(addresses),
                cached_tokens=cached,
                prompt_tokens=tokens,
                carrier=self._transport,
                lifetime_s=lifetime_s,
            )

        return issue

    def close(self) -> None:
        """End all links; nothing is read from the pool or written to it afterwards."""
        self.sender.close()
        self.receiver.close()


def message_of(news: News) -> dict[str, Any]:
    """For the line from a rank to its leader."""
    match news:
        case Sent(leg, size, frames, started_at, ended_at):
            times = {"started_at": started_at, "ended_at": ended_at}
            return {"kind": "sent", "leg": leg, "bytes": size, "frames": frames, **times}
        case RankComplete(leg, _, size, frames):
            return {"kind": "complete", "leg": leg, "bytes": size, "frames": frames}
        case FirstTokensArrived(leg, payload):
            return {"kind": "first_tokens", "leg": leg, "payload": payload}
        case Abandoned(leg):
            return {"kind": "abandoned", "leg": leg}
        case SendFailed(leg, error):
            return {"kind": "send_failed", "leg": leg, "code": error.code, "message": error.message}
        case ReceiveFailed(leg, _, error):
            return {"kind": "receive_failed", "leg": leg, "code": error.code, "message": error.message}


def news_of(rank: int, message: dict[str, Any]) -> News | None:
    """The inverse, on the leader: what the rank reported. None: the message is about something else."""
    match message:
        case {"kind": "sent", "leg": (request, attempt, choice), **fields}:
            return Sent((request, attempt, choice), **fields)
        case {"kind": "complete", "leg": (request, attempt, choice), "bytes": size, "frames": frames}:
            return RankComplete((request, attempt, choice), rank, size, frames)
        case {"kind": "first_tokens", "leg": (request, attempt, choice), "payload": payload}:
            return FirstTokensArrived((request, attempt, choice), payload)
        case {"kind": "abandoned", "leg": (request, attempt, choice)}:
            return Abandoned((request, attempt, choice))
        case {"kind": "send_failed", "leg": (request, attempt, choice), "code": code, "message": text}:
            return SendFailed((request, attempt, choice), from_wire(code, text))
        case {"kind": "receive_failed", "leg": (request, attempt, choice), "code": code, "message": text}:
            return ReceiveFailed((request, attempt, choice), rank, from_wire(code, text))
    return None
