"""The story of a request: bounded, without prompts, with what was dropped; over HTTP to this host, and in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from baton.proto import worker_pb2 as pb
from baton.proto.errors import TransferFailed
from baton.router import life_messages as m
from baton.router.life_messages import LegKey, Peer
from baton.router.story import MAX_ENDED, MAX_ENTRIES, Stories, Story, describe_action, describe_event
from baton.tests.harness.router_rig import router_rig

P, D = Peer("prefill-0", "aaaaaaaaaaaa"), Peer("decode-0", "bbbbbbbbbbbb")
LEG = LegKey(2, 0)


def test_every_kind_of_news_has_a_line() -> None:
    error = TransferFailed("cut")
    assert describe_event(m.Ticketed(LEG, D, b"secret")) == "decode-0/bbbbbbbb: ticketed attempt 2"
    assert describe_event(m.Failed(LegKey(2, 1), P, error)) == (
        "prefill-0/aaaaaaaa: attempt 2.1 failed: transfer_failed (cut)"
    )
    assert describe_event(m.WorkerLost(D)) == "router: decode-0/bbbbbbbb is lost"
    assert describe_action(m.Reserve(LEG, D)) == "to decode-0/bbbbbbbb: reserve attempt 2"
    assert describe_action(m.Place(LEG, "retry", True, None, frozenset({D}), None, 0.5)) == (
        "router: place attempt 2 (retry; in 0.5 s; not decode-0/bbbbbbbb)"
    )
    assert describe_action(m.End(None)) == "router: ended: completed"


def test_steps_are_one_line_and_what_is_dropped_is_marked() -> None:
    story = Story("r", 10.0)
    for step in range(40):
        story.heard(10.0 + step, m.Tokens(1, D, [pb.Token(token_id=12345)]), heeded=True)
    story.heard(50.0, m.Committed(LEG, D), heeded=False)
    assert story.lines() == [
        "    0.000 s  decode-0/bbbbbbbb: tokens of attempt 1  (40 times, until 39.000 s)",
        "   40.000 s  decode-0/bbbbbbbb: committed attempt 2  -- dropped",
    ]


def test_a_story_and_the_shelf_are_bounded() -> None:
    stories = Stories()
    for number in range(MAX_ENDED + 1):
        stories.begin(f"r{number}", 0.0)
        stories.end(f"r{number}")
    assert stories.find("r0") is None
    story = stories.find("r1")
    assert story is not None
    for attempt in range(MAX_ENTRIES + 5):
        story.did(1.0, m.Reserve(LegKey(attempt, 0), D))
    assert len(story.lines()) == MAX_ENTRIES + 1
    assert story.lines()[0] == "(5 earlier entries are forgotten)"


async def test_the_router_tells_it_to_its_own_host_and_logs_what_went_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        body = {"prompt": "a secret prompt", "max_tokens": 4}
        answer = await rig.http.post("/v1/completions", json=body)
        request_id = answer.headers["x-request-id"]
        told = (await rig.http.get(f"/debug/requests/{request_id}")).json()
        assert told["id"] == request_id
        lines = [line.split("s  ", 1)[1].strip() for line in told["story"]]
        assert lines[0] == "router: place attempt 1 (first)"
        assert "to decode-0/1: reserve attempt 1" in lines
        assert "decode-0/1: committed attempt 1" in lines
        assert lines[-1] == "router: ended: completed"
        assert "secret" not in str(told)
        through_proxy = {"x-forwarded-for": "203.0.113.9"}
        assert (await rig.http.get(f"/debug/requests/{request_id}", headers=through_proxy)).status_code == 404
        assert (await rig.http.get("/debug/requests/req-unknown")).status_code == 404

        async def fail(leg: pb.Leg, ticket: bytes) -> None:
            rig.cluster["prefill-0"].fail(leg, "internal", "broken")

        rig.cluster["prefill-0"].on_prefill = fail
        with caplog.at_level(logging.WARNING, "baton.router.core"):
            answer = await rig.http.post("/v1/completions", json=body)
        assert answer.status_code == 500
        (record,) = [record for record in caplog.records if "story" in record.getMessage()]
        assert "prefill-0/1: attempt 1 failed: internal (broken)" in record.getMessage()
        assert "secret" not in record.getMessage()
