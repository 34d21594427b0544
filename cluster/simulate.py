"""`baton simulate`: the cluster of a configuration in virtual time, and what its requests would see."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..proto.errors import ConfigError
from .config import Config
from .config_workload import SLOSection
from .output import results, say
from .planner.workload import Distribution
from .simulator import profile as profiles
from .simulator.autoscaling import Scaling, scaling
from .simulator.profile import Profile
from .simulator.results import SHARES, Limits
from .simulator.run import Outcome, Simulation, simulate
from .simulator.spec import Change, Cluster, Fail, Scale, Switch
from .simulator.timeline import columns
from .simulator.traces import Trace
from .simulator.workload import Load
from .units import parse_duration

_SAMPLES = 240
_LOOKED_AT = 2000  # requests, for what a worker can do
_FRONTIER = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # of the load's own rate
_FRONTIER_REQUESTS = 2000


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be simulated and shown."""

    load: Load
    profile: Path | None
    changes: tuple[Change, ...]
    seed: int
    frontier: bool
    as_json: bool
    html: Path | None
    autoscale: tuple[int, float] | None = None  # the most workers of a pool, seconds until a new one is ready


def slo_limits(slo: SLOSection) -> dict[str, dict[str, float]]:
    """The limits that are set."""
    sections = (("ttft", slo.ttft), ("tpot", slo.tpot))
    limits = {metric: section.model_dump(exclude_none=True) for metric, section in sections}
    return {metric: values for metric, values in limits.items() if values}


def run(config: Config, wanted: Wanted) -> int:
    """Simulates and prints. Raises ConfigError."""
    found = profiles.load(wanted.profile) if wanted.profile is not None else profiles.predicted(config)
    result = simulated(config, found, wanted)
    if wanted.html is not None:
        from .report_page import write_page

        write_page(wanted.html, result)
    if wanted.as_json:
        say(json.dumps(result))
    else:
        with results() as file:
            _print(result, Console(file=file, highlight=False))
            if wanted.html is not None:
                print(f"report: {wanted.html}", file=file)
    return 0 if result["simulated"]["requests"]["completed"] else 1


def simulated(config: Config, found: Profile, wanted: Wanted) -> dict[str, Any]:
    """A run as JSON values: what the table, the report and `--json` show."""
    limits = slo_limits(config.slo)
    began = time.thread_time()
    arrivals = wanted.load.open()
    span = _span(wanted.load)
    cluster = replace(profiles.cluster_of(config, found, max(span / _SAMPLES, 1e-3)), changes=wanted.changes)
    every = None if wanted.autoscale is None else _scaling(cluster, wanted.load, *wanted.autoscale)
    run = Simulation(cluster, arrivals.arrivals, seed=wanted.seed, named=arrivals.named, every=every)
    outcome = run.run()
    spent = time.thread_time() - began
    return {
        "kind": "simulation",
        "load": {"workload": arrivals.kind, "notes": list(arrivals.notes), "seed": wanted.seed},
        "profile": profiles.to_fields(found),
        "limits_s": limits,
        "simulated": summarised(outcome, limits),
        "cdf": {metric: {"simulated": cdf(outcome, metric)} for metric in ("ttft", "tpot", "e2e")},
        "timeline": {"simulated": columns(outcome.timeline)},
        "roofline": operating_points(found, outcome),
        "frontier": _frontier(config, found, wanted),
        "run": {"cpu_s": spent, "requests_per_cpu_s": len(outcome.results) / spent if spent else None},
    }


def _scaling(cluster: Cluster, load: Load, most: int, start_s: float) -> tuple[float, Scaling]:
    """By the lengths of the load's first requests."""
    first = [(a.prompt, a.output) for a in itertools.islice(replace(load, contents=False).open().arrivals, _LOOKED_AT)]
    if not first:
        raise ConfigError("--autoscale: there are no requests")
    prompts, outputs = (Distribution.sampled(lengths) for lengths in zip(*first, strict=True))
    return scaling(cluster, prompts, outputs, most, start_s)


def summarised(outcome: Outcome, limits: Limits) -> dict[str, Any]:
    """All numbers of a run."""
    return {**outcome.results.summary(limits), "workers": _workers(outcome)}


def _workers(outcome: Outcome) -> dict[str, Any]:
    """Shares of time that the pools computed, and what their blocks held at most."""
    names = ("prefill", "decode")
    busy = {n: sum(s for worker, s in outcome.busy_s.items() if worker.startswith(n)) for n in names}
    seconds = {role: outcome.worker_s.get(role, 0.0) for role in ("prefill", "decode")}
    counts = {n: sum(worker.startswith(n) for worker in outcome.busy_s) for n in names}
    query = outcome.prefix_query_tokens
    return {
        "prefill": {"replicas": counts["prefill"], "busy": _share(busy["prefill"], seconds["prefill"])},
        "decode": {"replicas": counts["decode"], "busy": _share(busy["decode"], seconds["decode"])},
        "prefill_blocks_peak": max((row.prefill_blocks for row in outcome.timeline), default=None),
        "decode_blocks_peak": max((row.decode_blocks for row in outcome.timeline), default=None),
        "decode_batch_mean": _mean([row.decode_running for row in outcome.timeline]),
        "prefix_hit_rate": outcome.prefix_hit_tokens / query if query else None,
    }


def cdf(outcome: Outcome, metric: str, points: int = 200) -> list[float]:
    """Equally likely values, the least first."""
    import numpy as np

    values = outcome.results.values(metric)
    return [] if not len(values) else [float(v) for v in np.quantile(values, np.linspace(0, 1, points))]


