"""What `baton bench` is to send, from its arguments and the configuration: checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..proto.errors import ConfigError
from .config import Config
from .config_workload import Lengths, WorkloadSection
from .simulator.request import Arrival
from .simulator.workload import Load
from .units import parse_rate

_OPEN_LOOP_WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """Exactly one of `rate` (per second, Poisson) and `concurrency` (closed loop) is set."""

    requests: int
    warm_up: int  # requests sent first, at the same load, and left out of the numbers
    rate: float | None
    concurrency: int | None
    seed: int
    recorded: tuple[Arrival, ...] | None = None  # an open loop of these instead of Poisson arrivals


def workload(config: Config | None, prompt_tokens: int | None, output_tokens: int | None) -> WorkloadSection:
    """The configuration's workload, or the schema's, with constant lengths where they are given."""
    section = config.workload if config is not None else WorkloadSection()
    changes: dict[str, Lengths] = {}
    if prompt_tokens is not None:
        changes["prompt_tokens"] = Lengths(mean=float(prompt_tokens), cv=0.0)
    if output_tokens is not None:
        changes["output_tokens"] = Lengths(mean=float(output_tokens), cv=0.0)
    return section.model_copy(update=changes)


def plan(
    section: WorkloadSection, rate: str | None, concurrency: int | None, requests: int, warm_up: int | None, seed: int
) -> Plan:
    """The load; without --rate and --concurrency the workload's rate. Raises ConfigError."""
    if rate is not None and concurrency is not None:
        raise ConfigError("give --rate (open loop) or --concurrency (closed loop), not both")
    if concurrency is not None:
        return Plan(requests, concurrency if warm_up is None else warm_up, None, concurrency, seed)
    chosen = section.rate if rate is None else per_second("--rate", rate)
    return Plan(requests, _OPEN_LOOP_WARM_UP if warm_up is None else warm_up, chosen, None, seed)


def replay(
    section: WorkloadSection,
    trace: Path,
    window: tuple[float, float | None],
    speed: float,
    requests: int,
    warm_up: int,
    seed: int,
) -> Plan:
    """The requests of a trace, from `window`'s first second on and for as long as its second one says."""
    load = Load(section, trace, requests=requests, start_s=window[0], duration_s=window[1], speed=speed, seed=seed)
    recorded = tuple(load.open().arrivals)
    if len(recorded) <= warm_up:
        raise ConfigError(f"--trace: {trace}: there are {len(recorded)} requests in that window")
    return Plan(len(recorded) - warm_up, warm_up, None, None, seed, recorded)


def per_second(option: str, text: str) -> float:
    """A rate such as 2/s, 30/min or plain 2, more than 0. Raises ConfigError."""
    try:
        rate = float(text) if text.replace(".", "", 1).isdigit() else parse_rate(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {text}: {error}") from None
    if rate <= 0:
        raise ConfigError(f"{option}: must be more than 0")
    return rate
