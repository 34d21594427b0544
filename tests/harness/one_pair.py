"""One prefill and one decode process that can be held at every point of a request, with all their connections through a
proxy: the rig of the lifecycle tests, and what these do again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import grpc
from baton.tests.harness import oracles
from baton.tests.harness.fault_proxy import FaultProxy, Tunnel, fault_proxy
from baton.tests.harness.gates import Gates
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.oracles import total
from baton.tests.harness.reader import Reader, ids
from baton.tests.harness.rig import Rig, merged, running, tiny_config

LEASE_S = 2.0  # a session without a heartbeat
CHUNK = 16
GATES = (  # every phase of a request, in order
    "decode.reserved",
    "prefill.queued",
    "prefill.chunk",
    "prefill.chunk_done",
    "prefill.after_prefill",
    "prefill.first_frame",
    "prefill.mid_frame",
    "decode.mid_frame",
    "decode.frame",
    "prefill.last_frame",
    "router.handoff",
    "prefill.done",
    "prefill.sent",
    "decode.admit",
    "decode.committed",
    "prefill.released",
    "decode.step",
    "decode.step_done",
)
EIGHT = (*GATES[1:3], "prefill.first_frame", "decode.mid_frame", "prefill.done", "decode.admit", *GATES[-2:])


class Cluster(NamedTuple):
    rig: Rig
    gates: Gates
    proxy: FaultProxy


@contextmanager
def one_pair(folder: Path, model: Path) -> Iterator[Cluster]:
    """T0 with prompts in chunks of 16; KV links and all gRPC inside the cluster run through the proxy."""
    with fault_proxy() as proxy:
        actions = {**dict.fromkeys(GATES, "gate"), "decode.payload": "corrupt?", "prefill.frame": "raise?"}
        actions["kv.dial"] = f"via({proxy.address})"
        gates = Gates(folder / "gates", actions)
        changes = {
            "cluster.restart_delay_max": "100ms",
            "pools.prefill.max_batch_tokens": CHUNK,
            "kv.transport": "inline",
            "kv.frame_size": 8192,
            "clocks.dead_after": f"{LEASE_S}s",
            "clocks.frame": "2s",
        }
        environment = {"grpc_proxy": f"http://{proxy.address}"}
        with running(folder, merged(tiny_config(model), changes), gates, environment=environment) as rig:
            yield Cluster(rig, gates, proxy)


def counted(rig: Rig, name: str, **labels: str) -> float:
    """A metric now."""
    return total(rig.metrics(), name, **labels)


def until(found: Callable[[], object], problem: str, within_s: float = 30.0) -> None:
    """Returns when `found()` is true."""
    deadline = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < deadline, f"{problem}, after {within_s:g} s"
        time.sleep(0.02)


class Leaver(Protocol):
    """A stream, read by itself or in a thread."""

    def cancel(self) -> None:
        """The client leaves."""


def leave(rig: Rig, stream: Leaver) -> None:
    """The client leaves; returns when the router has taken notice."""
    before = counted(rig, "baton_requests_cancelled_total")
    stream.cancel()
    until(lambda: counted(rig, "baton_requests_cancelled_total") > before, "the cancel is not noticed")


def kv_link(cluster: Cluster) -> Tunnel:
    """From prefill to decode."""
    (tunnel,) = cluster.proxy.between(cluster.rig.pid("prefill-0"), cluster.rig.pid("decode-0"))
    return tunnel


def session(cluster: Cluster, worker: str) -> Tunnel:
    """From the router to a worker."""
    (tunnel,) = cluster.proxy.between(cluster.rig.router_pid(), cluster.rig.pid(worker))
    return tunnel


def reopened(cluster: Cluster, worker: str, lost: Tunnel) -> bool:
    """Whether the router has another session with the worker than `lost`."""
    between = cluster.proxy.between(cluster.rig.router_pid(), cluster.rig.pid(worker))
    return not lost.open and any(tunnel is not lost for tunnel in between)


def right_or_unavailable(reader: Reader, oracle: Monolithic, count: int) -> bool:
    """Whether the answer came whole. A wrong token, or another error, fails the test."""
    outcome = reader.end(40)
    if outcome.answer is None:
        assert outcome.code is grpc.StatusCode.UNAVAILABLE, outcome.code
        return False
    (choice,) = oracle.run(reader.prompt, max_tokens=count)
    assert outcome.answer.token_ids == choice.token_ids
    return True


def cancel_at(cluster: Cluster, point: str) -> float:
    """A client leaves while a process stands at `point`. Seconds from letting go until all pools are empty."""
    rig, gates, _ = cluster
    gates.close(point)
    if point in ("router.handoff", "prefill.sent", "prefill.released"):
        gates.close("decode.step")  # which would go on to the end of the answer
    reader = Reader(rig, ids(40), 60)
    gates.wait_reached(point)
    leave(rig, reader)
    gates.release_all()
    began = time.monotonic()
    oracles.check_pool(rig.http)
    took = time.monotonic() - began
    assert reader.end(40).code is grpc.StatusCode.CANCELLED
    return took


class Messages:
    """Counts the messages of a link as its bytes pass."""

    def __init__(self, tunnel: Tunnel) -> None:
        self.count = 0
        self._left = {"up": b"", "down": b""}
        self._lock = threading.Lock()
        tunnel.on_bytes = self._take

    def _take(self, direction: str, data: bytes) -> None:
        with self._lock:
            rest = self._left[direction] + data
            while len(rest) >= 8 and len(rest) >= 8 + int.from_bytes(rest[4:8], "big"):
                assert rest[:3] == b"bKV"
                self.count += 1
                rest = rest[8 + int.from_bytes(rest[4:8], "big") :]
            self._left[direction] = rest
