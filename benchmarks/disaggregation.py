"""Where prompts are computed, in virtual time: `router.placement.disaggregation` on three kinds of work.

    .venv/bin/python benchmarks/disaggregation.py [--seconds 60] [--json]

Chat: short prompts, and as many tokens out; summaries: long prompts; and a mixture, one of seven being long. Requests
come as a Poisson process, on four prefill and four decode workers and on one prefill and four decode workers of the
simulator (`cluster/simulator/`; the laws of `placement.py`). What is compared is the mean time to a request's last
token.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from baton.benchmarks.placement import cluster
from baton.cluster.simulator.request import Arrival
from baton.cluster.simulator.run import simulate
from baton.router.placement.choose import Objectives
from baton.router.placement.disaggregation import POLICIES

KINDS = {"chat": 0.0, "summaries": 1.0, "mixed": 1 / 7}  # how many of them are long
RATES = {  # requests a second, by prefill workers: a quiet cluster, and one near what it can do
    4: {"chat": (20.0, 100.0), "summaries": (2.0, 6.0), "mixed": (10.0, 30.0)},
    1: {"chat": (20.0, 60.0), "summaries": (0.5, 2.0), "mixed": (4.0, 10.0)},
}
_POOL = 1_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """One way on one kind of work. Seconds."""

    kind: str
    prefills: int
    rate: float
    disaggregation: str
    latency_mean: float
    ttft_mean: float
    tpot_mean: float
    on_decode: float  # prompts that were computed where they are decoded


def work(kind: str, rate: float, seconds: float, seed: int = 0) -> Iterator[Arrival]:
    """Requests in order of arrival; no two prompts begin alike."""
    rng, at = random.Random(seed), 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        long = rng.random() < KINDS[kind]
        median, spread, most = (7300.0, 0.5, 30000) if long else (200.0, 0.8, 3000)
        tokens = min(most, 1 + int(median * rng.lognormvariate(0.0, spread)))
        output = min(1000, 2 + int(120 * rng.lognormvariate(0.0, 0.6)))
        yield Arrival(at, tokens, output)


def measure(kind: str, prefills: int, rate: float, disaggregation: str, seconds: float) -> Row:
    """One run."""
    names = "least_loaded", "least_loaded"
    made = cluster((prefills, 4), _POOL, names, Objectives(None, None), told=True, where=disaggregation)
    results = simulate(made, work(kind, rate, seconds), seed=1).results
    means = {metric: float(results.values(metric).mean(dtype=float)) for metric in ("e2e", "ttft", "tpot")}
    return Row(
        kind=kind,
        prefills=prefills,
        rate=rate,
        disaggregation=disaggregation,
        latency_mean=means["e2e"],
        ttft_mean=means["ttft"],
        tpot_mean=means["tpot"],
        on_decode=results.on_decode / results.measured,
    )


def show(row: Row) -> str:
    """One line."""
    return (
        f"{row.kind:>10} {row.prefills}P+4D {row.rate:5.1f}/s {row.disaggregation:>12}: {row.latency_mean:7.2f} s, "
        f"TTFT {row.ttft_mean:6.2f} s, TPOT {1e3 * row.tpot_mean:5.1f} ms, {row.on_decode:4.0%} computed on decode"
    )


def main(options: argparse.Namespace) -> None:
    """All rows, each as it comes."""
    for prefills, kinds in RATES.items():
        for kind, rates in kinds.items():
            for rate in rates:
                for disaggregation in POLICIES:
                    row = measure(kind, prefills, rate, disaggregation, options.seconds)
                    print(json.dumps(asdict(row)) if options.json else show(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="in which requests arrive")
    parser.add_argument("--json", action="store_true")
    main(parser.parse_args())
