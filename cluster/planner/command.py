"""`baton plan` and `baton explain`."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ..config import Config
from ..output import results, say
from ..simulator import confirm, synthetic, traces
from . import explain as explaining
from . import report as reports
from . import setup, tables, writing
from .workload import Workload, from_config, from_requests


def load_of(config: Config) -> Workload:
    """The configuration's workload: recorded (workload.trace) or described. Raises ConfigError."""
    name = config.workload.trace
    if name is None:
        return from_config(config)
    path = config.folder / Path(name).expanduser()
    section = config.workload
    draw = synthetic.drawn(section.prompt_tokens, section.output_tokens, random.Random("lengths"))
    options = traces.Options(contents=False, rate=section.rate, draw=draw)
    trace = traces.load(path, options)
    requests = [(arrival.at, arrival.prompt, arrival.output) for arrival in trace.arrivals]
    said = "; ".join((f"{path.name}, {len(requests)} requests", *trace.notes))
    return from_requests(requests, section.prefix_share, said)


def plan(config: Config, explain: bool, write: Path | None, simulate: bool, as_json: bool) -> int:
    """Print the plan, or the arithmetic behind it. 1: what was asked for is not possible, or not in the simulator."""
    workload = load_of(config)
    if explain:
        site = setup.site(config)
        text = explaining.lines(site.cost("prefill"), site.cost("decode"), workload)
        say(json.dumps(text) if as_json else "\n".join(text))
        return 0
    report = reports.make(config, workload)
    if simulate:
        report = simulated(report)
    if as_json:
        say(json.dumps(reports.as_json(report), indent=2))
    else:
        with results() as file:
            tables.show(report, Console(file=file, highlight=False))
    if write is not None:
        say(writing.write(config, report, write), end="\n" if not as_json else "")
    return 0 if report.feasible else 1


def simulated(report: reports.Report) -> reports.Report:
    """The report with its plans played through, at the busiest window's rate."""
    arrivals = confirm.arrivals_of(report.workload)
    plans = (report.found.disaggregated, report.found.aggregated, report.best_effort)
    verdicts = [confirm.judge(plan, report.found.relaxed, arrivals) for plan in plans if plan is not None]
    found = [reports.Simulated(v.plan, v.summary["ttft_s"], v.summary["tpot_s"], v.misses) for v in verdicts]
    return replace(report, simulated=tuple(found), simulated_requests=len(arrivals))


def explain(topic: str, model: str) -> int:
    """`baton explain TOPIC`."""
    say("\n".join(explaining.topic(topic, model)))
    return 0
