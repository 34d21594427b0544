"""slow-P: every prefill chunk takes a while, so that what happens during a prompt can be seen.

What must happen before a prompt is computed happens while it stands at a gate: then no machine is too slow for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from baton.cluster.admin import show_story
from baton.tests.harness.client import Stream, expect_status
from baton.tests.harness.gates import Gates
from baton.tests.harness.one_pair import leave, until
from baton.tests.harness.oracles import total
from baton.tests.harness.rig import Rig, merged, running, tiny_config

CHUNK, CHUNK_S = 8, 0.1
TRAVEL_S = 1.0  # more than what the router has decided takes to P


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Gates:
    actions = {"prefill.chunk": f"sleep({CHUNK_S})", "prefill.chunk_done": "gate"}
    return Gates(tmp_path_factory.mktemp("gates"), actions)


@pytest.fixture(scope="module")
def cluster(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Iterator[Rig]:
    changes = {"pools.prefill.max_batch_tokens": CHUNK, "pools.decode.memory": 128 * 2048}
    with running(tmp_path_factory.mktemp("slow"), merged(tiny_config(tiny_dir), changes), gates) as rig:
        yield rig


@pytest.fixture
def rig(cluster: Rig, gates: Gates) -> Iterator[Rig]:
    yield cluster
    gates.release_all()
    cluster.quiesce()


def ids(length: int, start: int = 0) -> list[int]:
    """A prompt of byte tokens that differs with `start`."""
    return [(start * 31 + i * i * 7 + i) % 256 for i in range(length)]


def _computed(rig: Rig) -> float:
    return total(rig.metrics(), "baton_computed_prompt_tokens_total", role="prefill")


def test_lc_06_a_client_that_leaves_stops_its_prompt(rig: Rig, gates: Gates) -> None:
    """In its third chunk of 25: who comes next does not wait for the others."""
    before = _computed(rig)
    gates.close("prefill.chunk_done")
    stream = rig.client.stream(token_ids=ids(200, start=1), max_tokens=4, temperature=0)
    for _ in range(2):
        gates.wait_reached("prefill.chunk_done")
        gates.let_one("prefill.chunk_done")
    gates.wait_reached("prefill.chunk_done")
    leave(rig, stream)
    time.sleep(TRAVEL_S)
    gates.release("prefill.chunk_done")
    answer = rig.client.generate(token_ids=ids(4, start=2), max_tokens=1, temperature=0)
    assert len(answer.token_ids) == 1
    rig.quiesce()
    assert _computed(rig) - before <= 4 * CHUNK + 4 + 2  # one may begin before P hears of it; then the next, the probe


def _too_late(rig: Rig, gates: Gates, prompt: list[int]) -> None:
    """A client whose deadline passes while its prompt is computed."""
    gates.close("prefill.chunk_done")
    stream = rig.client.stream(timeout_s=0.3, token_ids=prompt, max_tokens=4, temperature=0)
    with expect_status() as status:
        stream.rest()
    assert status[0][0] == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: not total(rig.metrics(), "baton_router_inflight_requests"), "the deadline is not noticed")
    time.sleep(CHUNK_S)
    gates.release("prefill.chunk_done")


def test_lc_06_a_retry_storm_does_not_prefill_for_the_dead(rig: Rig, gates: Gates) -> None:
    """A client whose deadline is shorter than the prefill, five times."""
    before = _computed(rig)
    for _ in range(5):
        _too_late(rig, gates, ids(160, start=3))
    rig.quiesce()
    assert _computed(rig) - before <= 5 * 6 * CHUNK + 2 * CHUNK


def test_api_10_a_deadline_reaches_every_leg(rig: Rig, gates: Gates) -> None:
    before = _computed(rig)
    _too_late(rig, gates, ids(200, start=4))
    rig.quiesce()
    assert _computed(rig) - before < 100  # of 200 tokens


def test_sp_04_short_prompts_do_not_wait_for_a_long_one(rig: Rig, gates: Gates) -> None:
    def begin(i: int, length: int) -> Stream:
        stream = rig.client.stream(token_ids=ids(length, start=10 + i), max_tokens=1, temperature=0)
        next(iter(stream))  # accepted
        return stream

    def ended(stream: Stream) -> float:
        answer = stream.rest()
        assert len(answer.token_ids) == 1
        return answer.arrivals[-1]

    gates.close("prefill.chunk_done")
    streams = [begin(0, 200)]
    gates.wait_reached("prefill.chunk_done")
    streams += [begin(i, 4) for i in range(1, 11)]
    time.sleep(CHUNK_S)
    gates.release("prefill.chunk_done")
    with ThreadPoolExecutor(11) as pool:
        long, *shorts = pool.map(ended, streams)
    assert sorted(shorts)[len(shorts) // 2] < long  # which alone takes 25 chunks; it still ends


def test_an_operator_reads_the_story_of_a_request(rig: Rig, gates: Gates, capsys: pytest.CaptureFixture[str]) -> None:
    """`baton status --request`: where it was when the client left."""
    gates.close("prefill.chunk_done")
    stream = rig.client.stream(token_ids=ids(120, start=6), max_tokens=2, temperature=0)
    next(iter(stream))
    request_id = stream.answer.request_id
    gates.wait_reached("prefill.chunk_done")
    leave(rig, stream)
    gates.release("prefill.chunk_done")
    rig.quiesce()
    assert show_story(rig.admin, request_id, as_json=False) == 0
    story = capsys.readouterr().out
    assert story.startswith(f"{request_id}\n")
    for line in ("to decode-0/", "to prefill-0/", "router: gives up: cancelled"):
        assert line in story
    assert show_story(rig.admin, "req-unknown", as_json=True) == 1
    assert "no such request" in capsys.readouterr().err


def test_ob_03_alive_and_ready_while_busy(rig: Rig) -> None:
    stream = rig.client.stream(token_ids=ids(120, start=5), max_tokens=2, temperature=0)
    for _ in range(5):
        assert httpx.get(f"{rig.http}/health", timeout=30).status_code == 200
        assert httpx.get(f"{rig.http}/ready", timeout=30).status_code == 200
        time.sleep(CHUNK_S)
    stream.rest()
