"""Two prefill and two decode processes, a proxy between them, and a fault at a chosen stage of one request.

The victim stands at a gate while the fault happens; two other streams are in mid-answer on the two decode workers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grpc
from baton.tests.harness.client import Answer, Stream
from baton.tests.harness.fault_proxy import Direction, FaultProxy, Tunnel, fault_proxy
from baton.tests.harness.gates import Gates
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.rig import Rig, merged, running, tiny_config

Fault = Literal["kill", "stop", "half-open", "mute", "deaf"]
Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")

STAGES = {
    "reserved": "prefill.queued",
    "first frame": "prefill.first_frame",
    "mid frame": "prefill.mid_frame",
    "last frame": "prefill.last_frame",
    "before commit": "decode.admit",
    "after commit": "decode.committed",
}
DEADLINE_S = 30.0  # of the victim
_STEP_S = 0.01
_BLOCK = 2 * 2 * 2 * 4 * 16 * 4
_GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
_starts = itertools.count(1)


class Case(NamedTuple):
    """What happens to whom, and when. half-open: what the victim says on the KV link is lost; mute, deaf: what it says
    to the router, or the router to it."""

    fault: Fault
    victim: Role
    stage: str


@dataclass
class Outcome:
    """How the victim's request ended: a whole answer, or one error."""

    answer: Answer | None
    code: grpc.StatusCode | None
    took_s: float


def ids(length: int) -> list[int]:
    """A prompt of byte tokens that shares no block with any other."""
    return list(random.Random(next(_starts)).randbytes(length))


