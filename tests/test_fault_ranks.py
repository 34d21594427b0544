"""A decode worker of two ranks with one KV head, all in real processes: ranks that differ, and clients that leave."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from baton.tests.harness.gates import Gates
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.oracles import total
from baton.tests.harness.reader import Reader, ids
from baton.tests.harness.rig import Rig, merged, running, tiny_config
from baton.tests.harness.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

RANK_1 = "decode-0.1"
COUNT = 8
FIELDS: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}


class Cluster(NamedTuple):
    rig: Rig
    gates: Gates
    oracle: Monolithic


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ranks")
    model = write_tiny_model(folder / "tiny-llama", kv_heads=1)
    actions = {
        f"decode.frame[{RANK_1}]": "gate",
        f"decode.mid_frame[{RANK_1}]": "gate",
        f"decode.payload[{RANK_1}]": "corrupt?",
        "decode.step": "gate",
    }
    gates = Gates(folder / "gates", actions)
    with running(folder, merged(tiny_config(model), {"pools.decode.tensor_parallel": 2}), gates) as rig:
        yield Cluster(rig, gates, Monolithic(model))


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    yield started
    started.gates.release_all()
    started.rig.quiesce()


def right(cluster: Cluster, reader: Reader) -> int:
    """The answer is whole and right (O-eq). How many attempts it took."""
    outcome = reader.end(40)
    assert outcome.answer is not None, outcome.code
    assert outcome.answer.token_ids == cluster.oracle.run(reader.prompt, max_tokens=COUNT)[0].token_ids
    return outcome.answer.timing.attempts


def test_kv_02_one_head_travels_once_to_each_rank(cluster: Cluster) -> None:
    for length in (1, 4, 5, 40):
        answer = cluster.rig.client.generate(token_ids=ids(length), **FIELDS)
        assert answer.timing.kv_bytes == length * 2 * 2 * 2 * 16 * 4  # layers, (k, v), ranks, head_dim, float32


def test_kv_12_a_rank_that_is_late_is_waited_for(cluster: Cluster) -> None:
    cluster.gates.close("decode.frame")
    reader = Reader(cluster.rig, ids(40), COUNT)
    assert cluster.gates.wait_reached("decode.frame").process == RANK_1
    time.sleep(0.3)  # rank 0 has everything by now, and must not begin alone
    assert len(reader.answer.token_ids) <= 1
    cluster.gates.release("decode.frame")
    assert right(cluster, reader) == 1


def test_kv_12_a_leg_that_fails_on_one_rank_fails_on_all(cluster: Cluster) -> None:
    """Rank 1 alone finds its payload damaged; the next attempt is right on both."""
    rig, gates, _ = cluster
    before = total(rig.metrics(), "baton_kv_transfers_total", outcome="failed")
    gates.close("decode.payload")
    gates.close("decode.mid_frame")
    reader = Reader(rig, ids(40), COUNT)
    gates.wait_reached("decode.mid_frame")
    gates.let_one("decode.mid_frame")
    deadline = time.monotonic() + 20
    while total(rig.metrics(), "baton_kv_transfers_total", outcome="failed") == before:
        assert time.monotonic() < deadline, "no transfer failed"
    gates.wait_reached("decode.mid_frame")  # the next attempt
    gates.release("decode.payload")
    gates.release("decode.mid_frame")
    assert right(cluster, reader) == 2


def test_kv_12_the_next_request_is_served_by_both_ranks(cluster: Cluster) -> None:
    assert right(cluster, Reader(cluster.rig, ids(40), COUNT)) == 1


# ---- LC-14 ---------------------------------------------------------------------------------------------------------


def _grpc(rig: Rig) -> Callable[[], None]:
    reader = Reader(rig, ids(20), 100)
    reader.wait_tokens(3)
    return reader.cancel


def _http(rig: Rig, stream: bool) -> Callable[[], None]:
    host, port = rig.http.removeprefix("http://").split(":")
    link = socket.create_connection((host, int(port)), 20)
    body = {"model": "tiny-llama", "prompt": ids(20), "max_tokens": 100, "ignore_eos": True, "stream": stream}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    link.sendall(head.encode() + b"\r\n\r\n" + data)
    return link.close


@pytest.mark.parametrize("client", ["grpc", "http stream", "http"])
def test_lc_14_a_client_that_leaves_stops_all_ranks(cluster: Cluster, client: str) -> None:
    """At most two steps run after the router knows."""
    rig, gates, _ = cluster
    cancelled = total(rig.metrics(), "baton_requests_cancelled_total")
    steps = total(rig.metrics(), "baton_worker_steps_total", role="decode")
    gates.close("decode.step")
    opened: list[Callable[[], None]] = []
    thread = threading.Thread(
        target=lambda: opened.append(_grpc(rig) if client == "grpc" else _http(rig, client == "http stream"))
    )
    thread.start()
    for _ in range(4):  # three tokens of decode and the one of prefill
        gates.wait_reached("decode.step")
        gates.let_one("decode.step")
    gates.wait_reached("decode.step")
    thread.join(20)
    opened[0]()
    deadline = time.monotonic() + 20
    while total(rig.metrics(), "baton_requests_cancelled_total") == cancelled:
        assert time.monotonic() < deadline, "nobody notices that the client left"
    time.sleep(0.2)
    gates.release("decode.step")
    deadline = time.monotonic() + 10
    while total(rig.metrics(), "baton_worker_running", role="decode"):
        assert time.monotonic() < deadline, "the batch goes on"
    time.sleep(0.1)
    assert total(rig.metrics(), "baton_worker_steps_total", role="decode") - steps <= 4 + 2
