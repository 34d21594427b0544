"""Choices that left the batch to go on at another decode worker, with the blocks that hold their KV. Pure.

| state | holds | left by |
|---|---|---|
| held | the choice's table | Handover -> sending; cancel, session end, its clock |
| sending | the same, which the transfer reads | all sent *and* released -> gone; broken -> held; cancel, session end |

A choice is named by its leg and its number; a Handover puts it under the new leg. What is given back can be found again
in the prefix cache until the blocks are given away.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..engine.block_pool import BlockPool
from ..kv_transfer.events import Sent
from ..kv_transfer.send_reports import SendReports
from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, Unavailable
from ..proto.leg import Leg, LegKey, ref_of
from .effects import CancelSend, Effect, Send, Tell, failed, unsent
from .scheduler import SequenceId


@dataclass(slots=True)
class Parked:
    """One choice. `table` holds the KV of `tokens`; `last`, the token after them, is said and not computed."""

    name: SequenceId
    session: int
    tokens: list[int]
    last: pb.Token
    salt: str
    table: list[int]
    reports: SendReports
    sending: bool = False
    released: bool = False
    idle_since: float | None = None  # while it is not being sent


class Outgoing:
    """Times are the caller's monotonic clock. Blocks that are not being sent are kept for `keep_s`."""

    def __init__(self, pool: BlockPool, ranks: int, keep_s: float) -> None:
        self._pool = pool
        self._ranks = ranks
        self._keep_s = keep_s
        self._parked: dict[SequenceId, Parked] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def __repr__(self) -> str:
        parts = [f"{name}: {'sending' if one.sending else 'held'}" for name, one in self._parked.items()]
        return f"Outgoing({', '.join(parts)})"

    def owners(self) -> dict[LegKey, int]:
        """Session by leg."""
        return {name[0]: parked.session for name, parked in self._parked.items()}

    def park(self, leg: Leg, session: int, choice: int, generated: list[int], table: list[int]) -> list[Effect]:
        """A choice left the batch: it said `generated`, over all its legs, and its KV lacks the last of that."""
        name = (leg.key, choice)
        tokens = (leg.prompt + generated)[:-1]
        last = pb.Token(choice=choice, index=len(generated) - 1, token_id=generated[-1])
        self._parked[name] = Parked(name, session, tokens, last, leg.salt, table, SendReports(self._ranks))
        held = pb.Held(leg=ref_of(leg.key), choice=choice)
        return [Tell(session, pb.WorkerEvent(held=held))]

    def hand_over(self, session: int, leg: Leg, ticket: bytes, held: LegKey) -> list[Effect]:
        """The choice that is known under `held` goes on as `leg`, to where the ticket says."""
        parked = self._parked.get((held, leg.choices[0]))
        same = held[0] == leg.key[0] and len(leg.choices) == 1
        if parked is None or not same or parked.session != session or parked.tokens != leg.tokens:
            gone = Unavailable(f"the decode worker does not hold the KV of {held} choice {leg.choices[0]} (any more)")
            return [Tell(session, failed(leg.key, gone))]
        effects: list[Effect] = [CancelSend(held)] if parked.sending else []
        del self._parked[parked.name]
        parked.name = (leg.key, leg.choices[0])
        self._parked[parked.name] = parked
        parked.sending, parked.released, parked.idle_since = True, False, None
        parked.reports = SendReports(self._ranks)
        first = pb.FirstTokens(leg=ref_of(leg.key), tokens=[parked.last]).SerializeToString()
        return [*effects, Send(leg.key, ticket, tuple(parked.table), leg.length, first)]

    def release(self, key: LegKey) -> list[Effect]:
        """The router needs the blocks no more; what is still being sent ends first."""
        effects: list[Effect] = []
        for parked in self._of(key):
            parked.released = True
            effects += [] if parked.sending else self._drop(parked)
        return effects

    def cancel(self, key: LegKey, choices: Collection[int] = ()) -> list[Effect]:
        """Forget what is known under this leg: these choices of it, or all."""
        mine = [parked for parked in self._of(key) if not choices or parked.name[1] in choices]
        return [effect for parked in mine for effect in self._drop(parked)]

    def sent(self, rank: int, report: Sent) -> list[Effect]:
        """One rank's part was acknowledged."""
        effects: list[Effect] = []
        for parked in self._of(report.leg):
            if parked.sending and parked.reports.add(rank, report):
                parked.sending = False
                # nothing of it hides behind compute: the whole of it is exposed
                effects.append(Tell(parked.session, parked.reports.event(ref_of(report.leg), 0.0)))
                effects += self._drop(parked) if parked.released else []
        return effects

    def send_failed(self, key: LegKey, error: BatonError) -> list[Effect]:
        """It cannot reach its target: kept for another, unless no worker could be sent this."""
        effects: list[Effect] = []
        for parked in self._of(key):
            if not parked.sending:
                continue
            if parked.released:
                effects += self._drop(parked)
            elif error.retryable:
                parked.sending = False
                effects += [CancelSend(key), Tell(parked.session, unsent(key, error))]
            else:
                effects += [*self._drop(parked), Tell(parked.session, failed(key, error))]
        return effects

    def expire(self, now: float) -> list[Effect]:
        """Free what nobody sent for; the clock begins at the first call that finds it waiting."""
        effects: list[Effect] = []
        for parked in list(self._parked.values()):
            if parked.sending:
                continue
            if parked.idle_since is None:
                parked.idle_since = now
            elif parked.idle_since + self._keep_s <= now:
                effects += self._drop(parked)
        return effects

    def next_deadline(self) -> float | None:
        """When `expire` will have something to do."""
        waiting = [p.idle_since for p in self._parked.values() if not p.sending and p.idle_since is not None]
        return min(waiting) + self._keep_s if waiting else None

    def _of(self, key: LegKey) -> list[Parked]:
        return [parked for name, parked in self._parked.items() if name[0] == key]

    def _drop(self, parked: Parked) -> list[Effect]:
        del self._parked[parked.name]
        self._pool.publish(parked.table, parked.tokens, parked.salt)
        self._pool.release(parked.table)
        return [CancelSend(parked.name[0])] if parked.sending else []
