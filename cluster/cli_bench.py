"""The commands `bench` and `simulate`: options and what follows from them; cli.py makes them commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..proto.errors import ConfigError
from .cli_options import (
    AddressOption,
    AuthorityOption,
    ConfigArgument,
    ConfigOption,
    JsonOption,
    KeyOption,
    PrintOption,
    SetOption,
    load_config,
    one_target,
    seconds,
)

if TYPE_CHECKING:
    from .access import Access
    from .bench_plan import Plan
    from .config import Config
    from .config_workload import WorkloadSection

HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="OUT.html", help="Write a report with plots.")]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE", help="What was measured of the cluster.")
]


def bench(
    config: ConfigOption = None,
    address: AddressOption = None,
    rate: Annotated[str | None, typer.Option(metavar="RATE", help="Poisson arrivals, such as 2/s (open loop).")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at a time (closed loop).")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Requests to replay.")] = None,
    start: Annotated[str | None, typer.Option(metavar="TIME", help="Of the window of the trace.")] = None,
    duration: Annotated[str | None, typer.Option(metavar="TIME", help="Of that window.")] = None,
    speed: Annotated[float, typer.Option(min=1e-6, help="Times as fast as recorded.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="Measured requests; of a trace at most.")] = 64,
    warm_up: Annotated[int | None, typer.Option(min=0, help="Requests before; default: 4 or --concurrency.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Instead of the workload's.")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Instead of the workload's.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Measure the cluster's laws first, and simulate the same requests.")
    ] = False,
    profile: ProfileOption = None,
    record: Annotated[
        Path | None, typer.Option(metavar="OUT.jsonl", help="Write what came when and how long it was.")
    ] = None,
    html: HtmlOption = None,
    json_: JsonOption = False,
    api_key: KeyOption = None,
    tls_ca: AuthorityOption = None,
    set_: SetOption = None,
    print_config: PrintOption = False,
) -> None:
    """Measure TTFT, TPOT, ITL and throughput under the configuration's workload, and compare them with predictions."""
    from . import bench_plan
    from .access import Access

    access = Access.given(api_key, tls_ca)
    one_target(config, address, set_, print_config)
    loaded = load_config(config, set_, print_config) if config is not None else None
    workload = bench_plan.workload(loaded, prompt_tokens, output_tokens)
    if trace is not None:
        if rate is not None or concurrency is not None:
            raise ConfigError("--trace brings its own times: give neither --rate nor --concurrency (see --speed)")
        window = (seconds("--start", start) or 0.0, seconds("--duration", duration))
        plan = bench_plan.replay(workload, trace, window, speed, requests, warm_up or 0, seed)
    else:
        plan = bench_plan.plan(workload, rate, concurrency, requests, warm_up, seed)
    more = _More(compare, profile, record, html)
    code = _against(loaded, address, workload, plan, more, json_, access)
    raise typer.Exit(code)


@dataclass(frozen=True, slots=True)
class _More:
    """What is wanted beside measuring."""

    compare: bool
    profile: Path | None
    record: Path | None
    html: Path | None

    @property
    def wanted(self) -> list[str]:
        """The options that were given."""
        paths = (("--profile", self.profile), ("--record", self.record), ("--html", self.html))
        return [*(["--compare"] if self.compare else []), *(name for name, path in paths if path is not None)]


def _against(
    loaded: Config | None,
    address: str | None,
    workload: WorkloadSection,
    plan: Plan,
    more: _More,
    as_json: bool,
    access: Access,
) -> int:
    """The exit code of `bench`, against what runs at an address or a cluster of its own."""
    from . import driver

    if loaded is None:
        from .bench import with_address
        from .config_workload import SLOSection

        if more.wanted:
            raise ConfigError(f"{more.wanted[0]} needs --config, which says what is to be simulated")
        return driver.run(with_address(address or "", SLOSection(), workload, plan, as_json, access))
    from .model_check import check_model

    facts = check_model(loaded)
    code = driver.supervise_if_needed()
    if code is not None:
        return code
    if more.wanted:
        from .bench_closed import Shown
        from .bench_closed import with_cluster as closed
        from .simulator import profile as profiles

        found = profiles.load(more.profile) if more.profile is not None else None
        return driver.run(closed(loaded, facts, workload, plan, Shown(as_json, more.html, more.record, found), access))
    from .bench import with_cluster

    return driver.run(with_cluster(loaded, facts, workload, plan, as_json, access))


