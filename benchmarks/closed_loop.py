"""Is the prediction true? Clusters on this machine: calibrated, loaded, calibrated again, and simulated.

    .venv/bin/python benchmarks/closed_loop.py [--kinds pair aggregated] [--minutes 8] [--loads 0.5 0.8]
        [--trace FILE [--window 480] [--trace-load 0.5]] [--config benchmarks/closed_loop.yaml] [--set KEY=VALUE]
        [--out FOLDER] [--json]
    .venv/bin/python benchmarks/closed_loop.py --again FOLDER [--json]

For one prefill and one decode worker, a core each, and for one worker that computes prompts beside its batch:

1. The laws of the workers are measured (under two minutes on two cores); they say what the cluster can take.
2. Poisson arrivals at each share of that, and one window of the trace, at the speed that makes it `--trace-load`.
3. The laws again. Where the two differ by more than `--discard` in a prompt or a step of the workload, the machine was
   not the same throughout, and the run says nothing: exit code 3.
4. The *recorded* arrivals and lengths of each load in the simulator, with the mean of both calibrations. The errors are
   printed beside what they may be: TPOT p50 5 %, TTFT p50 15 %, TTFT p99 30 %, goodput 10 %, in one table at the end.
   Exit code 1 where one is more, 2 where a load failed.

Everything is kept in `--out` (default: a new temporary folder) as it comes: calibrations, records, JSON and reports.
`--again` makes the tables from such a folder, also from one of a run that was cut, with the calibrations that it has.
Takes (minutes x loads, the window and four minutes more) for each kind; nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from baton.benchmarks.closed_loop_loads import Case, cases
from baton.benchmarks.interference import SETTINGS
from baton.cluster import config_load
from baton.cluster.bench_closed import calibrate, load_of, loaded
from baton.cluster.bench_compare import compare, read_record, recorded, with_blocks, write_record
from baton.cluster.bench_plan import Plan
from baton.cluster.bench_stats import Sample
from baton.cluster.bench_watch import Watch
from baton.cluster.comparison import SOURCES, Line, comparison
from baton.cluster.config import Config
from baton.cluster.deployment import running
from baton.cluster.driver import run
from baton.cluster.planned import planned
from baton.cluster.report_page import write_page
from baton.cluster.simulator import profile as profiles
from baton.cluster.simulator import traces
from baton.cluster.simulator.measure import between, differ
from baton.cluster.simulator.profile import Profile
from baton.proto.errors import BatonError
from baton.router.placement.disaggregation import NEVER
from rich.console import Console
from rich.table import Table

KINDS = {  # what is served
    "pair": (),  # one prefill and one decode worker
    "aggregated": (f"router.placement.disaggregation={NEVER}",),  # one worker: the prefill worker has nothing to do
}
MISSED, FAILED, DISCARDED = 1, 2, 3
_BATCH = 4  # of the step that two calibrations are compared in


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def measure(config: Config, folder: Path, options: argparse.Namespace) -> bool:
    """Everything on one cluster, kept in the folder. False: a load failed."""
    fine = True
    async with running(config, "model", lambda *_: None) as deployment:
        before = await calibrate(config, deployment, rounds=options.rounds)
        _keep_profile(folder / "before.yaml", before)
        for case in cases(config, before, options):
            _say(f"{case.name}: {len(case.plan.recorded or ())} requests in {_last_s(case):.0f} s")
            try:
                samples, watch = await loaded(deployment, config.workload, case.plan)
            except BatonError as error:
                _say(f"{case.name} failed: {error}")
                fine = False
                continue
            write_record(folder / f"{_slug(case.name)}.jsonl", samples)
            found = with_blocks(before, watch)
            _keep(folder, case.name, _compared(config, case.name, found, samples, watch, "one calibration, before it"))
        _keep_profile(folder / "after.yaml", await calibrate(config, deployment, rounds=options.rounds))
    return fine


def _last_s(case: Case) -> float:
    return case.plan.recorded[-1].at if case.plan.recorded else 0.0


def _keep_profile(path: Path, profile: Profile) -> None:
    path.write_text(yaml.safe_dump(profiles.to_fields(profile)))


def _compared(
    config: Config, name: str, found: Profile, samples: Sequence[Sample], watch: Watch | None, note: str
) -> dict[str, Any]:
    plan = Plan(len(samples), 0, None, None, 0, tuple(recorded(samples)))
    load = {**load_of(plan, config.workload), "workload": name, "notes": [note]}
    return compare(config, found, samples, watch, load, planned(config, found, recorded(samples)))


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _keep(folder: Path, name: str, result: dict[str, Any]) -> None:
    (folder / f"{_slug(name)}.json").write_text(json.dumps(result))
    write_page(folder / f"{_slug(name)}.html", result)
    _say(f"{name}: kept in {folder}")


def again(config: Config, folder: Path) -> tuple[dict[str, dict[str, Any]], float | None]:
    """Simulated once more, with the mean of the calibrations that the folder has: results by name of the load, and how
    much the calibrations differ; None: there is only the first."""
    before, after = (profiles.load(path) if path.exists() else None for path in _calibrations(folder))
    if before is None:
        return {}, None
    prompt = round(config.workload.prompt_tokens.mean)
    apart = differ(before.around(_BATCH), after.around(_BATCH), prompt, _BATCH, prompt) if after is not None else None
    found = between(before, after) if after is not None else before
    note = f"calibrations differ by {apart:.1%}" if apart is not None else "one calibration, before it"
    results = {}
    for path in sorted(folder.glob("*.jsonl")):
        name, timeline = path.stem, None
        with contextlib.suppress(OSError):
            kept = json.loads(path.with_suffix(".json").read_text())
            name, timeline = kept["load"]["workload"], kept["timeline"]["measured"]
        results[name] = _compared(config, name, found, read_record(path), None, note)
        if timeline is not None:
            results[name]["timeline"]["measured"] = timeline
        _keep(folder, name, results[name])
    return results, apart


def _calibrations(folder: Path) -> tuple[Path, Path]:
    return folder / "before.yaml", folder / "after.yaml"


def show(found: dict[tuple[str, str], dict[str, Any]], as_json: bool) -> bool:
    """Prints all lines of all loads, and the table of those that have a limit; whether all keep it."""
    table = Table()
    headings = ("", "", "measured", "simulated", "error", "limit", "", "planned", "error")
    for heading in headings:
        table.add_column(heading, justify="left" if not heading else "right")
    kept = True
    for (kind, name), result in found.items():
        lines = comparison(result)
        if as_json:
            rows = {
                line.label: {**line.values, "error": line.error("simulated"), "limit": line.limit} for line in lines
            }
            print(json.dumps({"kind": kind, "load": name, "lines": rows}), flush=True)
        else:
            _details(f"{kind}, {name}: {result['measured']['requests']['completed']} requests", lines)
        title = f"{kind}, {name}"
        for line in lines:
            if line.limit is None:
                continue
            error = line.error("simulated")
            good = error is not None and abs(error) <= line.limit
            kept = kept and good
            cells = (line.text("measured"), line.text("simulated"), _percent(error), f"{line.limit:.0%}")
            others = ("kept" if good else "MISSED", line.text("planned"), _percent(line.error("planned")))
            table.add_row(title, line.label, *cells, *others)
            title = ""
    Console(file=sys.stderr if as_json else sys.stdout, highlight=False, width=140).print(table)
    return kept


def _details(title: str, lines: Sequence[Line]) -> None:
    print(title)
    for line in lines:
        values = "  ".join(f"{source} {line.text(source):>12}" for source in SOURCES)
        print(f"  {line.label:24} {values}  {_percent(line.error('simulated')):>8}")


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def settings_of(kind: str, options: argparse.Namespace) -> Config:
    """The configuration of a kind."""
    return config_load.load(str(options.config), [*SETTINGS, *KINDS[kind], *options.set])


async def everything(options: argparse.Namespace, folder: Path) -> int:
    """All kinds, one after the other. Returns FAILED where something did."""
    fine = True
    for kind in options.kinds:
        _say(f"{kind}: starting and measuring")
        try:
            (folder / kind).mkdir(parents=True, exist_ok=True)
            fine = await measure(settings_of(kind, options), folder / kind, options) and fine
        except Exception:
            _say(f"{kind} failed: {traceback.format_exc()}")
            fine = False
    return 0 if fine else FAILED


def main(options: argparse.Namespace) -> int:
    """The exit code."""
    if options.trace is not None:
        traces.load(options.trace, traces.Options())  # a mistake in its name is told before anything is measured
    folder = options.again or options.out or Path(tempfile.mkdtemp(prefix="closed-loop-"))
    code = 0
    if options.again is None:
        _say(f"everything is kept in {folder}")
        code = run(everything(options, folder))
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for kind in options.kinds:
        if (folder / kind).is_dir():
            results, apart = again(settings_of(kind, options), folder / kind)
            found.update({(kind, name): result for name, result in results.items()})
            if apart is not None:
                _say(f"{kind}: calibrations before and after differ by {apart:.1%}")
                if apart > options.discard:
                    _say(f"more than {options.discard:.0%}: {kind} says nothing, repeat it")
                    code = code or DISCARDED
    kept = show(found, options.json)
    return code or (0 if kept and found else MISSED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("closed_loop.yaml"))
    parser.add_argument("--minutes", type=float, default=8.0, help="of each Poisson load")
    parser.add_argument("--loads", type=float, nargs="*", default=[0.5, 0.8], help="shares of the capacity")
    parser.add_argument("--trace", type=Path, help="a window of it is replayed")
    parser.add_argument("--window", type=float, default=480.0, help="seconds that the replay of the trace lasts")
    parser.add_argument("--trace-load", type=float, default=0.5, help="share of the capacity that the window comes to")
    parser.add_argument("--discard", type=float, default=0.05, help="most that the calibrations may differ")
    parser.add_argument("--rounds", type=int, default=3, help="of each calibration")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--out", type=Path, help="folder for reports, records and calibrations")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="no load: the tables of what was kept there")
    parser.add_argument("--json", action="store_true")
    sys.exit(main(parser.parse_args()))