class FaultRig:
    """The cluster, its gates and its proxy."""

    def __init__(self, rig: Rig, gates: Gates, proxy: FaultProxy, model: Path) -> None:
        self.rig = rig
        self.gates = gates
        self.proxy = proxy
        self._oracle = Monolithic(model)

    def expected(self, prompt: Sequence[int], count: int) -> list[int]:
        """O-eq: what one process says."""
        (choice,) = self._oracle.run(prompt, max_tokens=count)
        return choice.token_ids

    def run(self, case: Case) -> Outcome:
        """One case from start to end, with all oracles."""
        neighbours = [Reader(self.rig, ids(6 + i), 100) for i in range(2)]
        for neighbour in neighbours:
            neighbour.wait_tokens(3)
        self._until(self._one_on_each, "the neighbours are not on different workers")
        point = STAGES[case.stage]
        self._until(lambda: not any(self._held().values()), "the neighbours' hand-overs do not end")
        self.gates.close(point)
        try:
            victim = Reader(self.rig, ids(40), 20)
            standing = self.gates.wait_reached(point).process
            with self._broken(case, standing):
                self.gates.release(point)
                outcome = victim.end(DEADLINE_S + 5)
        finally:
            self.gates.release_all()
        self.check(outcome, victim.prompt, 20)
        for neighbour in neighbours:
            self.check(neighbour.end(60), neighbour.prompt, 100, may_fail=False)
        self.settle()
        return outcome

    def check(self, outcome: Outcome, prompt: Sequence[int], count: int, *, may_fail: bool = True) -> None:
        """The complete right answer, or one clear error in time and nothing that is wrong before it."""
        if outcome.answer is None or outcome.code is not None:
            assert may_fail
            assert outcome.code is grpc.StatusCode.UNAVAILABLE, outcome.code
        else:
            assert outcome.answer.token_ids == self.expected(prompt, count)
        assert outcome.took_s < DEADLINE_S

    def settle(self, within_s: float = 30.0) -> None:
        """All four workers serve again; O-live, O-pool and O-acct."""
        self._until(lambda: len(self.rig.metrics()["baton_kv_used_blocks"]) == 4, "a worker is missing", within_s)
        self.rig.quiesce()

    @contextmanager
    def _broken(self, case: Case, standing: str) -> Iterator[None]:
        """The fault, as long as the block runs; `standing` is the worker at the gate."""
        pids = {role: self.rig.pid(standing if standing.startswith(role) else self._holder(role)) for role in ROLES}
        pid = pids[case.victim]
        if case.fault in ("half-open", "mute", "deaf"):
            if case.fault == "half-open":
                self._half_open(pids["prefill"], pids["decode"], "up" if case.victim == "prefill" else "down")
            else:
                self._half_open(self.rig.router_pid(), pid, "up" if case.fault == "deaf" else "down")
            yield
            return
        os.kill(pid, signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP)
        try:
            yield
        finally:
            if case.fault == "stop":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _half_open(self, source_pid: int, target_pid: int, direction: Direction) -> None:
        """One direction of the link is lost from now on; of the next link where none is open."""

        def lose(tunnel: Tunnel) -> None:
            if tunnel.between(source_pid, target_pid):
                tunnel.faults[direction].swallow = True
                self.proxy.on_open = lambda later: None

        self.proxy.on_open = lose
        for tunnel in self.proxy.between(source_pid, target_pid):
            lose(tunnel)

    def _held(self) -> dict[str, float]:
        """Worker -> legs that are on their way from prefill to decode."""
        metrics = self.rig.metrics()
        found: dict[str, float] = {}
        for name in ("baton_kv_held_legs", "baton_worker_running"):
            for key, value in metrics[name].items():
                labels = dict(key)
                if name.endswith("held_legs") or labels["role"] == "prefill":
                    found[labels["worker"]] = found.get(labels["worker"], 0.0) + value
        return found

    def _one_on_each(self) -> bool:
        batches = self.rig.metrics()["baton_worker_running"]
        return [value for key, value in batches.items() if dict(key)["role"] == "decode"] == [1.0, 1.0]

    def _holder(self, role: str) -> str:
        """The worker of this role that serves the victim."""
        found: list[str] = []

        def looked() -> bool:
            found[:] = [name for name, held in self._held().items() if name.startswith(role) and held]
            return len(found) == 1

        self._until(looked, f"no {role} worker holds the victim")
        return found[0]

    @staticmethod
    def _until(found: Callable[[], bool], problem: str, within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while not found():
            assert time.monotonic() < deadline, f"{problem}, after {within_s:g} s"
            time.sleep(0.02)


class Reader:
    """A stream that is read in a thread."""

    def __init__(self, rig: Rig, prompt: list[int], count: int) -> None:
        self.prompt = prompt
        self._began = time.monotonic()
        self._stream: Stream = rig.client.stream(DEADLINE_S, token_ids=prompt, max_tokens=count, **_GREEDY)
        self._outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._read, name="stream")
        self._thread.start()

    @property
    def answer(self) -> Answer:
        """What has come so far."""
        return self._stream.answer

    def cancel(self) -> None:
        """The client leaves."""
        self._stream.cancel()

    def wait_tokens(self, count: int) -> None:
        """Returns when so many tokens have come."""
        deadline = time.monotonic() + 20
        while len(self._stream.answer.token_ids) < count:
            assert time.monotonic() < deadline, "no tokens"
            time.sleep(0.005)

    def end(self, limit_s: float) -> Outcome:
        """How it ended."""
        self._thread.join(limit_s)
        assert self._outcome is not None, "the request hangs"
        return self._outcome

    def _read(self) -> None:
        try:
            answer: Answer | None = self._stream.rest()
            code = None
        except grpc.RpcError as error:
            answer, code = None, error.code()
        self._outcome = Outcome(answer, code, time.monotonic() - self._began)


@contextmanager
def fault_rig(folder: Path, model: Path, transport: str, **changes: Any) -> Iterator[FaultRig]:
    """2P + 2D of T0 that notice a silent peer within 2 s; a decode step takes 10 ms at least."""
    with fault_proxy() as proxy:
        actions = dict.fromkeys(STAGES.values(), "gate")
        actions |= {"decode.step": f"sleep({_STEP_S})", "kv.dial": f"via({proxy.address})"}
        gates = Gates(folder / "gates", actions)
        config = merged(
            tiny_config(model),
            {
                "cluster.restart_delay_max": "100ms",
                "pools.prefill.replicas": 2,
                "pools.prefill.max_batch_tokens": 16,
                "pools.decode.replicas": 2,
                "pools.decode.memory": 128 * _BLOCK,
                "kv.transport": transport,
                "kv.frame_size": 8192,
                "clocks.dead_after": "2s",
                "clocks.frame": "2s",
                **changes,
            },
        )
        with running(folder, config, gates, environment={"grpc_proxy": f"http://{proxy.address}"}) as rig:
            yield FaultRig(rig, gates, proxy, model)
