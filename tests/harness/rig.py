"""T0, the default rig: the real cluster on a tiny model, started with `baton serve` as a user would, with plain
processes instead of Ray. Leaving it checks O-pool, O-acct, O-live and O-proc."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import yaml
from baton.cluster.admin import status_fields
from baton.proto import control_pb2
from baton.proto.control_pb2_grpc import AdminStub

from . import oracles
from .client import Client
from .gates import Gates
from .tied import tied

_START_S = 90.0  # beside others a start is slow
_STOP_S = 40.0
_ENDPOINT = re.compile(r"\b(grpc|http|admin)\b\W+(?:https?://)?(127\.0\.0\.1:\d+)")


def tiny_config(model: Path) -> dict[str, Any]:
    """T0's YAML: fp32, block 4, 1 prefill (64 blocks) + 1 decode (32 blocks) of the default tiny model, gloo."""
    block = 2 * 2 * 2 * 4 * 16 * 4  # bytes: layers x (k, v) x heads x tokens x head_dim x float32
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "cluster": {"launcher": "process", "restart_delay": "50ms", "stop_grace": "3s"},
        "pools": {
            "prefill": {"replicas": 1, "threads": 1, "max_batch_tokens": 64, "memory": 64 * block},
            "decode": {"replicas": 1, "threads": 1, "max_sequences": 16, "memory": 32 * block},
        },
        "engine": {"layer_group": 1},
        "kv": {"block_size": 4, "transport": "gloo"},
        "clocks": {"heartbeat": "100ms", "dead_after": "5s"},  # quick to settle, patient with a busy machine
        "router": {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
    }


def merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with dotted `changes` ("kv.block_size": 8) put in."""
    for key, value in changes.items():
        *path, name = key.split(".")
        at = base
        for part in path:
            at = at.setdefault(part, {})
        at[name] = value
    return base


class Rig:
    """A running cluster. `client` speaks gRPC, `http` is the base URL, `admin` the admin address."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log
        self._endpoints: dict[str, str] = {}
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, name="rig-output")
        self._reader.start()
        try:
            self._wait_ready()
        except BaseException:
            self._kill()
            raise
        self.http = f"http://{self._endpoints['http']}"
        self.admin = self._endpoints["admin"]
        self.grpc = self._endpoints["grpc"]
        self.client = Client(self.grpc)

    @property
    def output(self) -> str:
        """What `baton serve` has printed so far."""
        return "".join(self._lines)

    def metrics(self) -> oracles.Metrics:
        """A scrape."""
        return oracles.scrape(self.http)

    def workers(self) -> dict[str, dict[str, Any]]:
        """worker id -> its fields in `baton status --json`."""
        with grpc.insecure_channel(self.admin) as channel:
            answer = AdminStub(channel).Status(control_pb2.StatusRequest(), timeout=30)
        return {worker["worker_id"]: worker for worker in status_fields(answer)["workers"]}

    def pid(self, name: str) -> int:
        """Of rank 0 of a worker."""
        return int(self.workers()[name]["pid"])

    def drain(self, name: str) -> None:
        """As `baton drain`: returns when the worker has stopped."""
        with grpc.insecure_channel(self.admin) as channel:
            AdminStub(channel).Drain(control_pb2.DrainRequest(worker_id=name), timeout=60)

    def router_pid(self) -> int:
        """Of the only router's process."""
        (router,) = self.router_pids()
        return router

    def router_pids(self) -> list[int]:
        """Of all routers' processes."""
        found: list[int] = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if "baton.cluster.router_process" in child.cmdline():
                    found.append(child.pid)
        return found

    def kill_worker(self, name: str, kind: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to rank 0 of a worker."""
        os.kill(self.pid(name), kind)

    def wait_live(self, within_s: float = 40.0) -> None:
        """Returns when a request is served again. Raises the last error."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                oracles.check_live(self.client)
                return
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def wait_all_ready(self, within_s: float = 40.0) -> None:
        """Returns when every worker is ready, and the router has a session with it."""
        deadline = time.monotonic() + within_s
        while not self._all_serve():
            assert time.monotonic() < deadline, (self.workers(), self.router_knows())
            time.sleep(0.1)

    def wait_known(self, workers: int, within_s: float = 40.0) -> None:
        """Returns when the router has sessions with so many workers: it calls itself ready with one pair."""
        deadline = time.monotonic() + within_s
        while len(known := self.router_knows()) < workers:
            assert time.monotonic() < deadline, known
            time.sleep(0.05)

    def router_knows(self) -> set[str]:
        """Workers that the router has a session with."""
        return {dict(labels)["worker"] for labels in self.metrics()["baton_kv_total_blocks"]}

    def _all_serve(self) -> bool:
        workers = self.workers()
        return all(w["state"] == "ready" for w in workers.values()) and set(workers) <= self.router_knows()

    def quiesce(self, within_s: float = 30.0) -> None:
        """O-live, O-pool and O-acct."""
        oracles.check_live(self.client)
        oracles.check_pool(self.http, within_s)
        oracles.check_accounts(self.http)

    def stop(self) -> None:
        """Ends the cluster as Ctrl-C does; O-proc."""
        self.client.close()
        before = oracles.footprint(self.process.pid)
        self.process.send_signal(signal.SIGINT)
        self.process.wait(_STOP_S)
        oracles.check_processes(before)
        self._finish()

    def abort(self) -> None:
        """Ends the cluster after a failure of the test, without checks."""
        self.client.close()
        self._kill()

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._finish()

    def _finish(self) -> None:
        self._reader.join(5)
        self.log.write_text(self.output)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.append(line)
                self._endpoints.update(dict(_ENDPOINT.findall(line)))

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            if self.process.poll() is not None:
                self._reader.join(5)
                raise RuntimeError(f"baton serve ended with {self.process.returncode}:\n{self.output}")
            if len(self._endpoints) == 3 and self._ready():
                return
            if time.monotonic() > deadline:
                self._show_stacks()
                raise TimeoutError(f"baton serve is not ready after {_START_S} s:\n{self.output}")
            time.sleep(0.05)

    def _show_stacks(self) -> None:
        """Ends every process in a way that makes it print where its threads stand."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGABRT)
        time.sleep(1)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"http://{self._endpoints['http']}/ready", timeout=30).status_code == 200
        except httpx.HTTPError:
            return False


@contextlib.contextmanager
def running(
    folder: Path,
    config: Mapping[str, Any],
    gates: Gates | None = None,
    *,
    checks: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Rig]:
    """A rig on `config`, a plain dict. checks: O-pool, O-acct and O-live when the block ends well. environment: what
    the processes' environment holds besides."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(dict(config)))
    armed = gates.environment if gates else {}
    needed = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    variables = {**os.environ, **needed, **armed, **(environment or {})}
    process = subprocess.Popen(
        tied([sys.executable, "-m", "baton.cluster.cli", "serve", str(path), "--verbose"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=variables,
        start_new_session=True,
    )
    rig = Rig(process, folder / "serve.log")
    pools = config.get("pools", {})
    wanted = sum(pools.get(role, {}).get("replicas", 1) for role in ("prefill", "decode"))
    try:
        if checks:
            rig.wait_known(wanted)
        yield rig
        if gates:
            gates.release_all()
        if checks:
            rig.quiesce()
    except BaseException as error:
        if gates:
            gates.release_all()
        rig.abort()
        error.add_note(f"--- baton serve printed:\n{rig.output[-6000:]}")
        raise
    rig.stop()
