"""Placement policies on a trace of conversations, in virtual time: what prefix caches save, and what admission saves.

    .venv/bin/python benchmarks/placement.py --trace FILE.jsonl [--pool 1000000 ...] [--policy NAME ...]
        [--disaggregation always never conditional] [--speed 1.0] [--ttft S --tpot S] [--requests N] [--json]

The trace is in Mooncake's format, a line a request: {"timestamp" (ms), "input_length", "output_length", "hash_ids"};
equal ids stand for equal blocks of 512 tokens. Its stamps are rounded to 3 s; arrivals are spread over these. Every row
runs the whole trace through the simulator (`cluster/simulator/`). `--speed 2` has it arrive twice as fast. Where
objectives are given, goodput counts what kept both, and `latency_aware` refuses what it expects to miss.
A policy is PREFILL/DECODE or one name for both; `+guess` after it: routers go by what they sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from baton.cluster.simulator import traces
from baton.cluster.simulator.decode import DecodeWorker
from baton.cluster.simulator.request import Arrival
from baton.cluster.simulator.results import Results
from baton.cluster.simulator.run import Simulation
from baton.cluster.simulator.spec import Cluster, DecodePool, LayeredTransfer, PrefillPool, Rules
from baton.cluster.simulator.worker import Worker
from baton.proto.step_time import StepTime
from baton.router.placement.choose import Objectives
from baton.router.placement.disaggregation import ALWAYS, POLICIES

BLOCK, NOISE = 512, 0.05
CHUNK = 512  # prompt tokens that a decode worker computes beside its batch in a step: 36 ms
# Llama-3-70B, bfloat16, on four H100 a worker, by the roofline: 140 GFLOP a token at half of 4 PFLOP/s; 140 GB of
# weights and 0.33 MB of KV a token at 9.4 TB/s.
PREFILL, DECODE = StepTime(0.02, 70e-6, 6.5e-10), StepTime(0.02, 1e-4, 3.5e-8)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one size of pools. Seconds; rates 0 to 1; imbalance: the most loaded worker by the mean."""

    policy: str
    pool: int
    hit_rate: float  # prompt tokens that prefill found in its cache
    decode_hit_rate: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p90: float
    latency_mean: float  # to the last token
    latency_p90: float
    on_decode: float  # prompts that their decode worker computed
    prefill_imbalance: float  # of the seconds that they computed
    decode_imbalance: float  # of sequence-seconds
    refused: int
    goodput: float  # requests a second that kept both objectives
    run_s: float


def read(path: Path, speed: float, most: int | None) -> Iterator[Arrival]:
    """The trace's requests in order of arrival. Raises ConfigError."""
    return traces.load(path, traces.Options(speed=speed, requests=most)).arrivals


def cluster(
    replicas: tuple[int, int], pool: int, names: tuple[str, str], objectives: Objectives, told: bool, where: str
) -> Cluster:
    """Workers of the model above, with so many tokens of KV each; transfers are hidden, messages take no time.
    `where`: `router.placement.disaggregation`."""
    blocks, endless = pool // BLOCK, 1e9
    return Cluster(
        PrefillPool(replicas[0], PREFILL, blocks, 8192, 2),
        DecodePool(replicas[1], DECODE, blocks, 1 << 20, CHUNK),
        BLOCK,
        LayeredTransfer(0.0, 0.0, 1),
        Rules(*names, told, objectives, 1 << 30, endless, endless, endless, 3, where),
        noise=NOISE,
    )


def measure(
    policy: str, pool: int, requests: Iterator[Arrival], objectives: Objectives, disaggregation: str = ALWAYS
) -> Row:
    """One run. The objectives bind only policies that know latencies."""
    names, _, how = policy.partition("+")
    prefill, _, decode = names.partition("/")
    placed = (prefill, decode or prefill)
    run = Simulation(
        cluster((4, 4), pool, placed, objectives, how != "guess", disaggregation), requests, seed=1, named=True
    )
    began = time.perf_counter()
    results = run.run().results
    strict = {name: {"p99": s} for name, s in (("ttft", objectives.ttft_s), ("tpot", objectives.tpot_s)) if s}
    ttft, latency = (quantiles(results, metric) for metric in ("ttft", "e2e"))
    pools: dict[str, list[Worker]] = {"prefill": [], "decode": []}
    for worker in run.gone:
        pools[worker.role].append(worker)
    good = results.good(strict)
    return Row(
        policy=policy if disaggregation == ALWAYS else f"{policy}@{disaggregation}",
        pool=pool,
        hit_rate=_rate(pools["prefill"]),
        decode_hit_rate=_rate(pools["decode"]),
        ttft_p50=ttft[0],
        ttft_p90=ttft[1],
        ttft_p99=ttft[2],
        tpot_p90=quantiles(results, "tpot")[1],
        latency_mean=float(results.values("e2e").mean(dtype=float)),
        latency_p90=latency[1],
        on_decode=results.on_decode / results.measured,
        prefill_imbalance=_imbalance([worker.busy_s for worker in pools["prefill"]]),
        decode_imbalance=_imbalance([worker.sequence_s for worker in run.gone if isinstance(worker, DecodeWorker)]),
        refused=results.all_refused,
        goodput=(1.0 if good is None else good) * results.measured / max(results.sent_s),
        run_s=time.perf_counter() - began,
    )


def quantiles(results: Results, metric: str) -> list[float]:
    """p50, p90, p99 of a metric."""
    return [float(value) for value in np.quantile(results.values(metric), [0.5, 0.9, 0.99])]


def _rate(workers: Iterable[Worker]) -> float:
    pools = [worker.pool for worker in workers]
    return sum(p.prefix_hit_tokens for p in pools) / max(1, sum(p.prefix_query_tokens for p in pools))


def _imbalance(loads: list[float]) -> float:
    return max(loads) / (statistics.mean(loads) or 1.0)


def show(row: Row) -> str:
    """One line."""
    return (
        f"{row.policy:>28} {row.pool / 1e6:5.2f}M: hits {row.hit_rate:6.2%} (D {row.decode_hit_rate:6.2%}), "
        f"TTFT p50 {row.ttft_p50:6.2f} p90 {row.ttft_p90:6.2f} p99 {row.ttft_p99:6.2f} s, "
        f"TPOT p90 {1e3 * row.tpot_p90:5.1f} ms, latency {row.latency_mean:.2f} p90 {row.latency_p90:.2f} s, "
        f"on D {row.on_decode:.0%}, "
        f"imbalance P {row.prefill_imbalance:.3f} D {row.decode_imbalance:.3f}, refused {row.refused}, "
        f"goodput {row.goodput:.3f}/s ({row.run_s:.0f} s)"
    )


def main(options: argparse.Namespace) -> None:
    """All rows, each as it comes."""
    objectives = Objectives(options.ttft, options.tpot)
    runs = [(pool, policy, how) for pool in options.pool for policy in options.policy for how in options.disaggregation]
    for pool, policy, how in runs:
        row = measure(policy, pool, read(options.trace, options.speed, options.requests), objectives, how)
        print(json.dumps(asdict(row)) if options.json else show(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines in Mooncake's format")
    parser.add_argument("--pool", type=int, nargs="+", default=[1_000_000], help="tokens of each worker's KV pool")
    parser.add_argument("--policy", nargs="+", default=["round_robin", "prefix_aware"])
    parser.add_argument("--disaggregation", nargs="+", choices=sorted(POLICIES), default=[ALWAYS])
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--ttft", type=float, help="objective in seconds")
    parser.add_argument("--tpot", type=float, help="objective in seconds")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--json", action="store_true")
    main(parser.parse_args())
