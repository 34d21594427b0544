"""The closed loop of `baton bench`: measure the cluster's laws, load it, and simulate the very requests it had."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..client.retry import Retry
from ..router.placement.disaggregation import NEVER
from .access import NOBODY, Access
from .bench import load_fields, print_table, run_load
from .bench_compare import compare, recorded, with_blocks, write_record
from .bench_plan import Plan
from .bench_stats import Sample, summarise
from .bench_watch import Watch, watching
from .comparison import SOURCES, comparison
from .config import Config
from .config_workload import WorkloadSection
from .deployment import Deployment, running
from .http_client import Origin
from .model_check import ModelFacts
from .output import results, say
from .planned import planned
from .progress import StartProgress
from .report_page import write_page
from .simulate import slo_limits
from .simulator.measure import Blocks, measure
from .simulator.measure_rig import Limits
from .simulator.profile import Profile

_WATCH_S = 1.0


@dataclass(frozen=True, slots=True)
class Shown:
    """What becomes of the numbers. `profile`: of the simulation; None: it is measured before the load."""

    as_json: bool
    html: Path | None
    record: Path | None
    profile: Profile | None


async def with_cluster(
    config: Config, facts: ModelFacts, workload: WorkloadSection, plan: Plan, shown: Shown, access: Access = NOBODY
) -> int:
    """Start a cluster for the benchmark. Returns 1 when no measured request was answered."""
    progress = StartProgress(verbose=False)
    with progress:
        async with running(config, facts.name, progress.report) as deployment:
            progress.stop()
            found = shown.profile if shown.profile is not None else await calibrate(config, deployment, access)
            samples, watch = await loaded(deployment, workload, plan, access)
    if shown.record is not None:
        write_record(shown.record, samples)
    found = with_blocks(found, watch)
    word = planned(config, found, recorded(samples))
    result = compare(config, found, samples, watch, load_of(plan, workload), word)
    if shown.html is not None:
        write_page(shown.html, result)
    if shown.as_json:
        say(json.dumps(result))
    else:
        fields = {"load": load_fields(plan, workload), **summarise(samples, slo_limits(config.slo))}
        with results() as file:
            print_table(fields, file)
            print_comparison(result, Console(file=file, highlight=False))
            for name, path in (("report", shown.html), ("record", shown.record)):
                if path is not None:
                    print(f"{name}: {path}", file=file)
    return 0 if result["measured"]["requests"]["completed"] else 1


def load_of(plan: Plan, workload: WorkloadSection) -> dict[str, Any]:
    """As a simulation says it."""
    return {**load_fields(plan, workload), "notes": []}


async def loaded(
    deployment: Deployment, workload: WorkloadSection, plan: Plan, access: Access = NOBODY
) -> tuple[list[Sample], Watch]:
    """Load a running cluster and watch it."""
    connection = access.connection(Origin.parse(deployment.url))
    client = access.client(deployment.endpoints["grpc"], Retry(attempts=1))
    async with client, watching(connection, _WATCH_S) as watch:
        samples = await run_load(client, workload, plan)
    return samples, watch


async def calibrate(config: Config, deployment: Deployment, access: Access = NOBODY, rounds: int = 2) -> Profile:
    """The profile of a cluster that does nothing else meanwhile."""
    async with watching(access.connection(Origin.parse(deployment.url)), 3600.0) as watch:
        pass
    async with access.client(deployment.endpoints["grpc"], Retry(attempts=1)) as client:
        models = await client.models()
        pools, here = config.pools, config.router.placement.disaggregation == NEVER
        limits = Limits(
            models[0].max_model_len,
            pools.decode.max_sequences,
            pools.decode.prompt_chunk if here else pools.prefill.max_batch_tokens,
            together=pools.decode.device == "cpu" and not here,
            rounds=rounds,
        )
        blocks = Blocks(watch.blocks.get("prefill", 1), watch.blocks.get("decode", 1))
        return await measure(client, limits, blocks, lambda text: print(f"measuring {text}", file=sys.stderr))


def print_comparison(result: dict[str, Any], console: Console) -> None:
    """planned | simulated | measured, and how far the first two are off."""
    sources = [source for source in SOURCES if result.get(source)]
    table = Table()
    for heading in ("", *sources, *(f"{name} error" for name in sources if name != "measured")):
        table.add_column(heading, justify="right" if heading else "left")
    for line in comparison(result):
        errors = [line.error(source) for source in sources if source != "measured"]
        cells = ["-" if error is None else f"{error:+.1%}" for error in errors]
        table.add_row(line.label, *(line.text(source) for source in sources), *cells, end_section=False)
    console.print(table)
