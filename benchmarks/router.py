"""What the router itself costs and adds: simulated workers (no model) behind the real front doors.

    .venv/bin/python benchmarks/router.py [--cases http,grpc,...] [--seconds 10] [--peer vllm-router] [--profile FILE]

Router on core 0; simulated workers and clients, each in a process of its own, on core 1. Each case prints streamed
tokens per second of the router's own CPU time (user and system, all of its threads), which holds on a busy machine too;
what is added to the first token (workers answer at once: all of TTFT is the router's) and to each later one (from the
moment at which the worker handed its step's tokens over until the client has read them), which needs an idle one.
`--peer`: vllm-router (PyPI) in front of simulated HTTP workers that say the same at the same rate; its own delay
includes that of its workers' HTTP, as ours includes that of the sessions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from baton.benchmarks.router_clients import Load
from baton.benchmarks.router_workers import Simulation
from baton.cluster import config_load, router_command, spec

ROUTER_CORE, OTHER_CORE = 0, 1
_MODEL = "model"
_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """`rate`: tokens a second that all streams together are sent."""

    name: str
    protocol: str
    streams: int
    rate: float
    interval: int
    pairs: int
    max_tokens: int = 256


CASES = [
    Case("http", "http", 320, 6400, 1, 8),
    Case("http-busy", "http", 640, 12800, 1, 8),
    Case("http-4", "http", 640, 12800, 4, 8),
    Case("grpc", "grpc", 320, 6400, 1, 8),
    Case("grpc-4", "grpc", 640, 12800, 4, 8),
    Case("latency", "http", 160, 5000, 1, 8),
    Case("latency-grpc", "grpc", 160, 5000, 1, 8),
    Case("2000", "http", 2000, 5000, 1, 32, 64),
]


@contextlib.asynccontextmanager
async def child(first: dict[str, Any] | None, core: int | None, *command: str, **pipes: Any) -> AsyncIterator[Any]:
    """A process on one core or any, with one JSON line for its stdin; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=pipes.get("stdout", asyncio.subprocess.PIPE),
        stderr=pipes.get("stderr"),
        env={**os.environ, **pipes.get("env", {})},
        limit=1 << 24,
        preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
    )
    try:
        if first is not None and process.stdin is not None:
            process.stdin.write(json.dumps(first).encode() + b"\n")
            await process.stdin.drain()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def says(process: Any, key: str) -> dict[str, Any]:
    """The next line of JSON with that key."""
    while line := await process.stdout.readline():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if key in found:
                return dict(found)
    raise RuntimeError(f"a process ended before it said {key}")


def cpu_s(pid: int) -> float:
    """Seconds of CPU that the process and its children have used."""
    process = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)])


def router_values(case: Case, arguments: argparse.Namespace, membership: str) -> dict[str, Any]:
    """The parameters of the real router process, as `baton serve` gives them."""
    free = [f"router.{name}=127.0.0.1:0" for name in ("grpc", "http", "admin")]
    settings = [*free, "router.max_inflight=8192", f"router.stream_interval={case.interval}", *arguments.set]
    config = config_load.load(arguments.config, settings)
    return spec.router_to_json(spec.router_params(config, _MODEL, membership))


