"""What the service costs: decode through the HTTP door, two workers on a core each, beside the bare engine on one core.

    .venv/bin/python benchmarks/service.py [--batches 8 32 64] [--repeats 5] [--config configs/local.yaml]
        [--set KEY=VALUE]

For each batch that many answers of NEW tokens to prompts of PROMPT tokens are streamed at the same time. The service's
rate is that of the window in which all of them are decoded at once; in it the CPU time of each process is read, as a
share of a core. The bare engine generates the same in one process, in turns with the service; its rate is over all NEW
tokens, prefill left out. Medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from baton.benchmarks.engine_compare import CORE, on_core, ours, random_prompts
from baton.benchmarks.http_load import Stream, run_stream
from baton.benchmarks.interference import SETTINGS
from baton.cluster import config_load
from baton.cluster.config import Config
from baton.cluster.deployment import Deployment, running
from baton.cluster.driver import run
from baton.cluster.spec import SpecBuilder
from baton.engine.ranks import SingleRank
from baton.engine.runner import Runner

PROMPT, NEW = 32, 128
_POLL_S = 0.01
_NAME = "model"


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens a second of the service, and the share of a core that each process used."""

    rate: float
    cores: dict[str, float]


def processes(deployment: Deployment) -> dict[str, psutil.Process]:
    """The router, the workers, and this process, which is the client (and the controller, which does nothing)."""
    found = {"client": psutil.Process()}
    for role in ("prefill", "decode"):
        (member,) = deployment.controller.feed.view.ready(role)
        found[role] = psutil.Process(member.pid)
    for child in found["client"].children(recursive=True):
        if "baton.cluster.router_process" in child.cmdline():
            found["router"] = child
    return found


async def serve(address: str, batch: int, watched: dict[str, psutil.Process]) -> Window:
    """One batch through the service."""
    streams = [Stream(PROMPT) for _ in range(batch)]

    async def reached(condition: Callable[[], bool]) -> tuple[float, int, dict[str, float]]:
        while not condition():
            await asyncio.sleep(_POLL_S)
        spent = {name: sum(process.cpu_times()[:2]) for name, process in watched.items()}
        return time.monotonic(), sum(stream.tokens for stream in streams), spent

    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(run_stream(stream, address, _NAME, NEW))
        begin, before, used = await reached(lambda: min(stream.tokens for stream in streams) > 1)
        end, after, spent = await reached(lambda: max(stream.tokens for stream in streams) >= NEW)
    took = end - begin
    return Window((after - before) / took, {name: (spent[name] - used[name]) / took for name in watched})


def bare(runner: Runner, batch: int) -> float:
    """Tokens a second of the engine alone, on one core."""
    with on_core(CORE):
        prompts, generate = random_prompts(batch, PROMPT), ours(runner)
        return batch * (NEW - 1) / (generate(prompts, NEW) - generate(prompts, 1))


async def main(config: Config, arguments: argparse.Namespace) -> int:
    """One row for each batch."""
    engine = SpecBuilder(config).worker("decode-0", "bare", 0, "").params.engine
    runner = Runner(engine, SingleRank(), lambda done, total: None, None)
    async with running(config, _NAME, lambda *_: None) as deployment:
        watched = processes(deployment)
        for batch in arguments.batches:
            alone: list[float] = []
            windows: list[Window] = []
            for _ in range(arguments.repeats + 1):
                alone.append(await asyncio.to_thread(bare, runner, batch))
                windows.append(await serve(deployment.endpoints["http"], batch, watched))
            print(show(batch, statistics.median(alone[1:]), windows[1:]), flush=True)
    return 0


def show(batch: int, alone: float, windows: list[Window]) -> str:
    """One line."""
    rate = statistics.median(window.rate for window in windows)
    cores = {name: statistics.median(window.cores[name] for window in windows) for name in windows[0].cores}
    shares = ", ".join(f"{name} {share:.1%}" for name, share in cores.items())
    rates = f"engine {alone:5.0f} tokens/s, service {rate:5.0f}, ratio {rate / alone:.2f}"
    return f"batch {batch:3}: {rates}; of a core: {shares}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/local.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the YAML")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    raise SystemExit(run(main(config_load.load(options.config, [*SETTINGS, *options.set]), options)))
