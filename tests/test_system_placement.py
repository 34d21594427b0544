"""Two workers of each kind: where requests go, and what the router's numbers say meanwhile (SP-06, SP-07)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from baton.tests.harness.gates import Gates
from baton.tests.harness.one_pair import until
from baton.tests.harness.oracles import beating, total
from baton.tests.harness.rig import Rig, merged, running, tiny_config

LONG: dict[str, Any] = {"max_tokens": 80, "temperature": 0, "ignore_eos": True}


def ids(length: int, start: int) -> list[int]:
    """A prompt of byte tokens that differs with `start`."""
    return [(start * 31 + i * i * 7 + i) % 256 for i in range(length)]


@pytest.fixture(scope="module", params=[pytest.param("round_robin", marks=pytest.mark.slow), "least_loaded"])
def cluster(
    request: pytest.FixtureRequest, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Rig, Gates]]:
    changes = {
        "pools.prefill.replicas": 2,
        "pools.decode.replicas": 2,
        "pools.decode.memory": 128 * 2048,  # blocks x bytes: all streams of a test fit at the same time
        "router.placement": {"prefill": request.param, "decode": request.param},
    }
    folder = tmp_path_factory.mktemp("placement")
    gates = Gates(folder / "gates", {"prefill.chunk": "gate"})
    with running(folder, merged(tiny_config(tiny_dir), changes), gates) as rig:
        yield request.param, rig, gates


@pytest.fixture
def rig(cluster: tuple[str, Rig, Gates]) -> Iterator[Rig]:
    yield cluster[1]
    cluster[1].quiesce()


def _places(rig: Rig, requests: int) -> list[tuple[str, str]]:
    places = []
    for i in range(requests):
        timing = rig.client.generate(token_ids=ids(12, i), max_tokens=3, temperature=0, ignore_eos=True).timing
        places.append((timing.prefill_worker, timing.decode_worker))
    return places


@contextmanager
def _probes(rig: Rig) -> Iterator[None]:
    """Health and readiness over HTTP, five times a second."""
    stop = threading.Event()

    def probe() -> None:
        while not stop.wait(0.2):
            for path in ("/health", "/ready", "/metrics", "/v1/models"):
                httpx.get(rig.http + path, timeout=30)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_sp_07_probes_do_not_move_traffic(cluster: tuple[str, Rig, Gates], rig: Rig) -> None:
    policy, _, _ = cluster
    before = total(rig.metrics(), "baton_time_to_first_token_seconds_count")
    quiet = _places(rig, 40)
    with _probes(rig):
        probed = _places(rig, 40)
    assert total(rig.metrics(), "baton_time_to_first_token_seconds_count") == before + 80
    if policy == "round_robin":
        assert probed == quiet
        assert len(set(quiet)) == 2
    else:
        for places in (quiet, probed):
            assert min(Counter(prefill for prefill, _ in places).values()) >= 3


def test_sp_06_counts_follow_the_streams(cluster: tuple[str, Rig, Gates], rig: Rig) -> None:
    """Eight long streams are spread evenly; gauges are never negative and say what runs until the last has ended."""
    gates = cluster[2]

    def one(i: int) -> str:
        return rig.client.generate(token_ids=ids(16, i), **LONG).timing.decode_worker

    seen: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            metrics = rig.metrics()
            running_now = metrics["baton_worker_running"]
            seen.extend(running_now.values())
            seen.extend(metrics["baton_router_inflight_requests"].values())

    watcher = threading.Thread(target=watch)
    watcher.start()
    gates.close("prefill.chunk")  # nobody ends before all have been placed
    try:
        with ThreadPoolExecutor(8) as pool:
            streams = [pool.submit(one, i) for i in range(8)]
            until(lambda: total(rig.metrics(), "baton_kv_held_legs", role="decode") == 8, "not all are placed")
            gates.release("prefill.chunk")
            workers = [stream.result() for stream in streams]
    finally:
        gates.release_all()
        stop.set()
        watcher.join()
    assert min(seen) >= 0
    assert Counter(workers) == {"decode-0": 4, "decode-1": 4}


def test_o_beat_under_load(rig: Rig) -> None:
    """Streams and huge prompts together: the router's event loop goes on answering."""
    with beating(rig.http, rig.router_pid()) as beat, ThreadPoolExecutor(9) as pool:
        streams = [pool.submit(rig.client.generate, token_ids=ids(16, i), **LONG) for i in range(8)]
        status, _ = rig.client.refused(prompt="word " * 200_000)
        for stream in streams:
            stream.result()
    assert status == grpc.StatusCode.INVALID_ARGUMENT
    assert beat.worst_s < 1.0


def test_killing_one_of_two_leaves_the_other(rig: Rig) -> None:
    rig.kill_worker("prefill-1")
    rig.kill_worker("decode-1")
    deadline = time.monotonic() + 40
    while True:
        try:
            answers = [rig.client.generate(token_ids=ids(12, i), max_tokens=3, temperature=0) for i in range(4)]
            break
        except grpc.RpcError:
            assert time.monotonic() < deadline
    assert answers
    rig.wait_all_ready()
