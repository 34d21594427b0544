"""`baton plan` and `baton explain`."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from ..config import Config
from ..output import results, say
from . import explain as explaining
from . import report as reports
from . import setup, tables, writing
from .workload import Workload, from_config


def load_of(config: Config) -> Workload:
    """Raises ConfigError."""
    return from_config(config)


def plan(config: Config, explain: bool, write: Path | None, as_json: bool) -> int:
    """Print the plan, or the arithmetic behind it. 1: what was asked for is not possible."""
    workload = load_of(config)
    if explain:
        site = setup.site(config)
        text = explaining.lines(site.cost("prefill"), site.cost("decode"), workload)
        say(json.dumps(text) if as_json else "\n".join(text))
        return 0
    report = reports.make(config, workload)
    if as_json:
        say(json.dumps(reports.as_json(report), indent=2))
    else:
        with results() as file:
            tables.show(report, Console(file=file, highlight=False))
    if write is not None:
        say(writing.write(config, report, write), end="\n" if not as_json else "")
    return 0 if report.feasible else 1


def explain(topic: str, model: str) -> int:
    """`baton explain TOPIC`."""
    say("\n".join(explaining.topic(topic, model)))
    return 0
