"""Placement policies on a trace of conversations, in virtual time: what prefix caches save, and what admission saves.

    .venv/bin/python benchmarks/placement.py --trace FILE.jsonl [--pool 1000000 ...] [--policy NAME ...]
        [--disaggregation always never conditional] [--speed 1.0] [--ttft S --tpot S] [--requests N] [--json]

The trace is in Mooncake's format, a line a request: {"timestamp" (ms), "input_length", "output_length", "hash_ids"};
equal ids stand for equal blocks of 512 tokens. Its stamps are rounded to 3 s; arrivals are spread over these. Every row
runs the whole trace on workers with block pools of their own (`placement_cluster.py`). `--speed 2` has it arrive twice
as fast. Where objectives are given, goodput counts what kept both, and `latency_aware` refuses what it expects to miss.
A policy is PREFILL/DECODE or one name for both; `+guess` after it: routers go by what they sent.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.benchmarks.placement_cluster import Cluster
from baton.benchmarks.placement_workers import Machine, Request, Worker
from baton.proto.step_time import StepTime
from baton.router.placement.choose import Objectives
from baton.router.placement.disaggregation import ALWAYS, POLICIES

BLOCK, ROUNDED_S = 512, 3.0
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


def read(path: Path, speed: float, most: int | None) -> Iterator[Request]:
    """The trace's requests in order of arrival."""
    rng = random.Random(0)
    lines = [json.loads(line) for line in path.read_text().splitlines()][:most]
    stamps = sorted((line["timestamp"] / 1000 + rng.random() * ROUNDED_S, number) for number, line in enumerate(lines))
    for at, number in stamps:
        line = lines[number]
        prompt = array("q")
        for block in line["hash_ids"]:
            prompt.extend(array("q", [block]) * BLOCK)
        yield Request(number, at / speed, prompt[: line["input_length"]], max(1, line["output_length"]))


def measure(
    policy: str, pool: int, requests: Iterator[Request], objectives: Objectives, disaggregation: str = ALWAYS
) -> Row:
    """One run. The objectives bind only policies that know latencies."""
    names, _, how = policy.partition("+")
    prefill, _, decode = names.partition("/")
    machine = Machine(4, 4, pool, BLOCK, 8192, CHUNK, PREFILL, DECODE)
    cluster = Cluster(machine, (prefill, decode or prefill), objectives, how != "guess", 1, disaggregation)
    began = time.perf_counter()
    all_of_them = cluster.run(requests)
    served = [request for request in all_of_them if request.first_at is not None]
    ttft, tpot = sorted(r.ttft for r in served), sorted(r.tpot for r in served)
    good = sum(r.ttft <= (objectives.ttft_s or 1e9) and r.tpot <= (objectives.tpot_s or 1e9) for r in served)
    return Row(
        policy=policy if disaggregation == ALWAYS else f"{policy}@{disaggregation}",
        pool=pool,
        hit_rate=_rate(cluster.prefills.values()),
        decode_hit_rate=_rate(cluster.decodes.values()),
        ttft_p50=_percentile(ttft, 0.5),
        ttft_p90=_percentile(ttft, 0.9),
        ttft_p99=_percentile(ttft, 0.99),
        tpot_p90=_percentile(tpot, 0.9),
        latency_mean=statistics.mean(request.latency for request in served),
        latency_p90=_percentile(sorted(request.latency for request in served), 0.9),
        on_decode=cluster.computed_on_decode / len(all_of_them),
        prefill_imbalance=_imbalance([worker.busy_s for worker in cluster.prefills.values()]),
        decode_imbalance=_imbalance([worker.sequence_s for worker in cluster.decodes.values()]),
        refused=len(cluster.refused),
        goodput=good / all_of_them[-1].at,
        run_s=time.perf_counter() - began,
    )


def _rate(workers: Iterable[Worker]) -> float:
    pools = [worker.pool for worker in workers]
    return sum(p.prefix_hit_tokens for p in pools) / max(1, sum(p.prefix_query_tokens for p in pools))


def _percentile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


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
