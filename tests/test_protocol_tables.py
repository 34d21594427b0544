"""The protocol is tables: terminal states are reached once, what a table does not list changes nothing, and
docs/architecture.md shows the tables as they are in the code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from baton.decode_worker.intake import Intake, Reservation
from baton.decode_worker.intake_table import TABLE as INTAKE
from baton.decode_worker.intake_table import IntakeEvent, IntakeState
from baton.engine.block_pool import BlockPool
from baton.kv_transfer.handoff import RECEIVE, SEND, Handoff
from baton.proto import worker_pb2 as pb
from baton.proto.errors import TransferFailed
from baton.proto.leg import Leg
from baton.router import life_messages as m
from baton.router.leg_table import TABLE as LEG
from baton.router.leg_table import LegEvent, LegState
from baton.router.life_messages import Peer
from baton.router.request_life import RequestLife
from baton.tests.harness.legs_rig import BLOCK, leg
from baton.tests.harness.protocol_tables import BEGIN, END, Row, handoff_rows, intake_rows, leg_rows, rendered

P, D = Peer("prefill-0", "a"), Peer("decode-0", "a")
LOST = TransferFailed("the link was lost")
TABLES = {
    "leg": (leg_rows(), "placing", {"over"}),
    "intake": (intake_rows(), "waiting", {"committed", "gone"}),
    "send": (handoff_rows(SEND), "sending", {"sent", "failed", "abandoned", "cancelled"}),
    "receive": (handoff_rows(RECEIVE), "expecting", {"complete", "failed", "abandoned", "forgotten"}),
}


@pytest.mark.parametrize("name", TABLES)
def test_terminal_states_end_it_and_can_always_be_reached(name: str) -> None:
    rows, first, terminal = TABLES[name]
    assert not [row for row in rows if row[0] in terminal]
    states = {row[0] for row in rows} | {row[2] for row in rows}
    assert _reach({first, "replacing"} if name == "leg" else {first}, rows) == states
    for state in states - terminal:
        assert _reach({state}, rows) & terminal, state


def _reach(states: set[str], rows: list[Row]) -> set[str]:
    more = states | {row[2] for row in rows if row[0] in states}
    return states if more == states else _reach(more, rows)


def test_the_architecture_shows_the_tables_of_the_code() -> None:
    text = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
    shown = text[text.index(BEGIN) : text.index(END)] + END + "\n"
    assert shown == rendered(), "run python -m baton.tests.harness.protocol_tables and paste"


# ---- the router ----------------------------------------------------------------------------------------------


def life_in(state: LegState) -> RequestLife:
    """A request whose only leg is in this state."""
    life = RequestLife(5, 1, 10, 9)
    life.start()
    here = state is LegState.COMPUTING
    for _ in range(20):
        (only,) = life.legs.values()
        if only.state is state:
            return life
        step: dict[LegState, Callable[[], m.Event]] = {
            LegState.PLACING: lambda: m.Placed(only.key, None if here else P, D),  # noqa: B023 (called at once)
            LegState.QUEUED: lambda: m.LetThrough(only.key),  # noqa: B023
            LegState.RESERVING: lambda: m.Ticketed(only.key, D, b"t"),  # noqa: B023
            LegState.PREFILLING: lambda: m.FirstTokens(only.key, P, [pb.Token(token_id=7)]),  # noqa: B023
            LegState.REPLACING: lambda: m.Placed(only.key, P, D),  # noqa: B023
            LegState.REBOOKING: lambda: m.Ticketed(only.key, D, b"t"),  # noqa: B023
        }
        resend = state in (LegState.REPLACING, LegState.REBOOKING, LegState.RESENDING)
        step[LegState.HANDOVER] = lambda: m.Failed(only.key, D, LOST) if resend else m.Committed(only.key, D)  # noqa: B023
        if state is LegState.ASKING:
            step[LegState.PREFILLING] = lambda: m.WorkerLost(P)
        life.handle(step[only.state]())
    raise AssertionError(f"no way to {state}")


NEWS: dict[LegEvent, Callable[[m.LegKey], m.Event]] = {
    LegEvent.PLACED: lambda key: m.Placed(key, P, D),
    LegEvent.PLACED_TOGETHER: lambda key: m.Placed(key, None, D),
    LegEvent.LET_THROUGH: lambda key: m.LetThrough(key),
    LegEvent.TICKET: lambda key: m.Ticketed(key, D, b"t"),
    LegEvent.FIRST_TOKENS: lambda key: m.FirstTokens(key, P, [pb.Token(token_id=7)]),
    LegEvent.SENT: lambda key: m.Sent(key, P),
    LegEvent.UNSENT: lambda key: m.Unsent(key, P, LOST),
    LegEvent.UNANSWERED: lambda key: m.Unanswered(key, LOST),
    LegEvent.COMMITTED: lambda key: m.Committed(key, D),
    LegEvent.TOKENS: lambda key: m.Tokens(key.attempt, D, [pb.Token(index=1, token_id=8)]),
    LegEvent.PREEMPTED: lambda key: m.Preempted(key, D, 0),
    LegEvent.HOLD: lambda key: m.Migrate(key, 0),
    LegEvent.HELD: lambda key: m.Held(key, D, 0),
    LegEvent.PREFILL_GONE: lambda key: m.Failed(key, P, LOST),
    LegEvent.PREFILL_LOST: lambda key: m.WorkerLost(P),
    LegEvent.DECODE_GONE: lambda key: m.Failed(key, D, LOST),
}
ALIVE = [state for state in LegState if state is not LegState.OVER]


@pytest.mark.parametrize("state", ALIVE)
@pytest.mark.parametrize("event", NEWS)
def test_what_the_legs_table_does_not_list_changes_nothing(state: LegState, event: LegEvent) -> None:
    life = life_in(state)
    (only,) = life.legs.values()
    if event is LegEvent.HELD:
        only.holding.add(0)
    before = (repr(life), repr(only))
    key = only.held or only.key if event is LegEvent.PREFILL_GONE else only.key  # as the source knows it
    news = NEWS[event](key)
    if state is LegState.COMPUTING and isinstance(news, m.FirstTokens):
        news = dataclasses.replace(news, peer=D)
    actions = life.handle(news)
    legal = (state, event) in LEG
    if event is LegEvent.PREFILL_LOST:  # where D cannot have the KV, the loss is like a failure
        legal = legal or (state, LegEvent.PREFILL_GONE) in LEG
    assert life.heeded is legal
    if not legal:
        assert actions == []
        holding = before[1].replace("holding={0}", "holding=set()")  # a hold that nobody waits for any more
        assert (repr(life), repr(only)) in (before, (before[0], holding))


@pytest.mark.parametrize("state", ALIVE)
def test_news_of_another_attempt_or_worker_changes_nothing(state: LegState) -> None:
    life = life_in(state)
    (only,) = life.legs.values()
    before = (repr(life), repr(only))
    stale, stranger = only.key._replace(attempt=only.key.attempt + 1), Peer("decode-0", "b")
    for event, news in NEWS.items():
        if event is not LegEvent.PREFILL_LOST:  # of a worker, not of a leg
            assert life.handle(news(stale)) == [], event
    for said in (
        m.Ticketed(only.key, stranger, b"t"),
        m.Committed(only.key, stranger),
        m.Failed(only.key, stranger, LOST),
    ):
        assert life.handle(said) == []
    assert (repr(life), repr(only)) == before


# ---- the decode worker ---------------------------------------------------------------------------------------


class IntakeRig:
    """One leg's way in, with two ranks."""

    def __init__(self) -> None:
        self.pool = BlockPool(4, BLOCK, True)
        self.intake = Intake(self.pool, 2, 4, reserve_wait_s=100.0, commit_timeout_s=50.0)
        self.leg: Leg = leg(5)
        self.intake.submit(1, self.leg, 0.0)
        self.reservation: Reservation | None = None

    def apply(self, event: IntakeEvent) -> None:
        """As the book does."""
        key, intake = self.leg.key, self.intake
        match event:
            case IntakeEvent.BLOCKS:
                self.reservation = intake.admit(0, 0.0) or self.reservation
            case IntakeEvent.KV:
                for rank in range(2):
                    intake.arrived(key, rank, 10, 1, 0.0)
            case IntakeEvent.FIRST_TOKENS:
                intake.first_tokens(key, pb.FirstTokens(), 0.0)
            case IntakeEvent.TAKE | IntakeEvent.END:
                intake.waiting.pop(key, None)
                intake.take(key)

    @property
    def state(self) -> IntakeState:
        """Where the leg is."""
        if self.leg.key in self.intake.waiting:
            return IntakeState.WAITING
        return self.reservation.state if self.reservation else IntakeState.GONE

    def seen(self) -> tuple[object, ...]:
        """Everything that could change."""
        return (repr(self.intake), repr(self.reservation), self.pool.used, self.state)


