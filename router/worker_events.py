"""What a worker says, as events of the requests' lives."""

from __future__ import annotations

from collections.abc import Iterator

from ..proto import worker_pb2 as pb
from ..proto.errors import from_wire
from . import life_messages as m
from .life_messages import LegKey, Peer

LegNews = (
    m.Ticketed | m.FirstTokens | m.Sent | m.Unsent | m.Wanted | m.Committed | m.Preempted | m.Held | m.Failed | m.Tokens
)


def translate(peer: Peer, event: pb.WorkerEvent) -> Iterator[tuple[str, LegNews]]:
    """(request id, event) for each request that the worker's event concerns; the tokens of one step concern many."""
    match event.WhichOneof("event"):
        case "tokens":
            groups: dict[tuple[str, int], list[pb.Token]] = {}
            for step in event.tokens.tokens:
                groups.setdefault((step.request_id, step.attempt), []).append(step.token)
            for (request_id, attempt), tokens in groups.items():
                yield request_id, m.Tokens(attempt, peer, tokens)
        case "ticket":
            ticket = event.ticket
            yield ticket.leg.request_id, m.Ticketed(_key(ticket.leg), peer, ticket.ticket)
        case "first":
            yield event.first.leg.request_id, m.FirstTokens(_key(event.first.leg), peer, event.first.tokens)
        case "sent":
            yield event.sent.leg.request_id, m.Sent(_key(event.sent.leg), peer)
        case "committed":
            yield event.committed.leg.request_id, m.Committed(_key(event.committed.leg), peer)
        case "preempted":
            preempted = event.preempted
            yield preempted.leg.request_id, m.Preempted(_key(preempted.leg), peer, preempted.choice)
        case "unsent":
            unsent = event.unsent
            yield unsent.leg.request_id, m.Unsent(_key(unsent.leg), peer, from_wire(unsent.code, unsent.message))
        case "want":
            yield event.want.leg.request_id, m.Wanted(_key(event.want.leg), peer, event.want.ticket)
        case "held":
            yield event.held.leg.request_id, m.Held(_key(event.held.leg), peer, event.held.choice)
        case "failed":
            failed = event.failed
            error = from_wire(failed.code, failed.message, failed.field, failed.retry_after_s)
            yield failed.leg.request_id, m.Failed(_key(failed.leg), peer, error)


def _key(leg: pb.LegRef) -> LegKey:
    return LegKey(leg.attempt, leg.first_choice)
