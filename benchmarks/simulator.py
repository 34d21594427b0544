"""How fast the simulator is: CPU seconds of this process, and its memory.

    .venv/bin/python benchmarks/simulator.py --trace AzureLLMInferenceTrace_conv.csv [--speed 20] [--repeat 3]
        [--rate 3000 --workers 1000 --requests 30000 60000 120000] [--hour] [--html OUT.html] [--json]

First the trace on 16 prefill and 16 decode workers of Llama-3.1-8B on H100, then `--requests` of its lengths at
`--rate` on pools of `--workers` each, for growing numbers of requests: a straight line through them says that time is
linear. `--hour` runs one hour of that, as `--requests 10800000`, about half an hour of CPU time. Each simulated minute
is said on stderr; a run that is cut (SIGINT, SIGTERM) says how far it came, adds no row and ends with exit code 1.
Placement is `power_of_two` on the large pools, as any that looks at all of a thousand workers for each request takes
longer for it, live as here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.cluster import config_load
from baton.cluster.charts import Axis, Series, chart
from baton.cluster.config import Config
from baton.cluster.simulator import profile, synthetic, traces
from baton.cluster.simulator.request import Arrival
from baton.cluster.simulator.run import Simulation

CONFIG = Path(__file__).parent.parent / "configs" / "h100-node.yaml"
HOUR_S = 3600
_SAID_S = 60.0  # of traffic


@dataclass(frozen=True, slots=True)
class Row:
    """One run. `peak_mib`: the most memory that the process has had up to its end."""

    load: str
    workers: str
    placement: str
    requests: int
    simulated_s: float
    cpu_s: float
    requests_per_cpu_s: float
    events_per_request: float
    ttft_p50_ms: float
    tpot_p50_ms: float
    peak_mib: float


def configuration(workers: int, placement: str) -> Config:
    """So many workers of each pool, one GPU each."""
    sizes = (f"replicas={workers}", "tensor_parallel=1")
    pools = [f"pools.{pool}.{size}" for pool in ("prefill", "decode") for size in sizes]
    policies = [f"router.placement.{pool}={placement}" for pool in ("prefill", "decode")]
    others = ["model.path=llama-3.1-8b", "router.max_inflight=100000000"]
    return config_load.load(str(CONFIG), [*pools, *policies, *others])


def measure(load: str, workers: int, placement: str, arrivals: Iterable[Arrival]) -> Row:
    """One run on as many workers in both pools. Raises KeyboardInterrupt when it is cut."""
    config = configuration(workers, placement)
    cluster = profile.cluster_of(config, profile.predicted(config), None)
    began = time.thread_time()

    def so_far(run: Simulation) -> str:
        done, spent = len(run.results), time.thread_time() - began
        return f"{run.clock.now:.0f} s of traffic, {done} requests, {spent:.1f} s of CPU, at most {_peak_mib():.0f} MiB"

    run = Simulation(cluster, arrivals, every=(_SAID_S, lambda run: _say(so_far(run))))
    try:
        outcome = run.run()
    except KeyboardInterrupt:
        _say(f"cut after {so_far(run)}")
        raise
    spent = time.thread_time() - began
    count, summary = len(outcome.results), outcome.results.summary({})
    return Row(
        load,
        f"{workers}P+{workers}D",
        placement,
        count,
        outcome.ended_s,
        spent,
        count / spent,
        outcome.events / count,
        1000 * summary["ttft_s"]["p50"],
        1000 * summary["tpot_s"]["p50"],
        _peak_mib(),
    )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def poisson(rate: float, lengths: list[tuple[int, int]], count: int) -> Iterable[Arrival]:
    """A stream: nothing of it is kept."""
    draw = synthetic.resampled(lengths, random.Random(1))
    return itertools.islice(synthetic.requests(synthetic.poisson(rate, random.Random(2)), draw), count)


def show(row: Row) -> str:
    """One line."""
    return (
        f"{row.load}, {row.workers}, {row.placement}: {row.requests} requests ({row.simulated_s:.0f} s) in "
        f"{row.cpu_s:.1f} s of CPU = {row.requests_per_cpu_s:.0f}/s; {row.events_per_request:.1f} events each; "
        f"TTFT p50 {row.ttft_p50_ms:.1f} ms, TPOT p50 {row.tpot_p50_ms:.2f} ms; at most {row.peak_mib:.0f} MiB"
    )


def main(options: argparse.Namespace) -> None:
    """All rows, each as it comes."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(json.dumps(asdict(row)) if options.json else show(row), flush=True)

    for _ in range(options.repeat):
        trace = traces.load(options.trace, traces.Options(speed=options.speed))
        add(measure(f"trace x{options.speed:g}", 16, "least_loaded", trace.arrivals))
    lengths = traces.lengths_of(options.trace)
    counts = [*options.requests, *([round(HOUR_S * options.rate)] if options.hour else [])]
    large = []
    for count in counts:
        arrivals = poisson(options.rate, lengths, count)
        large.append(measure(f"poisson {options.rate:g}/s", options.workers, "power_of_two", arrivals))
        add(large[-1])
    if options.html is not None:
        points = [(float(row.requests), row.cpu_s) for row in large]
        line = Series("measured", "measured", points, marks=True)
        slope = large[-1].cpu_s / large[-1].requests
        ends = [(n, n * slope) for n in (0.0, points[-1][0])]
        straight = Series(f"{1e6 * slope:.0f} us a request", "planned", ends)
        figure = chart("CPU time by requests", Axis("requests", low=0), Axis("s", low=0), [straight, line])
        options.html.write_text(f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{figure}")


STYLE = (
    "body{font:14px system-ui;max-width:760px;margin:2em auto}.line{fill:none;stroke:#7a4fc4}.mark{fill:#1f5fbf}"
    ".grid{stroke:#ddd}.axis{stroke:#666}.tick,.label{font-size:11px;fill:#666}"
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="Azure's conversation trace, or another")
    parser.add_argument("--speed", type=float, default=20.0, help="of the trace on 16 + 16 workers")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rate", type=float, default=3000.0)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--requests", type=int, nargs="*", default=[30_000, 60_000, 120_000])
    parser.add_argument("--hour", action="store_true")
    parser.add_argument("--html", type=Path)
    parser.add_argument("--json", action="store_true")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main(parser.parse_args())
    except KeyboardInterrupt:
        sys.exit(1)
