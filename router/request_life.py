"""The life of one request, without I/O: events in, actions out, exactly one end.

A request runs as legs (leg_table.py): first one with all its choices; a choice that must move (preempted, or its
worker was lost) goes on in a leg of its own, with the prompt's ids and the generated ids kept apart. Where the KV of a
leg that failed is still held by its source, the next leg goes on with that, and falls back to a new prefill when the
source holds it no more. Every placement has a new attempt number, and what belongs to an older one is dropped here.
Time is the caller's: deadlines come in as GiveUp.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, Cancelled, Exhausted, InternalError, Unavailable
from . import life_messages as m
from .ledger import Ledger
from .leg import Leg, command
from .leg_table import AT_PREFILL, TABLE, Do, LegEvent, LegState
from .life_messages import Action, LegKey, Peer

_FULL_WAIT_S = 0.5  # before an answer that has begun asks again for decode blocks that were refused


class Outcome(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class _Again(NamedTuple):
    """How a leg is to be placed; see life_messages.Place."""

    tries: int
    cause: str
    prefer: Peer | None
    avoid: frozenset[Peer]
    refused: BatonError | None
    after_s: float


class RequestLife:
    """One request. `handle` is the only way to change it; an event that makes no sense now changes nothing."""

    def __init__(self, prompt_tokens: int, n: int, max_tokens: int, attempts: int, prefer: Peer | None = None) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.attempts_limit = attempts
        self._prefer = prefer  # the prefill worker that has the prompt's KV, when one is known
        self.ledgers = [Ledger() for _ in range(n)]
        self.legs: dict[int, Leg] = {}  # live ones by attempt
        self.outcome: Outcome | None = None
        self.retries = 0
        self.preemptions = 0
        self.heeded = False  # the last event given to `handle` was in order: not late, stale or out of turn
        self._attempt = 0

    def __repr__(self) -> str:
        legs = ", ".join(f"{tuple(leg.key)} {leg.choices} {leg.state.value}" for leg in self.legs.values())
        said = [len(ledger.token_ids) for ledger in self.ledgers]
        return f"RequestLife({self.outcome.value if self.outcome else 'live'}, tokens={said}, legs=[{legs}])"

    def start(self) -> list[Action]:
        """Begins the first leg, with all choices."""
        return self._open(list(range(len(self.ledgers))), _Again(0, "first", self._prefer, frozenset(), None, 0.0))

    def generated(self, leg: Leg) -> list[int]:
        """The output so far that a resumed leg starts from; [] for a leg that begins its choices."""
        return leg.generated

    def follows(self, key: LegKey) -> bool:
        """Whether news of this leg matter: it is live, or its KV is what a live leg goes on with."""
        return key.attempt in self.legs or any(leg.held == key for leg in self.legs.values())

    def handle(self, event: m.Event) -> list[Action]:
        """What to do about `event`; [] also for an event that is late, stale or out of turn."""
        self.heeded = False
        if self.outcome is not None:
            return []
        match event:
            case m.GiveUp(error):
                return self._end(error)
            case m.WorkerLost(peer):
                return self._lost(peer)
            case m.StopMatched(choice):
                return self._stop(choice)
            case m.Tokens(attempt, peer, tokens):
                leg = self.legs.get(attempt)
                return self._emit(leg, LegEvent.TOKENS, tokens) if leg and leg.decode == peer else []
            case _:
                leg = self.legs.get(event.leg.attempt)
                actions = self._leg_event(leg, event) if leg is not None and leg.key == event.leg else []
                return actions + self._source_event(event)

    def going_on(self, attempt: int, peer: Peer) -> dict[int, Ledger]:
        """The choices that `peer` decodes in this leg. Until the next event their ledgers may take the usual tokens
        (`Ledger.goes_on`) without more ado, which are then to be emitted.
        """
        leg = self.legs.get(attempt)
        if leg is None or leg.state is not LegState.DECODING or leg.decode != peer or self.outcome is not None:
            return {}
        return {choice: self.ledgers[choice] for choice in leg.choices}

    # ---- events of one leg -----------------------------------------------------------------------------------------

    def _leg_event(self, leg: Leg, event: m.Event) -> list[Action]:
        match event:
            case m.Placed(_, prefill, decode):
                placed = LegEvent.PLACED if prefill else LegEvent.PLACED_TOGETHER
                if (leg.state, placed) in TABLE:
                    leg.prefill, leg.decode = prefill, decode
                return self._step(leg, placed)
            case m.Unplaceable(_, error):
                return self._end(error) if leg.state is LegState.PLACING else self._step(leg, LegEvent.NO_PLACE, error)
            case m.LetThrough():
                return self._step(leg, LegEvent.LET_THROUGH if leg.decode else LegEvent.LET_THROUGH_ALONE)
            case m.Ticketed(_, peer, ticket) if peer == leg.decode:
                if leg.state in (LegState.RESERVING, LegState.REBOOKING):
                    leg.ticket = ticket
                return self._step(leg, LegEvent.TICKET)
            case m.FirstTokens(_, peer, tokens) if peer == (leg.prefill or leg.decode):
                return self._first_tokens(leg, tokens)
            case m.Sent(_, peer) if peer == leg.prefill:
                return self._step(leg, LegEvent.SENT)
            case m.Unsent(_, peer, error) if peer == leg.prefill and leg.decode:
                return self._step(leg, LegEvent.UNSENT, error)
            case m.Unanswered(_, error) if leg.decode:
                return self._step(leg, LegEvent.UNANSWERED, error)
            case m.Wanted(_, peer, ticket) if peer == leg.prefill:
                return self._wanted(leg, ticket)
            case m.Committed(_, peer) if peer == leg.decode:
                return self._committed(leg)
            case m.Preempted(_, peer, choice) if peer == leg.decode and choice in leg.choices:
                return self._preempted(leg, choice)
            case m.Migrate(_, choice) if choice in leg.choices:
                return self._migrate(leg, choice)
            case m.Held(_, peer, choice) if peer == leg.decode and choice in leg.holding:
                return self._held(leg, choice)
            case m.Failed(_, peer, error) if peer == leg.decode:
                return self._failed(leg, peer, error)
            case m.Failed(key, peer, error) if peer == leg.prefill and leg.held in (key, None):
                return self._failed(leg, peer, error)
        return []

    def _source_event(self, event: m.Event) -> list[Action]:
        """News of a leg that is given up, from the source that holds its KV for later legs."""
        if not isinstance(event, m.FirstTokens | m.Failed):
            return []
        actions: list[Action] = []
        for leg in list(self.legs.values()):
            if leg.state not in (LegState.REPLACING, LegState.REBOOKING):
                continue
            if (leg.held, leg.prefill) != (event.leg, event.peer) or self.outcome is not None:
                continue
            if isinstance(event, m.FirstTokens):
                actions += self._emit(leg, LegEvent.FIRST_TOKENS, event.tokens)
            else:
                actions += self._failed(leg, event.peer, event.error)
        return actions

    def _wanted(self, leg: Leg, ticket: bytes) -> list[Action]:
        if leg.state not in (LegState.PREFILLING, LegState.RESENDING) or leg.decode is None:
            return []
        self.heeded = True
        return [m.GivePrefix(leg.key, leg.decode, ticket)]

    def _migrate(self, leg: Leg, choice: int) -> list[Action]:
        if leg.decode is None or choice in leg.holding or self.ledgers[choice].finished:
            return []
        actions = self._step(leg, LegEvent.HOLD)
        if leg.state is not LegState.DECODING:
            return actions
        leg.holding.add(choice)
        return [*actions, m.HoldChoice(leg.key, leg.decode, choice)]

    def _held(self, leg: Leg, choice: int) -> list[Action]:
        """The choice goes on in a leg of its own, with the KV that D holds of all its tokens but the last."""
        leg.holding.discard(choice)
        ledger = self.ledgers[choice]
        if (leg.state, LegEvent.HELD) not in TABLE or leg.decode is None or ledger.finished:
            return []  # one that the router ended was cancelled when it did
        leg.choices.remove(choice)
        actions = self._step(leg, LegEvent.HELD)
        how = _Again(leg.tries, "moved", None, leg.avoid | {leg.decode}, None, 0.0)
        actions += self._go_on(leg.key, leg.decode, [choice], ledger.token_ids[:-1], how)
        return actions + self._close_if_done(leg)

    def _first_tokens(self, leg: Leg, tokens: Sequence[pb.Token]) -> list[Action]:
        actions = self._emit(leg, LegEvent.FIRST_TOKENS, tokens)
        if leg.state is LegState.HANDOVER and leg.decode is None:
            return actions + self._end(InternalError("the first token did not end a request that has no decode worker"))
        return actions

    def _committed(self, leg: Leg) -> list[Action]:
        actions = self._step(leg, LegEvent.COMMITTED)
        leg.source_lost = leg.source_lost and leg.state is not LegState.DECODING
        stopped = [choice for choice in leg.choices if self.ledgers[choice].stopped_here]
        return actions + self._end_choices(leg, stopped) if actions else []

    def _emit(self, leg: Leg, event: LegEvent, tokens: Sequence[pb.Token]) -> list[Action]:
        if (leg.state, event) not in TABLE:
            return []
        actions = self._step(leg, event)
        fresh: list[pb.Token] = []
        for token in tokens:
            if token.choice in leg.choices:
                fresh += self.ledgers[token.choice].accept(token)
        if fresh:
            actions.append(m.Emit(fresh))
        untold = leg.state in (LegState.DECODING, LegState.REPLACING, LegState.REBOOKING)
        return actions + self._close_if_done(leg, tell=untold and event is LegEvent.FIRST_TOKENS)

    def _preempted(self, leg: Leg, choice: int) -> list[Action]:
        if (leg.state, LegEvent.PREEMPTED) not in TABLE or self.ledgers[choice].finished:
            return []
        self.preemptions += 1
        leg.choices.remove(choice)
        leg.holding.discard(choice)  # D no longer has it to hold
        actions = self._step(leg, LegEvent.PREEMPTED)
        actions += self._open([choice], _Again(leg.tries, "preempted", None, frozenset(), None, 0.0))
        return actions + self._close_if_done(leg)

    def _failed(self, leg: Leg, peer: Peer, error: BatonError) -> list[Action]:
        at_decode = peer == leg.decode
        if leg.state is LegState.DECODING and not at_decode:
            return self._step(leg, LegEvent.PREFILL_GONE)  # P is no part of the leg any more
        if not error.retryable:
            return self._end(error)
        return self._step(leg, LegEvent.DECODE_GONE if at_decode else LegEvent.PREFILL_GONE, error)

    # ---- events of the request -------------------------------------------------------------------------------------

    def _lost(self, peer: Peer) -> list[Action]:
        actions: list[Action] = []
        for leg in list(self.legs.values()):
            error = Unavailable(f"worker {peer.worker_id} was lost while it served the request")
            if self.outcome is None and peer == leg.decode:
                actions += self._step(leg, LegEvent.DECODE_GONE, error)
            elif self.outcome is None and peer == leg.prefill:
                event = LegEvent.PREFILL_GONE
                if leg.decode is not None and (leg.state, LegEvent.PREFILL_LOST) in TABLE:
                    event, leg.source_lost = LegEvent.PREFILL_LOST, True
                actions += self._step(leg, event, error)
        return actions

    def _stop(self, choice: int) -> list[Action]:
        if not self.ledgers[choice].stop():
            return []
        self.heeded = True
        actions: list[Action] = []
        for leg in list(self.legs.values()):
            if choice in leg.choices:
                actions += self._close_if_done(leg) or self._end_choices(leg, [choice])
        return actions

    def _end_choices(self, leg: Leg, choices: Sequence[int]) -> list[Action]:
        """The decode worker does not know that the router ended these choices, and would go on with them."""
        if not choices or leg.state is not LegState.DECODING or leg.decode is None:
            return []  # before the commit they are in nobody's batch
        return [m.CancelChoices(leg.key, leg.decode, tuple(choices))]

    def _end(self, error: BatonError | None) -> list[Action]:
        self.heeded = True
        actions: list[Action] = []
        for leg in list(self.legs.values()):
            actions += self._step(leg, LegEvent.DROP)
        if error is None:
            self.outcome = Outcome.COMPLETED
        else:
            self.outcome = Outcome.CANCELLED if isinstance(error, Cancelled) else Outcome.FAILED
        return [*actions, m.End(error)]

    def _close_if_done(self, leg: Leg, *, tell: bool = False) -> list[Action]:
        """Ends the leg when its choices have ended. tell: its worker does not know, whatever ended them."""
        ledgers = [self.ledgers[choice] for choice in leg.choices]
        if not all(ledger.finished for ledger in ledgers):
            return []
        stopped = tell or any(ledger.stopped_here for ledger in ledgers)
        actions = self._step(leg, LegEvent.STOPPED if stopped else LegEvent.FINISHED)
        return actions + (self._end(None) if all(ledger.finished for ledger in self.ledgers) else [])

    # ---- transitions -----------------------------------------------------------------------------------------------

    def _step(self, leg: Leg, event: LegEvent, error: BatonError | None = None) -> list[Action]:
        rule = TABLE.get((leg.state, event))
        if rule is None:
            return []
        self.heeded = True
        before, leg.state = leg.state, rule.state
        actions: list[Action] = []
        if before in AT_PREFILL and rule.state not in AT_PREFILL:
            actions.append(m.PrefillOver(leg.key))
        if rule.state is LegState.OVER:
            del self.legs[leg.key.attempt]
            actions.append(m.LegOver(leg.key))
        for do in rule.actions:
            actions += self._do(leg, do, event, error)
        return actions

    def _do(self, leg: Leg, do: Do, event: LegEvent, error: BatonError | None) -> list[Action]:
        match do:
            case Do.PLACE:
                leg.prefill = leg.decode = None
                return [m.Place(leg.key, "again", leg.needs_decode, None, leg.avoid, None)]
            case Do.ENTER_GATE if leg.prefill:
                return [m.EnterGate(leg.key, leg.prefill, self.prompt_tokens + len(leg.generated))]
            case Do.AGAIN if error:
                return self._again(leg, event, error)
            case Do.WITHDRAW if error and leg.decode:
                return [m.WithdrawLeg(leg.key, leg.decode, error)]
            case Do.RESEND if error:
                return self._resend(leg, error)
        return command(do, leg)  # none for EMIT, HOLD and MOVE: done where the event's content is at hand

    def _again(self, leg: Leg, event: LegEvent, error: BatonError) -> list[Action]:
        """Repeats the unfinished choices of a leg that failed: together if none has begun, else each in its own leg.

        An answer that has begun does not end because pools are full: that waits, and counts as no failed try. Nor does
        it count when KV that existed could not be used: the leg before was counted.
        """
        choices, begun = self._unfinished(leg)
        full = error.code == Exhausted.code
        decode_gone = event is LegEvent.DECODE_GONE and not leg.source_lost
        unusable = leg.resent and not decode_gone
        culprit = None if unusable else leg.decode if decode_gone else leg.prefill
        again = _Again(
            leg.tries if unusable or (full and begun) else leg.tries + 1,
            "recompute" if unusable else "retry",
            leg.prefill if decode_gone or unusable else None,
            leg.avoid | {culprit} if culprit else leg.avoid,
            error if full and not begun else None,
            max(error.retry_after_s, _FULL_WAIT_S) if full and begun else 0.0,
        )
        if again.tries >= self.attempts_limit:
            return self._end(error)
        self.retries += not unusable
        for choice in choices:
            self.ledgers[choice].forget_early()
        groups = [[choice] for choice in choices] if begun else [choices]
        return [action for group in groups for action in self._open(group, again)]

    def _resend(self, leg: Leg, error: BatonError) -> list[Action]:
        """Goes on with the KV that the leg's source holds, all unfinished choices together, at another D."""
        if leg.prefill is None or leg.held is None or leg.decode is None:
            return self._end(error)  # not in a state that asks for this
        choices, begun = self._unfinished(leg)
        full = error.code == Exhausted.code
        how = _Again(
            leg.tries if full and begun else leg.tries + 1,
            "retry",
            None,
            leg.avoid | {leg.decode},
            error if full and not begun else None,
            max(error.retry_after_s, _FULL_WAIT_S) if full and begun else 0.0,
        )
        if how.tries >= self.attempts_limit:
            return [m.CancelHeld(leg.held, leg.prefill, tuple(leg.choices)), *self._end(error)]
        self.retries += 1
        return self._go_on(leg.held, leg.prefill, choices, leg.generated, how)

    def _unfinished(self, leg: Leg) -> tuple[list[int], bool]:
        """The leg's choices that have not ended, and whether any of them has begun."""
        choices = [choice for choice in leg.choices if not self.ledgers[choice].finished]
        return choices, any(self.ledgers[choice].token_ids for choice in choices)

    def _open(self, choices: list[int], how: _Again) -> list[Action]:
        """A leg that begins with a prefill."""
        self._attempt += 1
        said = self.ledgers[choices[0]].token_ids
        left = self.max_tokens - len(said)
        key = LegKey(self._attempt, choices[0])
        generated = list(said) if len(choices) == 1 else []
        self.legs[key.attempt] = Leg(key, choices, how.tries, left > 1, how.avoid, generated)
        return [m.Place(key, how.cause, left > 1, how.prefer, how.avoid, how.refused, how.after_s)]

    def _go_on(self, held: LegKey, source: Peer, choices: list[int], generated: list[int], how: _Again) -> list[Action]:
        """A leg that begins with KV that exists: of the prompt and `generated`, at `source`, known there as `held`."""
        self._attempt += 1
        key = LegKey(self._attempt, choices[0])
        leg = Leg(key, choices, how.tries, True, how.avoid, generated, LegState.REPLACING, source)
        leg.held, leg.resent = held, True
        self.legs[key.attempt] = leg
        return [m.Place(key, how.cause, True, None, how.avoid, how.refused, how.after_s, source)]
