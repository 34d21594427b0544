"""Signals: an unfinished command ends with exit code 1 and one line, the ranks of a worker in order.

How a serving cluster ends is in test_cluster_ray.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from baton.cluster import early
from baton.cluster.child import Report
from baton.cluster.launcher import Rank
from baton.cluster.spec import WorkerSpec
from baton.cluster.worker_group import WorkerGroup
from baton.tests.harness import oracles
from baton.tests.harness.fake_cluster import FakeSlot
from baton.tests.harness.rig import tiny_config

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# ---- before there is anything to end -------------------------------------------------------------------------

EARLY = "from baton.cluster import early; early.prepare()\nimport time; print('go', flush=True); time.sleep(60)"
WORK = """
import asyncio
from baton.cluster import driver
async def work():
    print("go", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned", flush=True)
raise SystemExit(driver.run(work()))
"""
NOHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"


def ended_by(kind: signal.Signals, code: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a program that gets the signal when it has said go."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "go\n"
        process.send_signal(kind)
        out, err = process.communicate(timeout=20)
        return process.returncode, out, err


@pytest.mark.parametrize("kind", SIGNALS)
def test_an_interrupt_before_the_work_is_done_is_exit_1_and_one_line(kind: signal.Signals) -> None:
    assert ended_by(kind, EARLY) == (1, "", "baton: interrupted\n")
    assert ended_by(kind, WORK) == (1, "cleaned\n", "baton: interrupted\n")


def test_under_nohup_a_hangup_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, _ = ended_by(signal.SIGHUP, NOHUP + EARLY.replace("sleep(60)", "sleep(0.5)"))
    assert code == 0
    assert early.handled() == SIGNALS


def test_grpc_keeps_quiet_unless_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    early.quiet_grpc()
    assert os.environ["GRPC_VERBOSITY"] == "NONE"
    monkeypatch.setenv("GRPC_VERBOSITY", "debug")
    early.quiet_grpc()
    assert os.environ["GRPC_VERBOSITY"] == "debug"


def test_a_start_that_is_interrupted_is_exit_1_and_leaves_nothing(tiny_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(tiny_config(tiny_dir)))
    command = [sys.executable, "-m", "baton.cluster.cli", "generate", "--config", str(path), "--prompt", "x"]
    slow = os.environ | {"BATON_FAILPOINTS": "prefill.done=sleep(60)"}  # the self-test of the start does not end
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=slow) as process:
        warden = psutil.Process(process.pid)
        while len(warden.children(recursive=True)) < 4:  # driver, router and two workers
            assert process.poll() is None
            time.sleep(0.02)
        before = oracles.footprint(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (1, "", "baton: interrupted\n")
        oracles.check_processes(before)


# ---- the ranks of one worker ---------------------------------------------------------------------------------


class Recorder:
    """A launcher whose ranks note when they are asked to stop, and end a little later."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def reserve(self, name: str, ranks: int, device: str) -> FakeSlot:
        return FakeSlot(name, ranks)

    async def release(self, slot: FakeSlot) -> None:
        self.log.append("release")

    async def start(self, slot: FakeSlot, spec: WorkerSpec, on_report: Report) -> Rank:
        rank = RecordedRank(self.log, str(spec))
        if rank.name == "rank 0":
            asyncio.get_running_loop().call_soon(on_report, "channel", {"address": "h:1"})
            asyncio.get_running_loop().call_soon(on_report, "ready", {})
        return rank


class RecordedRank:
    """One rank."""

    config_error = False

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name
        self._ended = asyncio.Event()

    async def wait(self) -> str:
        await self._ended.wait()
        return ""

    async def stop(self, grace_s: float) -> None:
        self._log.append(f"stop {self.name}")
        await asyncio.sleep(0.01)
        self._log.append(f"end {self.name}")
        self._ended.set()


async def test_the_leader_has_ended_before_the_other_ranks_are_asked_to() -> None:
    launcher = Recorder()
    build = lambda rank, leader: f"rank {rank}"  # noqa: E731
    group: WorkerGroup[FakeSlot] = WorkerGroup(launcher, "w", 3, "cpu", build, lambda kind, fields: None)  # type: ignore[arg-type]

    async def on_ready(report: dict[str, object]) -> None:
        group.stop(5.0)

    assert (await group.run(5.0, on_ready)).reason == ""
    assert launcher.log[:2] == ["stop rank 0", "end rank 0"]
    assert sorted(launcher.log[2:6]) == ["end rank 1", "end rank 2", "stop rank 1", "stop rank 2"]
    assert launcher.log[6:] == ["release"]