WAYS: dict[IntakeState, tuple[IntakeEvent, ...]] = {
    IntakeState.WAITING: (),
    IntakeState.RESERVED: (IntakeEvent.BLOCKS,),
    IntakeState.COVERED: (IntakeEvent.BLOCKS, IntakeEvent.KV),
    IntakeState.SAMPLED: (IntakeEvent.BLOCKS, IntakeEvent.FIRST_TOKENS),
    IntakeState.COMPLETE: (IntakeEvent.BLOCKS, IntakeEvent.KV, IntakeEvent.FIRST_TOKENS),
    IntakeState.COMMITTED: (IntakeEvent.BLOCKS, IntakeEvent.KV, IntakeEvent.FIRST_TOKENS, IntakeEvent.TAKE),
    IntakeState.GONE: (IntakeEvent.BLOCKS, IntakeEvent.END),
}


@pytest.mark.parametrize("state", IntakeState)
@pytest.mark.parametrize("event", IntakeEvent)
def test_what_the_intakes_table_does_not_list_changes_nothing(state: IntakeState, event: IntakeEvent) -> None:
    if (state, event) == (IntakeState.COMPLETE, IntakeEvent.END) or event is IntakeEvent.TAKE:
        return  # the batch takes a complete leg in the same breath, and asks for no other
    rig = IntakeRig()
    for step in WAYS[state]:
        rig.apply(step)
    assert rig.state is state
    before = rig.seen()
    rig.apply(event)
    following = INTAKE.get((state, event))
    if following is None:
        assert rig.seen() == before
    else:
        assert rig.state is following


# ---- the handoff ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("table", "first"), [(SEND, "sending"), (RECEIVE, "expecting")])
def test_what_a_handoffs_table_does_not_list_changes_nothing(table: dict[tuple[str, str], str], first: str) -> None:
    states = {first} | set(table.values())
    for state in states:
        for event in {event for _, event in (*SEND, *RECEIVE)}:
            handoff = Handoff(table, state)
            assert handoff.on(event) == ((state, event) in table)
            assert handoff.state == table.get((state, event), state)
