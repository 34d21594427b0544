"""What disaggregation gained, or lost, where others published it, beside what the planner says of the same settings.

    .venv/bin/python benchmarks/published_gains.py [--json]

A gain is the highest rate that some GPUs serve within the limits in two pools / without (`published`: as the papers
have it, where they do). Direction and rough size, not predictions: lengths are log-normal with the published means, and
the aggregated plans here compute prompts in chunks beside their batch, which the engines of 2023 did not. Limits and
launch costs that the papers do not say are ours, and marked so. Exit code 1: a row is outside the range that it should
be in.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from baton.cluster import config_load
from baton.cluster.config_workload import Lengths
from baton.cluster.planner import setup
from baton.cluster.planner.plans import Kind
from baton.cluster.planner.search import Search
from baton.cluster.planner.workload import Distribution, Slo, Workload
from rich.console import Console
from rich.table import Table

CONFIG = str(Path(__file__).resolve().parent.parent / "configs" / "teaching-7b-a100.yaml")
EAGER_S = 300e-6  # of a layer: launches of eager engines (29 to 55 ms for 80 layers were measured)
_SHARE = 0.9  # of requests within both limits
_HALVINGS = 9


@dataclass(frozen=True, slots=True)
class Setting:
    """`limits`: seconds of TTFT and TPOT. `within`: what the gain should be between. `ours`: what no paper says."""

    name: str
    model: str
    gpu: str
    lengths: tuple[Lengths, Lengths]
    limits: tuple[float, float]
    degrees: Sequence[int]
    gpus: int
    published: str
    within: tuple[float, float]
    ours: str = ""
    eager: bool = False


def lengths(prompt: float, output: float, cv: float = 0.8) -> tuple[Lengths, Lengths]:
    """Of prompts and answers."""
    return Lengths(mean=prompt, cv=cv), Lengths(mean=output, cv=cv)


_FIGURE_1 = ("opt-13b", "a100-sxm-80", lengths(512, 64, 0.0), (0.4, 0.04), (1,), 12)
_CONVERSATION = lengths(1155, 211)
SETTINGS = (
    Setting("DistServe, figure 1", *_FIGURE_1, "2.1", (1.4, 3.4), "300 us of launches a layer", eager=True),
    Setting("DistServe, figure 1, no eager launches", *_FIGURE_1, "", (1.0, 3.4)),
    Setting(
        "Splitwise, conversation, H100",
        "llama-2-70b",
        "h100-sxm",
        _CONVERSATION,
        (0.5, 0.04),
        (4, 8),
        64,
        "1.4 to 2.35",
        (1.1, 3.2),
        "the limits",
    ),
    Setting(
        "Splitwise, conversation, A100",
        "llama-2-70b",
        "a100-sxm-80",
        _CONVERSATION,
        (1.0, 0.08),
        (4, 8),
        64,
        "1.4 to 2.35",
        (1.1, 3.2),
        "the limits",
    ),
    Setting(
        "arxiv summaries (Vidur's lengths)",
        "llama-3.1-8b",
        "a100-sxm-80",
        lengths(2588, 291, 0.5),
        (5.0, 0.2),
        (1,),
        8,
        "",
        (0.0, 1.0),
        "the limits",
    ),
    Setting(
        "ShareGPT chats (DistServe's lengths)",
        "opt-13b",
        "a100-sxm-80",
        lengths(756, 200, 1.0),
        (0.5, 0.2),
        (1, 2),
        12,
        "a gain, over an engine that stops its batch for prompts",
        (0.0, 1.0),
        "the limits, chunked prompts",
    ),
)


def goodput(kind: Kind, search: Search, load: Workload, slo: Slo) -> float:
    """The highest rate that the GPUs serve within the limits."""
    low, high = 0.0, 1.0
    while search.cheapest(kind, load.at(high), slo) is not None:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if search.cheapest(kind, load.at(middle), slo) is not None else (low, middle)
    return low


def gain(setting: Setting) -> float:
    """Goodput of disaggregated / aggregated GPUs."""
    site = setup.site(config_load.load(CONFIG, [f"model.path={setting.model}", f"hardware={setting.gpu}"]))
    if setting.eager:
        fit = site.hardware.efficiency.model_copy(update={"layer_s": EAGER_S})
        site = replace(site, hardware=site.hardware.model_copy(update={"efficiency": fit}))
    search = Search(site, setting.gpus, setting.degrees)
    prompt, output = setting.lengths
    load = Workload(1.0, Distribution.of(prompt), Distribution.of(output))
    slo = Slo({_SHARE: setting.limits[0]}, {_SHARE: setting.limits[1]}, _SHARE)
    split, whole = (goodput(kind, search, load, slo) for kind in ("disaggregated", "aggregated"))
    return split / whole


@dataclass(frozen=True, slots=True)
class Row:
    """A setting and what came of it."""

    setting: str
    published: str
    planned: float
    verdict: str
    as_expected: bool
    ours: str


def measure(setting: Setting) -> Row:
    """One setting."""
    found = gain(setting)
    verdict = "disaggregate" if found > 1 else "do not disaggregate"
    low, high = setting.within
    return Row(setting.name, setting.published or "-", found, verdict, low <= found <= high, setting.ours or "-")


def main(options: argparse.Namespace) -> int:
    """All rows. The exit code."""
    rows = [measure(setting) for setting in SETTINGS]
    if options.json:
        for row in rows:
            print(json.dumps(asdict(row)))
    else:
        table = Table()
        for heading in ("gain of two pools", "published", "planned", "verdict", "as expected", "not in the paper"):
            table.add_column(heading)
        for row in rows:
            cells = (f"{row.planned:.2f}", row.verdict, "yes" if row.as_expected else "NO", row.ours)
            table.add_row(row.setting, row.published, *cells)
        Console(width=150, highlight=False).print(table)
    return 0 if all(row.as_expected for row in rows) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    sys.exit(main(parser.parse_args()))