async def run_ours(case: Case, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One case through our router."""
    clock = str(folder / "clock")
    seats = case.streams  # enough on each worker, so that no stream waits
    simulation = Simulation(case.pairs, case.streams / case.rate, seats, 0.0, clock)
    simulate = (sys.executable, "-m", "baton.benchmarks.router_workers")
    async with child(asdict(simulation), OTHER_CORE, *simulate) as workers:
        membership = (await says(workers, "membership"))["membership"]
        values = router_values(case, arguments, membership)
        command = list(router_command.COMMAND)
        if arguments.profile:
            command = [sys.executable, "-m", "baton.benchmarks.router_profile", arguments.profile]
        async with child(values, ROUTER_CORE, *command, env=router_command.environment()) as router:
            ready = await says(router, "grpc")
            drain = asyncio.create_task(_drain(router))
            address = ready["grpc" if case.protocol == "grpc" else "http"]
            await _until_ready(ready["http"])
            figures = await measure(case, address, clock, router.pid, arguments)
            if arguments.profile:
                router.stdin.write(b"stop\n")
                await router.stdin.drain()
                await asyncio.wait_for(router.wait(), 20)
            drain.cancel()
            return figures


async def _drain(process: Any) -> None:
    while await process.stdout.readline():
        pass


async def _until_ready(address: str, path: str = "/ready") -> None:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + _READY_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.readline()
            writer.close()
            if b" 200 " in answer:
                return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"{address} did not become ready")


async def measure(case: Case, address: str, clock: str, pid: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The clients' figures, and the CPU that `pid` used in their window."""
    load = Load(
        address, case.protocol, case.streams, 32, case.max_tokens, arguments.warm, arguments.seconds,
        clock, _MODEL,
    )  # fmt: skip
    async with child(asdict(load), OTHER_CORE, sys.executable, "-m", "baton.benchmarks.router_clients") as clients:
        await says(clients, "window")
        before, begin = cpu_s(pid), time.monotonic()
        await says(clients, "window")
        used, took = cpu_s(pid) - before, time.monotonic() - begin
        figures = await says(clients, "tokens")
    return {**figures, "cpu_s": used, "took_s": took, "rss": psutil.Process(pid).memory_info().rss}


def show(name: str, figures: dict[str, Any]) -> str:
    """One line."""
    tokens, used = figures["tokens"], max(figures["cpu_s"], 1e-9)
    ttft, delay = figures["ttft"], figures["delay"]
    text = (
        f"{name:22} {tokens / used:8,.0f} tokens per router-CPU-second ({1e6 * used / max(tokens, 1):5.1f} us each); "
        f"{tokens / figures['took_s']:6,.0f} tokens/s, {tokens / max(figures['messages'], 1):4.2f} a message, "
        f"{figures['requests'] / figures['took_s']:5.1f} requests/s, {figures['concurrent']} streams; added ms "
        f"p50/p99: TTFT {1e3 * ttft['p50']:.1f}/{1e3 * ttft['p99']:.1f}, "
        f"token {1e3 * delay['p50']:.1f}/{1e3 * delay['p99']:.1f}"
    )
    return text + (f"; ERRORS {figures['errors']}" if figures["errors"][0] else "")


async def run_peer(case: Case, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same load through vllm-router, before HTTP workers that stream at the same times."""
    command = shutil.which("vllm-router")
    if command is None:
        raise RuntimeError("vllm-router is not installed (pip install vllm-router)")
    clock = str(folder / "peer-clock")
    fields = {"pairs": case.pairs, "step_s": case.streams / case.rate, "clock": clock}
    workers = (sys.executable, "-m", "baton.benchmarks.router_http_workers")
    async with child(fields, OTHER_CORE, *workers) as simulated:
        urls = (await says(simulated, "urls"))["urls"]
        port, metrics = _free_port(), _free_port()
        options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        options += ["--policy", "round_robin", "--worker-urls", *urls, "--log-level", "error"]
        quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
        async with child(None, ROUTER_CORE, command, *options, **quiet) as router:
            await _until_ready(f"127.0.0.1:{port}", "/health")
            await asyncio.sleep(2)
            load = Case(case.name, "text", case.streams, case.rate, case.interval, case.pairs, case.max_tokens)
            return await measure(load, f"127.0.0.1:{port}", clock, router.pid, arguments)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def main(arguments: argparse.Namespace) -> int:
    """One line for each case."""
    wanted = arguments.cases.split(",") if arguments.cases else [case.name for case in CASES]
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if case.name not in wanted:
                continue
            print(show(case.name, await run_ours(case, arguments, Path(folder))), flush=True)
            if arguments.peer and case.protocol == "http" and case.interval == 1:
                figures = await run_peer(case, arguments, Path(folder))
                print(show(f"{case.name} vllm-router", figures), flush=True)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/local.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the YAML")
    parser.add_argument("--cases", default="", help=", ".join(case.name for case in CASES))
    parser.add_argument("--warm", type=float, default=6.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--profile", default="", metavar="FILE", help="cProfile of the router, for pstats")
    raise SystemExit(asyncio.run(main(parser.parse_args())))
