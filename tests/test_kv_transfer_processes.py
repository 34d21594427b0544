"""Transfers between two real processes, over each carrier, and what a survivor sees when its peer dies or freezes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import psutil
import pytest
from baton.tests.harness.kv_peer import TOKENS
from baton.tests.harness.tied import tied

LIMIT_S = 3.0


class Peer:
    """A kv_peer process."""

    def __init__(self, role: str, transport: str, failpoints: str = "") -> None:
        command = [sys.executable, "-m", "baton.tests.harness.kv_peer", role, transport, str(LIMIT_S)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "BATON_FAILPOINTS": failpoints}
        self.process = subprocess.Popen(
            tied(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._lines: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(json.loads(line))

    def tell(self, do: str, request: str = "request", **fields: Any) -> None:
        """Give an order."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"do": do, "request": request, **fields}) + "\n")
        stdin.flush()

    def next(self, key: str, wait_s: float = 60.0) -> dict[str, Any]:
        """The next report that has this key."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                report = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise AssertionError(f"no {key!r} within {wait_s} s") from None
            if key in report:
                return report

    def end(self) -> None:
        """Kill and reap."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def _peers(prefill: str, decode: str, failpoints: str = "") -> Iterator[tuple[Peer, Peer]]:
    source, target = Peer("prefill", prefill, failpoints), Peer("decode", decode)
    try:
        target.next("address", 90.0)  # beside others a start is slow
        yield source, target
    finally:
        source.end()
        target.end()


def _start(source: Peer, target: Peer, request: str = "request") -> None:
    target.tell("reserve", request)
    source.tell("open", request, ticket=target.next("ticket")["ticket"])


def _holds_a_ring(peer: Peer) -> bool:
    """Whether it still maps the memory of a ring some time after the link ended."""
    for _ in range(100):
        if "memfd:baton-kv" not in Path(f"/proc/{peer.process.pid}/maps").read_text():
            return False
        time.sleep(0.05)
    return True


def _await_first_bytes(target: Peer) -> None:
    for _ in range(500):
        target.tell("placed")
        if target.next("placed")["placed"]:
            return
        time.sleep(0.05)
    raise AssertionError("nothing was placed")


@pytest.mark.parametrize(("prefill", "decode"), [("gloo", "gloo"), ("shm", "shm")])
def test_a_leg_arrives_and_all_listeners_are_on_loopback(prefill: str, decode: str) -> None:
    with _peers(prefill, decode) as (source, target):
        for request in ("one", "two"):
            _start(source, target, request)
            source.tell("computed", request, tokens=[0, 512])
            source.tell("computed", request, tokens=[512, TOKENS])
            source.tell("finish", request)
            assert source.next("event")["event"] == "Sent"
            assert {target.next("event")["event"] for _ in range(2)} == {"RankComplete", "FirstTokensArrived"}
            target.tell("compare")
            assert target.next("equal")["equal"]
        for peer in (source, target):
            memory = Path(f"/proc/{peer.process.pid}/maps").read_text()
            assert ("memfd:baton-kv" in memory) == (prefill == "shm")
            connections = psutil.Process(peer.process.pid).net_connections("tcp")
            assert {connection.laddr.ip for connection in connections} == {"127.0.0.1"}


@pytest.mark.parametrize("transport", [pytest.param("inline", marks=pytest.mark.slow), "gloo", "shm"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_cf_07_the_survivor_reports_a_dead_or_frozen_peer(transport: str, victim: str, how: signal.Signals) -> None:
    """Mid transfer: a part of the leg is there, the rest is still being computed."""
    with _peers(transport, transport) as (source, target):
        _start(source, target)
        source.tell("computed", tokens=[0, 512])
        _await_first_bytes(target)
        dead, survivor = (source, target) if victim == "prefill" else (target, source)
        os.kill(dead.process.pid, how)
        began = time.monotonic()
        if victim == "decode":
            source.tell("computed", tokens=[512, TOKENS])
        report = survivor.next("event", 5 * LIMIT_S)  # a carrier that fails first: within two limits
        assert report["event"] == ("ReceiveFailed" if victim == "prefill" else "SendFailed")
        if how == signal.SIGKILL:
            assert time.monotonic() - began < LIMIT_S
        assert not _holds_a_ring(survivor)


_SECOND = "prefill.first_frame=sleep(0.2);prefill.frame=exit"


@pytest.mark.parametrize(
    ("transport", "failpoints"),
    [
        pytest.param("inline", _SECOND, marks=pytest.mark.slow),
        pytest.param("gloo", _SECOND, marks=pytest.mark.slow),
        ("shm", _SECOND),
        ("inline", "prefill.half_payload=exit@2"),
        ("gloo", "prefill.mid_frame=exit@2"),
    ],
)
def test_a_peer_that_dies_between_announcement_and_payload(transport: str, failpoints: str) -> None:
    """`exit` while the first frame is on its way, or in the middle of the second."""
    with _peers(transport, transport, failpoints) as (source, target):
        _start(source, target)
        source.tell("computed", tokens=[0, TOKENS])
        assert target.next("event")["event"] == "ReceiveFailed"
