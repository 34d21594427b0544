"""Two prefill and two decode processes, a proxy between them, and a fault at a chosen stage of one request.

The victim stands at a gate while the fault happens; two other streams are in mid-answer on the two decode workers. What
must be so before the fault is waited for while these crawl, so that a busy machine has time to get there; what a
fault did is undone, and the cluster seen to be whole, before the next one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grpc
import psutil
from baton.tests.harness.fault_proxy import Direction, FaultProxy, Tunnel, fault_proxy
from baton.tests.harness.gates import Gates
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.reader import DEADLINE_S, Outcome, Reader, ids
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
_NEIGHBOUR_DEADLINE_S = 90.0
_NEIGHBOUR_TOKENS = 200
_STEP_S = 0.01  # of a decode batch, at least
_CRAWL_S = 0.15  # the same while the neighbours must not come to their end
_SETUPS = 4  # tries to have a stream on each decode worker
_SETTLE_S = 60.0  # a worker that ended starts again beside others
_BLOCK = 2 * 2 * 2 * 4 * 16 * 4


class Case(NamedTuple):
    """What happens to whom, and when. half-open: what the victim says on the KV link is lost; mute, deaf: what it says
    to the router, or the router to it."""

    fault: Fault
    victim: Role
    stage: str


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
        """One case from start to end, with all oracles. The fault lasts until every answer has ended."""
        point = STAGES[case.stage]
        try:
            self.gates.close("decode.step")
            neighbours = self._neighbours()
            self._until(lambda: not any(self._held().values()), "the neighbours' hand-overs do not end")
            self.gates.close(point)
            victim = Reader(self.rig, ids(40), 20)
            standing = self.gates.wait_reached(point).process
            assert all(neighbour.running for neighbour in neighbours), "a neighbour ended before the fault"
            with self._broken(case, standing):
                self.gates.release_all()
                outcome = victim.end(DEADLINE_S + 5)
                ends = [neighbour.end(_NEIGHBOUR_DEADLINE_S + 5) for neighbour in neighbours]
        finally:
            self.gates.release_all()
        self.check(outcome, victim.prompt, 20)
        for neighbour, end in zip(neighbours, ends, strict=True):
            self.check(end, neighbour.prompt, _NEIGHBOUR_TOKENS, _NEIGHBOUR_DEADLINE_S, may_fail=False)
        self.rig.quiesce()
        return outcome

    def _neighbours(self) -> list[Reader]:
        """Two streams in mid-answer on the two decode workers. A connection that the case before has harmed may move
        one to the other worker, as it should; then two others are begun."""
        for _ in range(_SETUPS):
            readers = [Reader(self.rig, ids(6 + i), _NEIGHBOUR_TOKENS, _NEIGHBOUR_DEADLINE_S) for i in range(2)]
            for reader in readers:
                reader.wait_tokens(3)
            with contextlib.suppress(AssertionError):
                self._until(self._one_on_each, "they are not on different workers", 5.0)
                return readers
            print(f"set up again: {self.rig.metrics()['baton_worker_running']}\n{self.rig.output[-3000:]}")
            for reader in readers:
                reader.cancel()
                reader.end(DEADLINE_S)
            self.rig.quiesce()
        raise AssertionError("the neighbours are not on different workers")

    def check(
        self,
        outcome: Outcome,
        prompt: Sequence[int],
        count: int,
        within_s: float = DEADLINE_S,
        *,
        may_fail: bool = True,
    ) -> None:
        """The complete right answer, or one clear error in time and nothing that is wrong before it."""
        if outcome.answer is None or outcome.code is not None:
            assert may_fail, outcome.code
            assert outcome.code is grpc.StatusCode.UNAVAILABLE, outcome.code
        else:
            assert outcome.answer.token_ids == self.expected(prompt, count)
        assert outcome.took_s < within_s

    @contextmanager
    def _broken(self, case: Case, standing: str) -> Iterator[None]:
        """The fault, as long as the block runs; `standing` is the worker at the gate. Then the cluster is whole again,
        whether or not anybody had noticed."""
        names = {role: standing if standing.startswith(role) else self._holder(role) for role in ROLES}
        pids = {role: self.rig.pid(name) for role, name in names.items()}
        name, pid, router = names[case.victim], pids[case.victim], self.rig.router_pid()
        session = self.proxy.between(router, pid)
        match case.fault:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                os.kill(pid, signal.SIGSTOP)
            case "half-open":
                self._half_open(pids["prefill"], pids["decode"], "up" if case.victim == "prefill" else "down")
            case _:
                self._half_open(router, pid, "up" if case.fault == "deaf" else "down")
        try:
            yield
        finally:
            if case.fault == "stop":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self._heal(name, router, session)

    def _heal(self, name: str, router: int, session: Sequence[Tunnel]) -> None:
        """Ends every connection that a fault may have harmed; returns when the router has another session with `name`,
        and one with all four workers.

        A half-open connection that nobody needed would break the next case, and so would a session whose end the
        router is about to notice.
        """
        self.proxy.on_open = lambda tunnel: None
        for tunnel in self.proxy.tunnels:
            if tunnel in session or any(faults.swallow for faults in tunnel.faults.values()):
                tunnel.cut()

        def whole() -> bool:
            workers = self.rig.workers()
            if any(worker["state"] != "ready" for worker in workers.values()):
                return False
            with contextlib.suppress(psutil.Error):  # it has ended, and the controller does not know
                if set(self.proxy.between(router, int(workers[name]["pid"]))) - set(session):
                    return len(self.rig.metrics()["baton_kv_used_blocks"]) == 4
            return False

        self._until(whole, "the cluster is not whole again", _SETTLE_S)

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
    def _until(found: Callable[[], bool], problem: str, within_s: float = 40.0) -> None:
        deadline = time.monotonic() + within_s
        while not found():
            assert time.monotonic() < deadline, f"{problem}, after {within_s:g} s"
            time.sleep(0.02)


@contextmanager
def fault_rig(folder: Path, model: Path, transport: str, **changes: Any) -> Iterator[FaultRig]:
    """2P + 2D of T0 that notice a silent peer within 2 s."""
    with fault_proxy() as proxy:
        actions = dict.fromkeys(STAGES.values(), "gate")
        actions |= {"decode.step": f"sleep({_STEP_S})", "kv.dial": f"via({proxy.address})"}
        actions |= {f"decode.step[decode-{i}]": f"sleep({_CRAWL_S})?" for i in range(2)}
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
