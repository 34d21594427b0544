"""LC-04 on real processes: a decode worker that receives and sends at the same time, and what is left when it ends.

A draining decode worker hands its running choices to the other one while reservations of its own still arrive.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from baton.tests.harness.gates import Gates
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.oracles import total
from baton.tests.harness.reader import Reader, ids
from baton.tests.harness.rig import Rig, merged, running, tiny_config

pytestmark = pytest.mark.slow

COUNT = 60


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    names = ("prefill.first_frame", "prefill.last_frame", "decode.frame", "decode.admit")
    return Gates(tmp_path / "gates", {**dict.fromkeys(names, "gate"), "decode.step": "sleep(0.02)"})


@pytest.fixture
def rig(tiny_dir: Path, tmp_path: Path, gates: Gates) -> Iterator[Rig]:
    changes = {
        "pools.decode.replicas": 2,
        "pools.decode.memory": "1MiB",
        "clocks.dead_after": "2s",
        "clocks.frame": "2s",
    }
    with running(tmp_path / "rig", merged(tiny_config(tiny_dir), changes), gates) as rig:
        yield rig


def right(reader: Reader, oracle: Monolithic) -> bool:
    """Whether the answer is whole; then it is right. With no worker to go on, it may be refused for a retry."""
    outcome = reader.end(60)
    if outcome.answer is None:
        assert outcome.code is grpc.StatusCode.UNAVAILABLE, outcome.code
        return False
    assert outcome.answer.token_ids == oracle.run(reader.prompt, max_tokens=COUNT)[0].token_ids
    return True


def running_on(rig: Rig, worker: str) -> float:
    """Sequences in its batch."""
    return total(rig.metrics(), "baton_worker_running", worker=worker)


@pytest.mark.parametrize("what", ["cancel", "target killed", "source killed", "nothing"])
def test_lc_04_a_worker_that_sends_while_it_receives(rig: Rig, gates: Gates, tiny_dir: Path, what: str) -> None:
    oracle = Monolithic(tiny_dir)
    readers = [Reader(rig, ids(20), COUNT) for _ in range(4)]
    for reader in readers:
        reader.wait_tokens(3)
    source = max(("decode-0", "decode-1"), key=lambda worker: running_on(rig, worker))
    target = "decode-1" if source == "decode-0" else "decode-0"
    gates.close("prefill.first_frame", source)  # of what it sends to the other
    gates.close("decode.frame", source)  # of what it receives from prefill
    late = [Reader(rig, ids(20), COUNT) for _ in range(4)]
    gates.wait_reached("decode.frame")  # it is in the middle of receiving

    def drained() -> None:
        with contextlib.suppress(grpc.RpcError):  # the worker ended by itself
            rig.drain(source)

    drain = threading.Thread(target=drained)
    drain.start()
    assert gates.wait_reached("prefill.first_frame").process == source  # and of sending
    if what == "cancel":
        for reader in (*readers, *late):
            reader.cancel()
    elif what != "nothing":
        rig.kill_worker(target if what == "target killed" else source)
    gates.release_all()
    if what == "cancel":
        for reader in (*readers, *late):
            reader.end(20)
    else:
        whole = [right(reader, oracle) for reader in (*readers, *late)]
        assert all(whole) or (any(whole) and what != "nothing")
    drain.join(60)
    assert not drain.is_alive()
    deadline = time.monotonic() + 30
    while rig.workers()[target]["state"] != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.1)