def simulate(
    config: ConfigArgument,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Requests to replay.")] = None,
    workload: Annotated[
        str, typer.Option("--workload", metavar="SHAPE", help="Without a trace: poisson, gamma (bursts) or diurnal.")
    ] = "poisson",
    rate: Annotated[str | None, typer.Option(metavar="RATE", help="Instead of the workload's, such as 2/s.")] = None,
    cv: Annotated[float, typer.Option(min=0.01, help="Of the gaps of gamma.")] = 3.0,
    period: Annotated[str, typer.Option(metavar="TIME", help="Of the wave of diurnal.")] = "24h",
    requests: Annotated[int | None, typer.Option(min=1, help="At most; default without a trace: 2000.")] = None,
    start: Annotated[str | None, typer.Option(metavar="TIME", help="Of the window of the trace.")] = None,
    duration: Annotated[str | None, typer.Option(metavar="TIME", help="Of the window, or of the made up load.")] = None,
    speed: Annotated[float, typer.Option(min=1e-6, help="Times as fast as recorded.")] = 1.0,
    jitter: Annotated[
        str | None, typer.Option(metavar="TIME", help="Spread equal stamps over this; default: where they are rounded.")
    ] = None,
    trace_pool: Annotated[str | None, typer.Option(metavar="NAME", help="Of a trace of rates.")] = None,
    lengths: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw lengths from this trace.")] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What was measured; default: a roofline.")
    ] = None,
    fail: Annotated[list[str] | None, typer.Option(metavar="WORKER@TIME[+TIME]", help="A worker dies.")] = None,
    switch: Annotated[list[str] | None, typer.Option(metavar="WORKER@TIME[+TIME]", help="It changes roles.")] = None,
    scale: Annotated[
        list[str] | None, typer.Option(metavar="POOL=N@TIME[+TIME]", help="A pool changes its size.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    autoscale: Annotated[int | None, typer.Option(min=1, help="Pools follow the load, up to so many.")] = None,
    start_up: Annotated[str, typer.Option(metavar="TIME", help="Of a worker that --autoscale adds.")] = "60s",
    frontier: Annotated[bool, typer.Option("--frontier", help="Goodput at other rates too.")] = False,
    html: HtmlOption = None,
    json_: JsonOption = False,
    set_: SetOption = None,
    print_config: PrintOption = False,
) -> None:
    """Run the configuration's cluster in virtual time, with the code that places and schedules the real one's requests.

    Without --trace the configuration's workload is made up. Traces of Azure, Mooncake, BurstGPT and ServeGen, and CSV
    or JSON lines with at, prompt_tokens and output_tokens are known by their columns.
    """
    from . import simulate as simulation
    from .bench_plan import per_second
    from .simulator.workload import Load, shape_of

    loaded = load_config(config, set_, print_config)
    made = Load(loaded.workload, trace, shape_of(workload), cv=cv, requests=requests, speed=speed, seed=seed)
    load = replace(
        made,
        rate=per_second("--rate", rate) if rate is not None else None,
        period_s=seconds("--period", period) or 0.0,
        start_s=seconds("--start", start) or 0.0,
        duration_s=seconds("--duration", duration),
        jitter_s=seconds("--jitter", jitter),
        pool=trace_pool,
        lengths=lengths,
        contents=loaded.engine.prefix_cache,
    )
    changes = simulation.parse_changes(fail or [], switch or [], scale or [])
    scale_to = (autoscale, seconds("--start-up", start_up) or 0.0) if autoscale is not None else None
    wanted = simulation.Wanted(load, profile, changes, seed, frontier or html is not None, json_, html, scale_to)
    raise typer.Exit(simulation.run(loaded, wanted))
