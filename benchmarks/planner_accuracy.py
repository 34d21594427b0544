"""How far the planner's laws are from measurements of others: fitted on one part, tested on the rest.

    python benchmarks/planner_accuracy.py --data published_measurements.csv [--json]

The file has the columns of `cluster/planner/published.py`. Step times are fitted for each engine on each GPU, to every
other setting, and tested on those between; then to all models of an engine but one, tested on that one. Beside them
stands what memory bandwidth alone would say. KV blocks are computed, with one coefficient (the share of a GPU's
memory that an engine uses) fitted to the same halves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from baton.cluster.planner import published
from baton.cluster.planner.fitting import errors
from baton.cluster.planner.published import Row
from baton.proto.errors import ConfigError
from rich.console import Console
from rich.table import Table


class Score(NamedTuple):
    """Relative errors of one group, on rows that its law had not seen."""

    kind: str
    group: str
    rows: int
    mean: float
    median: float
    p90: float
    bandwidth: float | None  # mean error of bandwidth alone


def score(kind: str, group: str, tested: Sequence[Row], predicted: Sequence[float]) -> Score:
    measured = [row.value for row in tested]
    found = errors(predicted, measured)
    alone = float(errors([row.roofline() for row in tested], measured).mean()) if kind.startswith("tpot") else None
    median, p90 = (float(np.quantile(found, share)) for share in (0.5, 0.9))
    return Score(kind, group, len(tested), float(found.mean()), median, p90, alone)


def halves(rows: Sequence[Row]) -> dict[Row, float]:
    """Every row that a half could be tested on, and what the law of the other half says of it."""
    return {
        row: value
        for taught, tested in published.split(rows)
        for row, value in zip(tested, published.predict_all(taught, tested), strict=True)
    }


def scores(rows: Sequence[Row]) -> list[Score]:
    """By engine and GPU, by engine, by (source, model, GPU), and with a model left out."""
    found = []
    for kind in ("tpot", "prefill", "kv"):
        predicted = halves([row for row in rows if row.kind == kind])
        for name in ("{0.engine}, all GPUs", "{0.engine} on {0.gpu}", "   {0.source}: {0.model} on {0.gpu}"):
            for group in sorted({name.format(row) for row in predicted}):
                mine = [row for row in predicted if name.format(row) == group]
                found.append(score(kind, group, mine, [predicted[row] for row in mine]))
    for group, taught, tested in published.left_out([row for row in rows if row.kind == "tpot"]):
        found.append(score("tpot, model left out", group, tested, published.predict_all(taught, tested)))
    return found


def table(found: Iterable[Score]) -> Table:
    shown = Table("quantity", "group", title="relative error on rows that were not fitted to")
    for name in ("rows", "mean", "median", "p90", "bandwidth alone"):
        shown.add_column(name, justify="right")
    for entry in found:
        alone = "" if entry.bandwidth is None else f"{entry.bandwidth:.0%}"
        numbers = [f"{value:.1%}" for value in (entry.mean, entry.median, entry.p90)]
        shown.add_row(entry.kind, entry.group, str(entry.rows), *numbers, alone)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description="Errors of the planner's laws against published measurements.")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="a table of measurements (CSV)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    try:
        rows, left = published.read(arguments.data)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    found = scores(rows)
    if arguments.json:
        print(json.dumps({"scores": [entry._asdict() for entry in found], "left_out": left}, indent=2))
        return 0
    console = Console(width=120)
    console.print(table(found))
    console.print(f"{len(rows)} rows used; left out:")
    for reason, count in sorted(left.items()):
        console.print(f"  {count:4}  {reason}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
