"""What is started, drained, stopped and restarted, and when: pure decisions on a clock that the test moves."""

from __future__ import annotations

import pytest
from baton.cluster.membership import EMPTY, Member
from baton.cluster.reconcile import (
    Backoff,
    Drain,
    Forget,
    Observed,
    Start,
    Stop,
    enter,
    members,
    pool_of,
    reconcile,
    scaled,
)
from hypothesis import given
from hypothesis import strategies as st

BACKOFF = Backoff(0.5, 30.0)
WORKERS = st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"])
STATES = st.sampled_from(["starting", "ready", "draining", "stopping", "dead"])


def test_everything_wanted_is_started_once() -> None:
    actions, wake = reconcile({"decode-0", "prefill-0"}, {}, 0.0, BACKOFF)
    assert actions == [Start("decode-0"), Start("prefill-0")]
    assert wake is None
    observed = {"decode-0": Observed("starting", 0.0), "prefill-0": Observed("ready", 0.0)}
    assert reconcile(observed, observed, 1.0, BACKOFF) == ([], None)


def test_a_dead_worker_is_restarted_after_a_delay_that_doubles() -> None:
    worker = Observed("ready", 10.0)
    for failures, delay in [(1, 0.5), (2, 1.0), (3, 2.0)]:
        worker = BACKOFF.died(worker, 11.0)
        assert worker == Observed("dead", 11.0, failures)
        assert reconcile({"decode-0"}, {"decode-0": worker}, 11.0, BACKOFF) == ([], 11.0 + delay)
        assert reconcile({"decode-0"}, {"decode-0": worker}, 11.0 + delay, BACKOFF) == ([Start("decode-0")], None)
    assert Backoff(0.5, 30.0).delay(1000) == 30.0


def test_a_worker_that_was_ready_for_long_starts_counting_again() -> None:
    assert BACKOFF.died(Observed("ready", 0.0, 5), 31.0).failures == 1
    assert BACKOFF.died(Observed("ready", 0.0, 5), 29.0).failures == 6
    assert BACKOFF.died(Observed("starting", 0.0, 5), 99.0).failures == 6


@pytest.mark.parametrize(
    ("state", "action"),
    [
        ("ready", Drain("decode-0")),
        ("starting", Stop("decode-0")),
        ("dead", Forget("decode-0")),
        ("draining", None),
        ("stopping", None),
    ],
)
def test_an_unwanted_worker_leaves_by_the_way_of_its_state(state: str, action: object) -> None:
    observed = {"decode-0": Observed(state, 0.0)}  # type: ignore[arg-type]
    assert reconcile(set(), observed, 1.0, BACKOFF) == ([action] if action else [], None)


def test_a_worker_wanted_again_while_it_leaves_is_started_after_its_end() -> None:
    leaving = {"decode-0": Observed("stopping", 0.0)}
    assert reconcile({"decode-0"}, leaving, 1.0, BACKOFF) == ([], None)
    dead = {"decode-0": enter(leaving["decode-0"], "dead", 2.0)}
    assert reconcile({"decode-0"}, dead, 2.0, BACKOFF)[0] == [Start("decode-0")]


@given(st.sets(WORKERS), st.dictionaries(WORKERS, st.builds(Observed, STATES, st.floats(0, 10), st.integers(0, 9))))
def test_no_worker_gets_two_actions_and_none_that_its_state_forbids(
    wanted: set[str], observed: dict[str, Observed]
) -> None:
    actions, wake = reconcile(wanted, observed, 5.0, BACKOFF)
    assert len({action.worker_id for action in actions}) == len(actions)
    assert wake is None or wake > 5.0
    for action in actions:
        state = observed[action.worker_id].state if action.worker_id in observed else None
        allowed: dict[type, set[str | None]] = {
            Start: {None, "dead"},
            Drain: {"ready"},
            Stop: {"starting"},
            Forget: {"dead"},
        }
        assert state in allowed[type(action)]
        assert (action.worker_id in wanted) == isinstance(action, Start)


def test_scaling_takes_the_highest_and_adds_the_lowest_numbers() -> None:
    wanted = frozenset({"prefill-0", "decode-0", "decode-2", "decode-10"})
    assert members("decode", wanted) == ["decode-0", "decode-2", "decode-10"]
    assert scaled(wanted, wanted, "decode", 2) == {"prefill-0", "decode-0", "decode-2"}
    assert scaled(wanted, wanted, "decode", 5) == wanted | {"decode-1", "decode-3"}
    assert scaled(wanted, wanted, "decode", 3) == wanted


def test_the_name_of_a_draining_worker_is_not_given_out_again() -> None:
    wanted = frozenset({"prefill-0", "decode-1"})
    assert scaled(wanted, {*wanted, "decode-0"}, "decode", 2) == wanted | {"decode-2"}


@pytest.mark.parametrize("name", ["", "decode", "decode-x", "router-0", "decode-0 "])
def test_other_names_are_no_workers(name: str) -> None:
    with pytest.raises(ValueError, match="no worker id"):
        pool_of(name)


def test_each_change_of_the_view_is_a_new_version_and_no_change_is_none() -> None:
    member = Member("decode-0", "a", "decode", "h:1", "ready", 7, "n", 2, 0)
    view = EMPTY.put(member)
    assert (view.version, view.ready("decode"), view.ready("prefill")) == (1, [member], [])
    assert view.put(member) is view
    assert view.change("decode-0", "ready") is view
    assert view.change("decode-9", "dead") is view
    draining = view.change("decode-0", "draining")
    assert (draining.version, draining.ready("decode"), view.ready("decode")) == (2, [], [member])
    assert draining.drop("decode-0").members == {}
    assert draining.drop("decode-9") is draining
    wire = draining.to_wire()
    assert (wire.version, wire.members[0].worker_id, wire.members[0].tensor_parallel) == (2, "decode-0", 2)
