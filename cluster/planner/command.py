"""`baton plan` and `baton explain`."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ..config import Config
from ..output import results, say
from ..simulator import confirm, synthetic, traces
from ..simulator.request import Arrival
from . import explain as explaining
from . import report as reports
from . import setup, tables, writing
from .plans import Plan
from .search import Search
from .workload import Slo, Workload, from_config, from_requests

_ROOM = 1.5  # times the GPUs of a closed form's plan that the simulator may come to
_MOST = 32  # plans of a kind that are simulated


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
        report = decided(config, report)
    if as_json:
        say(json.dumps(reports.as_json(report), indent=2))
    else:
        with results() as file:
            tables.show(report, Console(file=file, highlight=False))
    if write is not None:
        say(writing.write(config, report, write), end="\n" if not as_json else "")
    return 0 if report.feasible else 1


def decided(config: Config, report: reports.Report) -> reports.Report:
    """The report with the cheapest plan of each kind that the simulator lets pass, at the busiest window's rate. A kind
    of which it lets none pass is left out, unless neither has any: then closed forms' plans are shown, and refused."""
    arrivals, found = confirm.arrivals_of(report.workload), report.found
    search = Search(report.site, config.plan.gpus, config.plan.tensor_parallel)
    closed = [plan for plan in (found.disaggregated, found.aggregated) if plan is not None]
    verdicts = [_decided(search, plan, found.relaxed, arrivals) for plan in closed]
    verdicts = [one for one in verdicts if not one.misses] or verdicts
    if not verdicts and report.best_effort is not None:
        verdicts = [confirm.judge(report.best_effort, found.relaxed, arrivals)]
    elif verdicts:
        by_kind = {one.plan.kind: one.plan for one in verdicts}
        found = replace(found, disaggregated=by_kind.get("disaggregated"), aggregated=by_kind.get("aggregated"))
        report = reports.about(report.site, search, report.workload, found)
    shown = [reports.Simulated(one.plan, one.summary["ttft_s"], one.summary["tpot_s"], one.misses) for one in verdicts]
    return replace(report, simulated=tuple(shown), simulated_requests=len(arrivals))


def _decided(search: Search, closed: Plan, slo: Slo, arrivals: Sequence[Arrival]) -> confirm.Verdict:
    """On the cheapest plan of the kind that passes; on the closed form's own where none does."""
    room = min(search.gpus, math.ceil(_ROOM * closed.gpus))
    plans = search.affordable(closed.kind, closed.workload, slo, room)
    return confirm.decide(plans, slo, arrivals, _MOST)[0] or confirm.judge(closed, slo, arrivals)


def explain(topic: str, model: str) -> int:
    """`baton explain TOPIC`."""
    say("\n".join(explaining.topic(topic, model)))
    return 0