def operating_points(found: Profile, outcome: Outcome) -> dict[str, Any]:
    """Decode speed by batch as the law has it, and where the run was: (sequences, tokens a second of a worker)."""
    served = outcome.results.summary({})
    output, prompt = served["output_tokens"], served["prompt_tokens"]
    context = (prompt + output / 2) / max(1, len(outcome.results))
    batches = sorted({round(1.35**power) for power in range(21)})
    curve = [(b, b / found.decode.seconds((1.0, float(b), b * context))) for b in batches]
    running = [row.decode_running / max(1, row.decode_workers) for row in outcome.timeline if row.decode_running]
    points = [(b, b / found.decode.seconds((1.0, b, b * context))) for b in running]
    return {"context": context, "decode": curve, "points": points}


def frontier(config: Config, found: Profile, at_speed: Callable[[float], Trace], seed: int) -> list[dict[str, Any]]:
    """The same requests at other rates: how many a second keep the limits."""
    rows: list[dict[str, Any]] = []
    limits = slo_limits(config.slo)
    for times in _FRONTIER:
        trace = at_speed(times)
        cluster = profiles.cluster_of(config, found, None)
        summary = simulate(cluster, trace.arrivals, seed=seed, named=trace.named).results.summary(limits)
        length = summary["window_s"]
        rows.append(
            {
                "rate": summary["requests"]["measured"] / length if length else None,
                "share": summary["share_within_p99_limits"],
                "goodput": summary["throughput"]["goodput_per_s"],
                "ttft_p99": summary["ttft_s"]["p99"],
                "tpot_p99": summary["tpot_s"]["p99"],
            }
        )
    return rows


def _frontier(config: Config, found: Profile, wanted: Wanted) -> list[dict[str, Any]]:
    load = _shorter(wanted.load)
    return frontier(config, found, lambda times: load.faster(times).open(), wanted.seed) if wanted.frontier else []


def _shorter(load: Load) -> Load:
    """No more requests than a frontier needs."""
    return replace(load, requests=min(load.requests or _FRONTIER_REQUESTS, _FRONTIER_REQUESTS))


def parse_changes(fail: Sequence[str], switch: Sequence[str], scale: Sequence[str]) -> tuple[Change, ...]:
    """`decode-0@30s+20s` (down for 20 s; without +: for ever), likewise for switches, and `decode=3@60s+30s`.

    Raises ConfigError.
    """
    changes: list[Change] = []
    for option, texts in (("--fail", fail), ("--switch", switch), ("--scale", scale)):
        for text in texts:
            changes.append(_change(option, text))
    return tuple(sorted(changes, key=lambda change: change.at))


def _change(option: str, text: str) -> Change:
    match = re.fullmatch(r"(prefill|decode)([-=])(\d+)@([^+]+)(?:\+(.+))?", text)
    if match is None or (match[2] == "=") != (option == "--scale"):
        example = "decode=3@60s+30s" if option == "--scale" else "decode-0@30s+20s"
        raise ConfigError(f"{option}: {text}: expected such as {example}")
    try:
        at = parse_duration(match[4])
        after = parse_duration(match[5]) if match[5] is not None else None
    except ValueError as error:
        raise ConfigError(f"{option}: {text}: {error}") from None
    name = f"{match[1]}-{match[3]}"
    if option == "--fail":
        return Fail(at, name, after)
    if option == "--switch":
        return Switch(at, name, after or 0.0)
    if int(match[3]) < 1:
        raise ConfigError(f"{option}: {text}: a pool has at least one worker")
    return Scale(at, "prefill" if match[1] == "prefill" else "decode", int(match[3]), after or 0.0)


def _span(load: Load) -> float:
    """Seconds of the arrivals: the trace is read once more for it, and not kept."""
    last = 0.0
    for arrival in replace(load, contents=False).open().arrivals:
        last = arrival.at
    return last


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _print(result: dict[str, Any], console: Console) -> None:
    """For people."""
    done, load = result["simulated"], result["load"]
    requests = done["requests"]
    others = [
        f"{requests[name]} {name.replace('_', ' ')}"
        for name in ("refused", "too_long", "failed", "preemptions", "retries")
        if requests[name]
    ]
    counts = ", ".join([f"{requests['completed']} completed", *others])
    console.print(f"{load['workload']}: {counts}")
    for note in [*load["notes"], result["profile"]["source"]]:
        console.print(f"  {note}")
    table = Table()
    for heading in ("", "count", "mean", *SHARES):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        numbers = [done[name][key] for key in ("mean", *SHARES)]
        cells = ["-" if number is None else f"{1000 * number:.1f} ms" for number in numbers]
        table.add_row(name.removesuffix("_s").upper(), str(done[name]["count"]), *cells)
    console.print(table)
    rates, busy = done["throughput"], done["workers"]
    if rates["requests_per_s"] is not None:
        console.print(f"{rates['output_tokens_per_s']:.1f} output tokens/s, {rates['requests_per_s']:.2f} requests/s")
    for role in ("prefill", "decode"):
        pool = busy[role]
        if pool["busy"] is not None:
            console.print(f"{role}: {pool['replicas']} workers, computing {pool['busy']:.0%} of the time")
    if done["share_within_p99_limits"] is not None:
        console.print(f"{done['share_within_p99_limits']:.1%} of requests within the p99 limits together")
    spent = result["run"]
    console.print(f"simulated in {spent['cpu_s']:.2f} s of CPU time")
