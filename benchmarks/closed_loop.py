"""Is the prediction true? One cluster on this machine: calibrated, loaded, calibrated again, and simulated.

    .venv/bin/python benchmarks/closed_loop.py [--minutes 8] [--loads 0.5 0.8] [--trace FILE [--window 600]
        [--trace-load 0.5]] [--config benchmarks/closed_loop.yaml] [--set KEY=VALUE] [--out FOLDER] [--json]

1. The laws of both workers are measured (about a minute and a half on two cores); they say what the cluster can take.
2. Poisson arrivals at each share of that, and one window of the trace, at the speed that makes it `--trace-load`.
3. The laws again. Where the two differ by more than `--discard` in a prompt or a step of the workload, the machine was
   not the same throughout, and the run says nothing: exit code 3.
4. The *recorded* arrivals and lengths of each load in the simulator, with the mean of both calibrations. The errors are
   printed beside what they may be: TPOT p50 5 %, TTFT p50 15 %, TTFT p99 30 %, goodput 10 %. Exit code 1 where one is
   more. `--out` keeps a report, the record and both calibrations.

Takes minutes x loads, the window and four minutes more; nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from baton.benchmarks.interference import SETTINGS
from baton.cluster import config_load
from baton.cluster.bench_closed import calibrate, load_of, loaded
from baton.cluster.bench_compare import compare, recorded, with_blocks, write_record
from baton.cluster.bench_plan import Plan
from baton.cluster.comparison import SOURCES, Line, comparison
from baton.cluster.config import Config
from baton.cluster.deployment import running
from baton.cluster.driver import run
from baton.cluster.planned import planned
from baton.cluster.report_page import write_page
from baton.cluster.simulator.measure import between, differ
from baton.cluster.simulator.profile import Profile, to_fields
from baton.cluster.simulator.request import Arrival
from baton.cluster.simulator.workload import Load

DISCARDED = 3
_WARM_UP = 8  # requests


@dataclass(frozen=True, slots=True)
class Case:
    """A load of the cluster."""

    name: str
    plan: Plan


def capacity(config: Config, profile: Profile) -> float:
    """Requests a second of the workload that the slower pool can just take, if each prompt has steps of its own.

    A decode worker with b sequences of c tokens says b/(a + b*(b' + c'*c)) tokens a second, which grows with b up to
    the most that it runs at the same time, or has blocks for.
    """
    draws = list(Load(config.workload, requests=2000).open().arrivals)
    first = config.pools.prefill.replicas / _prompt_s(config, profile, draws)
    context = sum(a.prompt + a.output / 2 for a in draws) / len(draws)
    room = math.floor(profile.decode_blocks * config.kv.block_size / context)
    batch = min(config.pools.decode.max_sequences, room)
    step = profile.decode.seconds((1.0, float(batch), batch * context))
    return min(first, batch / step / _output(draws) * config.pools.decode.replicas)


def _prompt_s(config: Config, profile: Profile, arrivals: Sequence[Arrival]) -> float:
    """Mean seconds of computing a prompt."""
    most = config.pools.prefill.max_batch_tokens
    steps = [(float(-(-a.prompt // most)), float(a.prompt), float(a.prompt**2)) for a in arrivals]
    return sum(map(profile.prefill.seconds, steps)) / len(arrivals)


def _output(arrivals: Sequence[Arrival]) -> float:
    """Mean tokens of an answer."""
    return sum(a.output for a in arrivals) / len(arrivals)


def cases(config: Config, profile: Profile, options: argparse.Namespace) -> list[Case]:
    """The loads, in order."""
    most, length = capacity(config, profile.shared(1.0, 1.0)), 60 * options.minutes
    print(f"capacity: {most:.2f} requests/s", file=sys.stderr)
    found = []
    for share in options.loads:
        load = Load(config.workload, rate=share * most, duration_s=length, seed=options.seed)
        found.append(Case(f"{share:.0%} of capacity", _plan(list(load.open().arrivals))))
    if options.trace is not None:
        load = Load(config.workload, trace=options.trace, duration_s=options.window, contents=False)
        recorded = [_within(arrival, config) for arrival in load.open().arrivals]
        wanted = options.trace_load * most * _worth(config, profile, recorded)
        speed = wanted / (len(recorded) / options.window)
        found.append(
            Case(f"{options.trace.stem}, x{speed:.2f}", _plan([replace(a, at=a.at / speed) for a in recorded]))
        )
    return found


def _plan(arrivals: list[Arrival]) -> Plan:
    return Plan(len(arrivals) - _WARM_UP, _WARM_UP, None, None, 0, tuple(arrivals))


def _within(arrival: Arrival, config: Config) -> Arrival:
    """Cut to what the configuration's model and pool can hold."""
    most = config.model.max_model_len or 2048
    prompt = min(arrival.prompt, most * 3 // 4)
    return replace(arrival, prompt=prompt, output=max(1, min(arrival.output, most - prompt)))


def _worth(config: Config, profile: Profile, arrivals: Sequence[Arrival]) -> float:
    """Requests of the trace that cost the slower pool as much as one of the workload."""
    draws = list(Load(config.workload, requests=2000).open().arrivals)
    prompts = _prompt_s(config, profile, draws) / _prompt_s(config, profile, arrivals)
    return min(prompts, _output(draws) / _output(arrivals))


async def measure(config: Config, options: argparse.Namespace) -> int:
    """Everything on one cluster. Returns the exit code."""
    results: list[tuple[Case, dict[str, Any]]] = []
    async with running(config, "model", lambda *_: None) as deployment:
        before = await calibrate(config, deployment)
        runs = []
        for case in cases(config, before, options):
            began = time.monotonic()
            samples, watch = await loaded(deployment, config.workload, case.plan)
            print(f"{case.name}: {len(samples)} requests in {time.monotonic() - began:.0f} s", file=sys.stderr)
            runs.append((case, samples, watch))
        after = await calibrate(config, deployment)
    workload = config.workload
    prompt, context = round(workload.prompt_tokens.mean), round(workload.prompt_tokens.mean)
    apart = differ(before, after, prompt, 8, context)
    profile = between(before, after)
    for case, samples, watch in runs:
        load = {**load_of(case.plan, workload), "workload": case.name, "notes": [f"calibrations differ by {apart:.1%}"]}
        found = with_blocks(profile, watch)
        result = compare(config, found, samples, watch, load, planned(config, found, recorded(samples)))
        results.append((case, result))
        if options.out is not None:
            _keep(options.out, case, result)
            write_record(options.out / f"{_slug(case)}.jsonl", samples)
    if options.out is not None:
        for name, found in (("before", before), ("after", after)):
            (options.out / f"profile_{name}.yaml").write_text(yaml.safe_dump(to_fields(found)))
    kept = [_show(case, result, options.json) for case, result in results]
    print(f"calibrations before and after differ by {apart:.1%}", file=sys.stderr)
    if apart > options.discard:
        print(f"more than {options.discard:.0%}: this run says nothing, repeat it", file=sys.stderr)
        return DISCARDED
    return 0 if all(kept) else 1


def _slug(case: Case) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in case.name)


