"""The pure life of a request: its table, its ends, and random walks over event orders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from baton.proto import worker_pb2 as pb
from baton.proto.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    InternalError,
    InvalidRequest,
    TransferFailed,
    Unavailable,
)
from baton.router import life_messages as m
from baton.router.leg_table import TABLE, Do, LegEvent, LegState
from baton.router.life_messages import LegKey, Peer
from baton.router.request_life import Outcome, RequestLife
from hypothesis import given, settings
from hypothesis import strategies as st

P, P2, D, D2 = Peer("prefill-0", "a"), Peer("prefill-1", "a"), Peer("decode-0", "a"), Peer("decode-1", "a")
K1, K2, K3 = LegKey(1, 0), LegKey(2, 0), LegKey(3, 1)


def token(choice: int, index: int, finish: str = "") -> pb.Token:
    return pb.Token(choice=choice, index=index, token_id=1000 * choice + index, finish_reason=finish)


def begun(n: int = 1, max_tokens: int = 10, attempts: int = 3) -> RequestLife:
    life = RequestLife(5, n, max_tokens, attempts)
    assert life.start() == [m.Place(K1, "first", max_tokens > 1, None, frozenset(), None)]
    return life


def prefilling(n: int = 1, max_tokens: int = 10, attempts: int = 3) -> RequestLife:
    life = begun(n, max_tokens, attempts)
    assert life.handle(m.Placed(K1, P, D)) == [m.EnterGate(K1, P, 5)]
    assert life.handle(m.LetThrough(K1)) == [m.Reserve(K1, D)]
    assert life.handle(m.Ticketed(K1, D, b"t")) == [m.Prefill(K1, P, b"t")]
    return life


def decoding(n: int = 1, max_tokens: int = 10) -> RequestLife:
    life = prefilling(n, max_tokens)
    firsts = [token(choice, 0) for choice in range(n)]
    assert life.handle(m.FirstTokens(K1, P, firsts)) == [m.PrefillOver(K1), m.Emit(firsts)]
    assert life.handle(m.Committed(K1, D)) == [m.ReleaseLeg(K1, P)]
    return life


def test_the_usual_way() -> None:
    life = decoding()
    assert life.handle(m.Sent(K1, P)) == []
    repeated, second = token(0, 0), token(0, 1)
    assert life.handle(m.Tokens(1, D, [repeated, second])) == [m.Emit([second])]
    last = token(0, 2, "stop")
    assert life.handle(m.Tokens(1, D, [last])) == [m.Emit([last]), m.LegOver(K1), m.End(None)]
    assert life.outcome is Outcome.COMPLETED


def test_decodes_news_may_overtake_prefills() -> None:
    life = prefilling()
    assert life.handle(m.Committed(K1, D)) == [m.PrefillOver(K1), m.ReleaseLeg(K1, P)]
    first = token(0, 0)
    assert life.handle(m.Tokens(1, D, [first])) == [m.Emit([first])]
    assert life.handle(m.FirstTokens(K1, P, [first])) == []


def test_one_token_needs_no_decode_worker() -> None:
    life = begun(max_tokens=1)
    life.handle(m.Placed(K1, P, None))
    assert life.handle(m.LetThrough(K1)) == [m.Prefill(K1, P, b"")]
    last = token(0, 0, "length")
    actions = life.handle(m.FirstTokens(K1, P, [last]))
    assert actions == [m.PrefillOver(K1), m.Emit([last]), m.LegOver(K1), m.ReleaseLeg(K1, P), m.End(None)]


def test_first_token_that_ends_the_request_frees_both_sides() -> None:
    life = prefilling()
    last = token(0, 0, "stop")
    actions = life.handle(m.FirstTokens(K1, P, [last]))
    assert m.ReleaseLeg(K1, P) in actions
    assert m.CancelLeg(K1, D) in actions
    assert actions[-1] == m.End(None)


def test_stop_string_on_the_first_token_cancels_both() -> None:
    life = prefilling()
    life.handle(m.FirstTokens(K1, P, [token(0, 0)]))
    assert life.handle(m.StopMatched(0)) == [m.LegOver(K1), m.CancelLeg(K1, P), m.CancelLeg(K1, D), m.End(None)]


def test_a_choice_stopped_here_is_ended_at_decode_and_the_others_go_on() -> None:
    life = decoding(n=3)
    assert life.handle(m.StopMatched(0)) == [m.CancelChoices(K1, D, (0,))]
    assert life.handle(m.StopMatched(0)) == []
    assert life.handle(m.Tokens(1, D, [token(0, 1)])) == []
    assert life.handle(m.Preempted(K1, D, 0)) == []
    last = [token(1, 1, "length"), token(2, 1, "stop")]
    assert life.handle(m.StopMatched(1)) == [m.CancelChoices(K1, D, (1,))]
    assert life.handle(m.Tokens(1, D, last)) == [m.Emit(last[1:]), m.LegOver(K1), m.CancelLeg(K1, D), m.End(None)]


def test_a_choice_that_a_worker_ended_is_not_ended_again() -> None:
    life = decoding(n=2)
    last = token(0, 1, "stop")
    assert life.handle(m.Tokens(1, D, [last])) == [m.Emit([last])]
    assert life.handle(m.StopMatched(0)) == []


def test_a_choice_stopped_before_the_commit_is_ended_with_it() -> None:
    life = prefilling(n=3)
    life.handle(m.FirstTokens(K1, P, [token(choice, 0) for choice in range(3)]))
    assert life.handle(m.StopMatched(2)) == []
    assert life.handle(m.StopMatched(0)) == []
    assert life.handle(m.Committed(K1, D)) == [m.ReleaseLeg(K1, P), m.CancelChoices(K1, D, (0, 2))]
    assert life.handle(m.Committed(K1, D)) == []


def test_refused_by_decode_tries_another_then_gives_the_reason() -> None:
    life = begun()
    life.handle(m.Placed(K1, P, D))
    life.handle(m.LetThrough(K1))
    full = Exhausted("full")
    assert life.handle(m.Failed(K1, D, full)) == [
        m.PrefillOver(K1),
        m.LegOver(K1),
        m.Place(K2, "retry", True, P, frozenset({D}), full),
    ]
    assert life.handle(m.Unplaceable(K2, full)) == [m.LegOver(K2), m.End(full)]
    assert life.outcome is Outcome.FAILED


def test_an_answer_that_has_begun_waits_while_the_pools_are_full() -> None:
    life = decoding(max_tokens=10)
    life.handle(m.Preempted(K1, D, 0))
    for attempt in range(2, 12):
        key = LegKey(attempt, 0)
        life.handle(m.Placed(key, P, D))
        life.handle(m.LetThrough(key))
        place = life.handle(m.Failed(key, D, Exhausted("full", retry_after_s=2.0)))[-1]
        assert isinstance(place, m.Place)
        assert (place.after_s, place.refused) == (2.0, None)
    assert life.outcome is None


def test_failed_transfer_repeats_with_the_same_prefill_worker() -> None:
    life = prefilling()
    actions = life.handle(m.Failed(K1, D, TransferFailed("checksum")))
    assert actions == [
        m.PrefillOver(K1),
        m.LegOver(K1),
        m.Place(K2, "retry", True, None, frozenset({D}), None, source=P),
    ]


def test_begun_choices_resume_one_by_one_with_their_tokens() -> None:
    life = decoding(n=3)
    life.handle(m.Tokens(1, D, [token(0, 1), token(1, 1), token(2, 1, "stop")]))
    actions = life.handle(m.WorkerLost(D))
    places = [action for action in actions if isinstance(action, m.Place)]
    assert [place.leg for place in places] == [K2, K3]
    assert life.generated(life.legs[2]) == [0, 1]
    assert life.generated(life.legs[3]) == [1000, 1001]
    assert life.handle(m.Placed(K3, P, D2)) == [m.EnterGate(K3, P, 7)]


def test_preempted_choice_moves_and_is_no_retry() -> None:
    life = decoding(n=2)
    assert life.handle(m.Preempted(K1, D, 1)) == [m.Place(LegKey(2, 1), "preempted", True, None, frozenset(), None)]
    assert life.handle(m.Tokens(1, D, [token(1, 1)])) == []  # of the leg that lost it
    assert (life.retries, life.preemptions) == (0, 1)
    for _ in range(10):  # never runs out of attempts
        attempt = max(life.legs)
        key = life.legs[attempt].key
        life.handle(m.Placed(key, P, D))
        life.handle(m.LetThrough(key))
        life.handle(m.Ticketed(key, D, b""))
        life.handle(m.Committed(key, D))
        assert isinstance(life.handle(m.Preempted(key, D, 1))[0], m.Place | m.LegOver)
    assert life.outcome is None


def test_last_wanted_token_of_a_resumed_choice_needs_no_decode_worker() -> None:
    life = decoding(max_tokens=3)
    life.handle(m.Tokens(1, D, [token(0, 1)]))
    place = life.handle(m.WorkerLost(D))[-1]
    assert isinstance(place, m.Place)
    assert not place.needs_decode


def test_attempts_are_bounded() -> None:
    life = begun(attempts=3)
    for attempt in (1, 2, 3):
        key = LegKey(attempt, 0)
        life.handle(m.Placed(key, P, D))
        life.handle(m.LetThrough(key))
        actions = life.handle(m.WorkerLost(P))
        assert m.CancelLeg(key, D) in actions
    assert isinstance(actions[-1], m.End)
    assert isinstance(actions[-1].error, Unavailable)


def test_lost_before_anything_was_sent_is_no_retry() -> None:
    life = begun()
    life.handle(m.Placed(K1, P, D))
    assert life.handle(m.WorkerLost(P)) == [m.PrefillOver(K1), m.Place(K1, "again", True, None, frozenset(), None)]
    assert life.retries == 0


@pytest.mark.parametrize("told", [False, True])
def test_prefill_lost_before_the_commit_is_heard_of_asks_decode(told: bool) -> None:
    """told: of the first tokens, which decode repeats."""
    life = prefilling()
    if told:
        life.handle(m.FirstTokens(K1, P, [token(0, 0)]))
    actions = life.handle(m.WorkerLost(P))
    (asked,) = [action for action in actions if isinstance(action, m.WithdrawLeg)]
    assert (asked.leg, asked.peer, asked.error.retryable) == (K1, D, True)
    assert life.handle(m.Committed(K1, D)) == []
    assert life.handle(m.Unanswered(K1, asked.error)) == []
    said = [token(0, 0), token(0, 1)]
    assert life.handle(m.Tokens(1, D, said)) == [m.Emit(said[told:])]
    assert life.retries == 0
    (place,) = [action for action in life.handle(m.WorkerLost(D)) if isinstance(action, m.Place)]
    assert (place.avoid, place.prefer) == (frozenset({D}), P)


@pytest.mark.parametrize("word", ["it lacks something", "nothing"])
def test_prefill_lost_and_decode_has_not_all_of_it(word: str) -> None:
    life = prefilling()
    life.handle(m.WorkerLost(P))
    error = Unavailable("lost")
    mute = word == "nothing"
    actions = life.handle(m.Unanswered(K1, error) if mute else m.Failed(K1, D, error))
    assert (m.CancelLeg(K1, D) in actions) is mute
    (place,) = [action for action in actions if isinstance(action, m.Place)]
    assert (place.cause, place.avoid, place.prefer) == ("retry", frozenset({P}), None)
    assert life.retries == 1


def test_prefill_lost_after_commit_changes_nothing() -> None:
    life = decoding()
    before = repr(life)
    assert life.handle(m.WorkerLost(P)) == []
    assert life.handle(m.Failed(K1, P, TransferFailed("late"))) == []
    assert repr(life) == before


@pytest.mark.parametrize("error", [InvalidRequest("too long"), InternalError("bug")])
def test_what_cannot_be_retried_ends_the_request_and_frees_the_sibling(error: BatonError) -> None:
    life = prefilling()
    actions = life.handle(m.Failed(K1, P, error))
    assert m.CancelLeg(K1, D) in actions
    assert actions[-1] == m.End(error)


def test_a_prefill_only_leg_that_does_not_end_is_our_error() -> None:
    life = begun(max_tokens=1)
    life.handle(m.Placed(K1, P, None))
    life.handle(m.LetThrough(K1))
    actions = life.handle(m.FirstTokens(K1, P, [token(0, 0)]))
    assert m.CancelLeg(K1, P) in actions
    assert isinstance(actions[-1], m.End)
    assert isinstance(actions[-1].error, InternalError)


def test_stale_attempts_and_strangers_are_ignored() -> None:
    life = prefilling()
    before = repr(life)
    for event in (
        m.Ticketed(K2, D, b"x"),
        m.Ticketed(K1, D2, b"x"),
        m.FirstTokens(K1, P2, [token(0, 0)]),
        m.Committed(K1, P),
        m.Tokens(9, D, [token(0, 0)]),
        m.Tokens(1, D, [token(0, 0)]),  # before commit
        m.Failed(K1, D2, InternalError("x")),
        m.Unplaceable(K1, Unavailable("x")),
        m.Preempted(K1, D, 0),
    ):
        assert life.handle(event) == []
        assert repr(life) == before


# ---- LC-03 ---------------------------------------------------------------------------------------------------------

FINISH, ABORT, TRANSFER_DONE = "finish", "abort", "transfer_done"
_EVENTS: dict[str, Callable[[], list[m.Event]]] = {
    FINISH: lambda: [m.Tokens(1, D, [token(0, 0), token(0, 1, "stop")])],
    ABORT: lambda: [m.GiveUp(Cancelled("left"))],
    TRANSFER_DONE: lambda: [m.Sent(K1, P), m.Committed(K1, D)],
}


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(_EVENTS)))
@pytest.mark.parametrize("stage", ["prefilling", "handover"])
def test_lc_03_finish_abort_and_transfer_done_in_every_order(stage: str, order: tuple[str, ...], twice: bool) -> None:
    world = World(prefilling(), {(K1, P)}, {(K1, D)})
    if stage == "handover":
        world.feed(m.FirstTokens(K1, P, [token(0, 0)]))
    for name in order:
        for event in _EVENTS[name]() * (2 if twice else 1):
            world.feed(event)
    world.check_end()
    assert world.life.outcome in (Outcome.COMPLETED, Outcome.CANCELLED)


# ---- random walks --------------------------------------------------------------------------------------------------


class World:
    """What the workers hold, as the actions and their own news make it."""

    def __init__(self, life: RequestLife, at_prefill: set[tuple[LegKey, Peer]], at_decode: set[tuple[LegKey, Peer]]):
        self.life = life
        self.at_prefill, self.at_decode = at_prefill, at_decode
        self.ends: list[m.End] = []
        self.said: dict[int, list[int]] = {}
        self.todo: list[m.Event] = []  # what the router itself owes: placements, gates
        self.in_gate: set[LegKey] = set()
        self.held: set[tuple[LegKey, Peer, int]] = set()  # choices that left their batch

    def feed(self, event: m.Event, place: Callable[[m.Place], m.Event] | None = None) -> None:
        if isinstance(event, m.WorkerLost):
            self.at_prefill = {held for held in self.at_prefill if held[1] != event.peer}
            self.at_decode = {held for held in self.at_decode if held[1] != event.peer}
            self.held = {held for held in self.held if held[1] != event.peer}
        if isinstance(event, m.Failed):
            self.at_prefill.discard((event.leg, event.peer))
            self.at_decode.discard((event.leg, event.peer))
            self.held = {held for held in self.held if held[:2] != (event.leg, event.peer)}
        if isinstance(event, m.Held) and self._holds(event):
            self.held.add((event.leg, event.peer, event.choice))
        over_before = self.life.outcome
        actions = self.life.handle(event)
        assert not (over_before and actions), "something after the end"
        for action in actions:
            self._do(action, place)
        if isinstance(
            event, m.Tokens | m.Preempted | m.Held | m.FirstTokens
        ):  # the worker frees a leg whose choices all ended or moved
            attempt = event.attempt if isinstance(event, m.Tokens) else event.leg.attempt
            ended = {held for held in self.at_decode if held[0].attempt == attempt and held[1] == event.peer}
            self.at_decode -= ended if attempt not in self.life.legs else set()

    def _holds(self, event: m.Held) -> bool:
        """Whether the worker was asked for this and has not been told to forget it since."""
        leg = self.life.legs.get(event.leg.attempt)
        if leg is None or (leg.decode, leg.key) != (event.peer, event.leg):
            return False
        return event.choice in leg.holding and not self.life.ledgers[event.choice].finished

    def _do(self, action: m.Action, place: Callable[[m.Place], m.Event] | None) -> None:
        match action:
            case m.Place() if place is not None:
                self.todo.append(place(action))
            case m.EnterGate(leg):
                self.in_gate.add(leg)
                self.todo.append(m.LetThrough(leg))
            case m.HandOver(leg, peer, _, held):
                self.at_prefill.discard((held, peer))
                self.held = {one for one in self.held if one[:2] != (held, peer) or one[2] != leg.first_choice}
                self.at_prefill.add((leg, peer))
            case m.CancelHeld(leg, peer, choices):
                self.at_prefill.discard((leg, peer))
                self.held -= {(leg, peer, choice) for choice in choices}
            case m.PrefillOver(leg):
                assert leg in self.in_gate or leg == K1
                self.in_gate.discard(leg)
            case m.Reserve(leg, peer, compute):
                self.at_decode.add((leg, peer))
                if compute:
                    self.in_gate.add(leg)
            case m.Prefill(leg, peer):
                self.at_prefill.add((leg, peer))
            case m.CancelLeg(leg, peer):
                self.at_prefill.discard((leg, peer))
                self.at_decode.discard((leg, peer))
                self.held = {one for one in self.held if one[:2] != (leg, peer)}
            case m.CancelChoices(leg, peer, choices):
                assert (leg, peer) in self.at_decode
                self.held -= {(leg, peer, choice) for choice in choices}
                assert all(self.life.ledgers[choice].stopped_here for choice in choices)
            case m.ReleaseLeg(leg, peer):
                self.at_prefill.discard((leg, peer))
            case m.Emit(tokens):
                for one in tokens:
                    said = self.said.setdefault(one.choice, [])
                    assert one.index == len(said), "a gap or a duplicate"
                    said.append(one.token_id)
            case m.End():
                self.ends.append(action)

    def check_end(self) -> None:
        assert len(self.ends) == 1
        assert not self.life.legs
        assert not self.at_prefill
        assert not self.at_decode
        assert not self.held
        assert not self.in_gate


ERRORS: tuple[BatonError, ...] = (
    Exhausted("full"),
    TransferFailed("link"),
    Unavailable("draining"),
    InternalError("bug"),
    InvalidRequest("too long"),
)


def _tokens(
    life: RequestLife, leg_choices: list[int], rng: random.Random, ahead: int, max_tokens: int
) -> list[pb.Token]:
    made = []
    for choice in leg_choices:
        start = max(0, len(life.ledgers[choice].token_ids) - rng.randrange(2))
        for index in range(start, min(start + ahead, max_tokens)):
            finish = "length" if index + 1 == max_tokens else ("stop" if rng.random() < 0.05 else "")
            made.append(token(choice, index, finish))
            if finish:
                break
    return made


def _news(life: RequestLife, rng: random.Random, max_tokens: int) -> m.Event:
    """Something that a worker, the clock or the client could say now, or could have said earlier."""
    keys = [leg.key for leg in life.legs.values()] + [K1]
    key = rng.choice(keys)
    leg = life.legs.get(key.attempt)
    choices = list(leg.choices) if leg else [0]
    peer_p, peer_d = (leg.prefill, leg.decode) if leg else (P, D)
    peer_p = peer_p or (peer_d if leg and leg.state is LegState.COMPUTING else None)
    peer_p = peer_p if peer_p and rng.random() < 0.95 else rng.choice([P, P2])
    peer_d = peer_d if peer_d and rng.random() < 0.95 else rng.choice([D, D2])
    holding = sorted(leg.holding) if leg else []
    source_key = leg.held if leg and leg.held else key
    options: list[Callable[[], m.Event]] = [
        lambda: m.Ticketed(key, peer_d, b"t"),
        lambda: m.FirstTokens(key, peer_p, _tokens(life, choices, rng, 1, max_tokens)),
        lambda: m.Sent(key, peer_p),
        lambda: m.Committed(key, peer_d),
        lambda: m.Tokens(key.attempt, peer_d, _tokens(life, choices, rng, 2, max_tokens)),
        lambda: m.Tokens(key.attempt, peer_d, _tokens(life, choices, rng, 2, max_tokens)),
        lambda: m.Preempted(key, peer_d, rng.choice(choices)) if choices else m.Sent(key, peer_p),
        lambda: m.StopMatched(rng.randrange(len(life.ledgers))),
        lambda: m.LetThrough(key),
        lambda: m.Migrate(key, rng.choice(choices)) if choices else m.Sent(key, peer_p),
        lambda: m.Held(key, peer_d, rng.choice(holding)) if holding else m.Sent(key, peer_p),
        lambda: m.Held(key, peer_d, rng.choice(holding)) if holding else m.Sent(key, peer_p),
        lambda: m.Wanted(key, peer_p, b"t"),
        lambda: m.FirstTokens(source_key, peer_p, _tokens(life, choices, rng, 1, max_tokens)),
    ]
    if rng.random() < 0.15:
        error = rng.choice(ERRORS)
        options += [lambda: m.Failed(key, rng.choice([peer_p, peer_d]), error)] * 3
        options += [lambda: m.Failed(source_key, peer_p, error)]
        options += [lambda: m.Unsent(key, peer_p, TransferFailed("link"))] * 3
        options += [lambda: m.Unanswered(key, TransferFailed("link"))]
        options += [lambda: m.WorkerLost(rng.choice([peer_p, peer_d]))] * 3
    return rng.choice(options)()


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([1, 2, 6]), st.integers(1, 3))
def test_random_walks_end_once_and_leave_nothing(seed: int, n: int, max_tokens: int, attempts: int) -> None:
    rng = random.Random(seed)
    life = RequestLife(5, n, max_tokens, attempts)
    world = World(life, set(), set())

    def place(action: m.Place) -> m.Event:
        if rng.random() < 0.05:
            return m.Unplaceable(action.leg, Unavailable("nobody"))
        here = action.source is None and rng.random() < 0.3  # the decode worker computes the prompt
        prefill = action.source or (None if here else rng.choice([P, P2]))
        decode = rng.choice([peer for peer in (D, D2) if peer != action.source])
        return m.Placed(action.leg, prefill, decode if action.needs_decode or here else None)

    for action in life.start():
        world._do(action, place)
    for _ in range(rng.randrange(120)):
        if world.todo and rng.random() < 0.6:
            world.feed(world.todo.pop(rng.randrange(len(world.todo))), place)
        else:
            world.feed(_news(life, rng, max_tokens), place)
    if life.outcome is None:
        world.feed(m.GiveUp(rng.choice([Cancelled("left"), DeadlineExceeded("late")])), place)
    world.check_end()
    for said in world.said.values():
        assert len(said) <= max_tokens


# ---- the table -----------------------------------------------------------------------------------------------------


def test_every_state_can_be_dropped_and_over_is_final() -> None:
    for state in LegState:
        assert ((state, LegEvent.DROP) in TABLE) == (state is not LegState.OVER)
        assert state is not LegState.OVER or not any(row == state for row, _ in TABLE)


def test_whoever_may_hold_something_is_told_when_the_leg_is_over() -> None:
    before_commit = {LegState.PREFILLING, LegState.HANDOVER, LegState.RESENDING}
    holds_decode = before_commit | {LegState.RESERVING, LegState.REBOOKING, LegState.ASKING, LegState.DECODING}
    holds_source = {LegState.REPLACING, LegState.REBOOKING}
    for (state, event), rule in TABLE.items():
        if rule.state is not LegState.OVER or event is LegEvent.FINISHED:
            continue
        if state in holds_decode and event is not LegEvent.DECODE_GONE:
            assert Do.CANCEL_DECODE in rule.actions, (state, event)
        if state in before_commit and event is not LegEvent.PREFILL_GONE:
            assert {Do.CANCEL_PREFILL, Do.RESEND} & set(rule.actions), (state, event)
        if state in holds_source and event is not LegEvent.PREFILL_GONE:
            assert {Do.CANCEL_HELD, Do.RESEND} & set(rule.actions), (state, event)
