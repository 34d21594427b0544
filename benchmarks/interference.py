"""What long prompts do to running answers: our service, a core for each pool, beside vLLM's CPU server on both cores.

    .venv/bin/python benchmarks/interference.py [--peer-python VENV/bin/python --peer-model DIR] [--every 5]
        [--seconds 60] [--config configs/local.yaml] [--set KEY=VALUE]

Through the OpenAI HTTP door: STREAMS clients, each with one answer after the other (64 prompt tokens, 128 new ones),
first alone, then with a prompt of LONG tokens every few seconds. The peer serves with its defaults and with
`--max-num-batched-tokens 128`. DIR is a Hugging Face directory of the model that the configuration serves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from baton.benchmarks.http_load import Stream, run_stream
from baton.cluster import config_load
from baton.cluster.config import Config
from baton.cluster.deployment import running
from baton.cluster.driver import run

STREAMS, SHORT, NEW, LONG = 6, 64, 128, 1500
ALONE_S = 20.0
_START_S = 180.0
_NAME = "model"
SETTINGS = (
    "cluster.launcher=process",
    "engine.prefix_cache=false",
    "pools.prefill.cores=0",
    "pools.decode.cores=1",
    "router.grpc=127.0.0.1:0",
    "router.http=127.0.0.1:0",
    "router.admin=127.0.0.1:0",
)


@dataclass(frozen=True, slots=True)
class Load:
    """One period of load: inter-token latencies of the streams and TTFT of the long prompts, seconds."""

    itl: list[float]
    tokens_per_s: float
    ttft: list[tuple[float, float]]  # (when it was sent, seconds)

    def percentile(self, share: float) -> float:
        """Of the inter-token latencies."""
        ordered = sorted(self.itl)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def long_s(self) -> float:
        """Median TTFT of the long prompts."""
        return statistics.median(seconds for _, seconds in self.ttft)

    @property
    def growth(self) -> float:
        """Of the long prompts' TTFT over the run: slope of a least-squares line times its length, in medians."""
        sent, waited = zip(*self.ttft, strict=True)
        growth: float = statistics.linear_regression(sent, waited).slope * (sent[-1] - sent[0])
        return growth / self.long_s


async def load(address: str, seconds: float, every: float | None) -> Load:
    """Run the streams for so long, a long prompt every `every` seconds; what began before the end is waited for."""
    end = time.monotonic() + seconds
    streams: list[Stream] = []
    longs: list[Stream] = []

    async def client() -> None:
        while time.monotonic() < end:
            streams.append(Stream(SHORT))
            await run_stream(streams[-1], address, _NAME, NEW)

    async def long_prompts(period: float, group: asyncio.TaskGroup) -> None:
        while time.monotonic() < end:
            longs.append(Stream(LONG))
            group.create_task(run_stream(longs[-1], address, _NAME, 1))
            await asyncio.sleep(period)

    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(client())
        if every is not None:
            group.create_task(long_prompts(every, group))
    tokens = sum(count for stream in streams for when, count in stream.arrivals if when < end)
    gaps = [gap for stream in streams for when, gap in stream.gaps if when < end]
    return Load(gaps, tokens / seconds, [(one.started, one.ttft) for one in longs])


async def measure(name: str, address: str, seconds: float, every: float) -> tuple[Load, Load]:
    """(alone, disturbed), after one answer that does not count; prints both."""
    await run_stream(Stream(SHORT), address, _NAME, 8)
    await run_stream(Stream(LONG), address, _NAME, 1)
    alone = await load(address, ALONE_S, None)
    print(show(f"{name}, alone", alone), flush=True)
    disturbed = await load(address, seconds, every)
    print(show(f"{name}, disturbed", disturbed), flush=True)
    return alone, disturbed


def show(name: str, load: Load) -> str:
    """One line."""
    latencies = " / ".join(f"{1e3 * load.percentile(share):.0f}" for share in (0.5, 0.9, 0.99, 1.0))
    line = f"{name:28}: ITL p50/p90/p99/max {latencies} ms; {load.tokens_per_s:5.0f} tokens/s"
    if load.ttft:
        line += (
            f"; TTFT of {len(load.ttft)} long prompts p50 {load.long_s:.2f} s, growth over the run {load.growth:+.0%}"
        )
    return line


@contextlib.asynccontextmanager
async def peer(python: str, model: str, arguments: Sequence[str]) -> AsyncIterator[str]:
    """vLLM's server on cores 0 and 1: its address. Raises RuntimeError when it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", _NAME]
    command += ["--dtype", "bfloat16", "--max-model-len", "4096", "--no-enable-prefix-caching", "--port", str(port)]
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "4", "PYTHONPATH": ""}
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            *command, "--host", "127.0.0.1", *arguments, stdout=said, stderr=said, env={**os.environ, **settings}
        )
        try:
            await _until_open(process, port)
        except RuntimeError:
            said.seek(0)
            sys.stderr.write(said.read()[-2000:].decode(errors="replace"))
            raise
        else:
            yield f"127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _until_open(process: asyncio.subprocess.Process, port: int) -> None:
    deadline = time.monotonic() + _START_S
    while process.returncode is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.2)
    raise RuntimeError("the peer does not start; what it said is above")


def compare(alone: Load, ours: Load, peers: Sequence[Load]) -> None:
    """The ratios."""
    p99 = ours.percentile(0.99)
    print(f"ours: ITL p99 disturbed / alone {p99 / alone.percentile(0.99):.2f}")
    if peers:
        best = min(peers, key=lambda peer: peer.percentile(0.99))
        print(
            f"ours / the peer's better p99: ITL p99 {p99 / best.percentile(0.99):.2f}, "
            f"tokens/s {ours.tokens_per_s / max(peer.tokens_per_s for peer in peers):.2f} of its best, "
            f"TTFT of long prompts {ours.long_s / min(peer.long_s for peer in peers):.2f} of its best"
        )


async def main(config: Config, arguments: argparse.Namespace) -> int:
    """Each server in turn, one at a time."""
    peers = []
    variants = {"peer": [], "peer, 128 a batch": ["--max-num-batched-tokens", "128"]} if arguments.peer_python else {}
    for name, extra in variants.items():
        async with peer(arguments.peer_python, arguments.peer_model, extra) as address:
            peers.append((await measure(name, address, arguments.seconds, arguments.every))[1])
    async with running(config, _NAME, lambda *_: None) as deployment:
        alone, ours = await measure("ours", deployment.endpoints["http"], arguments.seconds, arguments.every)
    compare(alone, ours, peers)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/local.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the YAML")
    parser.add_argument("--every", type=float, default=5.0, help="seconds from one long prompt to the next")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--peer-python")
    parser.add_argument("--peer-model")
    options = parser.parse_args()
    if (options.peer_python is None) != (options.peer_model is None):
        parser.error("--peer-python and --peer-model go together")
    raise SystemExit(run(main(config_load.load(options.config, [*SETTINGS, *options.set]), options)))
