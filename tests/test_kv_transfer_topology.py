"""Which carrier a link uses, by where the two pools are and what the two sides ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from baton.kv_transfer.events import SendFailed, Sent
from baton.kv_transfer.topology import Place, choose, place_here
from baton.tests.harness.kv_raw_peer import PROMPT, QUICK, SHAPE, RawPeer
from baton.tests.harness.kv_rig import LEG, PARAMS, rig

HERE, THERE = Place("here", "cpu"), Place("there", "cpu")
GPU, FAR_GPU = Place("here", "cuda"), Place("there", "cuda")


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (HERE, HERE, "shm"),
        (HERE, THERE, "inline"),
        (GPU, GPU, "nccl"),
        (GPU, FAR_GPU, "nccl"),
        (GPU, HERE, "inline"),
        (HERE, GPU, "inline"),
    ],
)
def test_auto_follows_the_topology(prefill: Place, decode: Place, expected: str) -> None:
    assert choose(("auto", prefill), ("auto", decode), False) == (expected, "")
    assert choose(("auto", prefill), ("auto", decode), True) == ("inline", "")


@pytest.mark.parametrize("name", ["inline", "shm", "gloo", "nccl", "cuda_ipc"])
def test_a_named_carrier_is_used_where_it_is_possible(name: str) -> None:
    near = GPU if name in ("nccl", "cuda_ipc") else HERE
    far = replace(near, host="there")
    for asks in ((name, name), (name, "auto"), ("auto", name)):
        assert choose((asks[0], near), (asks[1], near), False) == (name, "")
        agreed, reason = choose((asks[0], near), (asks[1], far), False)
        assert (agreed, bool(reason)) == (("inline", True) if name in ("shm", "cuda_ipc") else (name, False))
        agreed, reason = choose((asks[0], near), (asks[1], near), True)
        assert agreed == "inline"
        assert ("kv.tls" in reason) == (name != "inline")


@pytest.mark.parametrize(
    ("asks", "places", "reason"),
    [
        (("gloo", "inline"), (HERE, HERE), "prefill wants gloo, decode wants inline"),
        (("nccl", "nccl"), (GPU, HERE), "the pool of decode is on cpu"),
        (("cuda_ipc", "auto"), (HERE, GPU), "the pool of prefill is on cpu"),
        (("shm", "shm"), (GPU, GPU), "the pool of prefill is on cuda"),
        (("shm", "shm"), (HERE, THERE), "not on the same host"),
        (("rdma", "auto"), (HERE, HERE), "no such carrier"),
    ],
)
def test_what_is_impossible_falls_back_to_inline_with_a_reason(
    asks: tuple[str, str], places: tuple[Place, Place], reason: str
) -> None:
    agreed, why = choose((asks[0], places[0]), (asks[1], places[1]), False)
    assert agreed == "inline"
    assert reason in why


def test_a_place_is_the_same_for_every_process_here_and_survives_the_way() -> None:
    here = place_here("cpu")
    assert place_here("cpu") == here
    assert "net:[" in here.host
    assert Place.unpack(here.pack()) == here
    wrongs: tuple[Any, ...] = (None, "here", ["a"], ["a", 1], ["a", "cpu", "x"], ["a" * 300, "cpu"], {})
    for wrong in wrongs:
        with pytest.raises(ValueError, match="not a place"):
            Place.unpack(wrong)


def test_a_host_that_cannot_be_told_is_like_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*_: Any, **__: Any) -> Any:
        raise OSError

    monkeypatch.setattr("builtins.open", no_file)
    assert place_here("cpu") != place_here("cpu")


def test_two_links_of_one_pair_may_differ_and_the_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    with rig(SHAPE, SHAPE, replace(PARAMS, transport="nccl")) as pair:
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)
        assert not pair.sent[0].of(SendFailed)
    told = [record for record in caplog.records if "stays inline" in record.getMessage()]
    assert len(told) == 1
    assert "nccl is not possible: the pool of prefill is on cpu" in told[0].getMessage()


def test_auto_between_two_cpu_pools_of_one_host_is_shm() -> None:
    with rig(SHAPE, SHAPE, replace(PARAMS, transport="auto")) as pair:
        pair.send(LEG, PROMPT)
        pair.sent[0].wait(Sent)
        pair.assert_equal(PROMPT)
        assert [link._window.carrier.name for link in pair.receivers[0]._links] == ["shm"]


def test_a_hello_without_a_place_is_refused() -> None:
    with rig(SHAPE, SHAPE, QUICK) as pair:
        peer = RawPeer(pair, pair.reserve(LEG, PROMPT, 0, pair.target_blocks(PROMPT)), place=None)
        assert isinstance(peer.answer, dict)
        assert peer.answer["kind"] == "refused"
        peer.wire.close()