def _keep(folder: Path, case: Case, result: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{_slug(case)}.json").write_text(json.dumps(result))
    write_page(folder / f"{_slug(case)}.html", result)


def _show(case: Case, result: dict[str, Any], as_json: bool) -> bool:
    """Prints a load's lines; whether all that have a limit keep it."""
    lines = comparison(result)
    held = [_verdict(line) for line in lines]
    if as_json:
        rows = {line.label: {**line.values, "error": line.error("simulated"), "limit": line.limit} for line in lines}
        print(json.dumps({"load": case.name, "lines": rows}), flush=True)
        return all(verdict is not False for verdict in held)
    print(f"{case.name}: {result['measured']['requests']['completed']} requests")
    for line, verdict in zip(lines, held, strict=True):
        error = line.error("simulated")
        word = "" if verdict is None else f"  limit {line.limit:.0%}: {'kept' if verdict else 'MISSED'}"
        shown = "-" if error is None else f"{error:+.1%}"
        values = "  ".join(f"{source} {line.text(source):>12}" for source in SOURCES)
        print(f"  {line.label:24} {values}  {shown:>8}{word}")
    return all(verdict is not False for verdict in held)


def _verdict(line: Line) -> bool | None:
    """Whether a line that has a limit keeps it."""
    error = line.error("simulated")
    return None if line.limit is None or error is None else abs(error) <= line.limit


def main(options: argparse.Namespace) -> int:
    """The exit code."""
    config = config_load.load(str(options.config), [*SETTINGS, *options.set])
    return run(measure(config, options))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("closed_loop.yaml"))
    parser.add_argument("--minutes", type=float, default=8.0, help="of each Poisson load")
    parser.add_argument("--loads", type=float, nargs="*", default=[0.5, 0.8], help="shares of the capacity")
    parser.add_argument("--trace", type=Path, help="a window of it is replayed")
    parser.add_argument("--window", type=float, default=600.0, help="seconds of the trace")
    parser.add_argument("--trace-load", type=float, default=0.5, help="share of the capacity that the window comes to")
    parser.add_argument("--discard", type=float, default=0.05, help="most that the calibrations may differ")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="folder for reports, records and calibrations")
    parser.add_argument("--json", action="store_true")
    sys.exit(main(parser.parse_args()))
