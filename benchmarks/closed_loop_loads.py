"""The loads of `closed_loop.py`: what the cluster can take, and arrivals for shares of it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.cluster.bench_plan import Plan
from baton.cluster.config import Config
from baton.cluster.simulator.profile import Profile
from baton.cluster.simulator.request import Arrival
from baton.cluster.simulator.workload import Load
from baton.proto.errors import ConfigError
from baton.router.placement.disaggregation import NEVER

_WARM_UP = 8  # requests


@dataclass(frozen=True, slots=True)
class Case:
    """A load of the cluster."""

    name: str
    plan: Plan


def capacity(config: Config, profile: Profile) -> float:
    """Requests a second of the workload that the slower pool can just take, if each prompt has steps of its own.

    A decode worker with b sequences of c tokens says b/(a + b*(b' + c'*c)) tokens a second, which grows with b up to
    the most that it runs at the same time, or has blocks for. One that computes the prompts too needs both times.
    """
    draws = list(Load(config.workload, requests=2000).open().arrivals)
    prompt_s = _prompt_s(config, profile, draws)
    context = sum(a.prompt + a.output / 2 for a in draws) / len(draws)
    room = math.floor(profile.decode_blocks * config.kv.block_size / context)
    batch = min(config.pools.decode.max_sequences, room)
    step = profile.decode.seconds((1.0, float(batch), batch * context))
    answer_s = step / batch * _output(draws)
    if config.router.placement.disaggregation == NEVER:
        return config.pools.decode.replicas / (prompt_s + answer_s)
    return min(config.pools.prefill.replicas / prompt_s, config.pools.decode.replicas / answer_s)


def _prompt_s(config: Config, profile: Profile, arrivals: Sequence[Arrival]) -> float:
    """Mean seconds of computing a prompt."""
    here, pools = config.router.placement.disaggregation == NEVER, config.pools
    most = pools.decode.prompt_chunk if here else pools.prefill.max_batch_tokens
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
        try:
            found.append(_replay(config, profile, options, most))
        except ConfigError as error:
            print(f"the trace is not replayed: {error}", file=sys.stderr)
    return found


def _replay(config: Config, profile: Profile, options: argparse.Namespace, most: float) -> Case:
    """A window of the trace at the speed that loads the cluster as was asked for. Raises ConfigError."""
    first = _window(config, options.trace, options.window)
    wanted = options.trace_load * most * _worth(config, profile, first)
    speed = wanted / (len(first) / options.window)
    recorded = _window(config, options.trace, options.window * speed)  # lasts as long as was asked for
    plan = _plan([replace(arrival, at=arrival.at / speed) for arrival in recorded])
    return Case(f"{options.trace.stem}, x{speed:.2f}", plan)


def _window(config: Config, trace: Path, length_s: float) -> list[Arrival]:
    """Its first seconds, cut to what the configuration can hold. Raises ConfigError: nothing comes in them."""
    load = Load(config.workload, trace=trace, duration_s=length_s, contents=False)
    found = [_within(arrival, config) for arrival in load.open().arrivals]
    if len(found) <= _WARM_UP:
        raise ConfigError(f"--window: only {len(found)} requests of {trace} in {length_s:.0f} s")
    return found


def _plan(arrivals: list[Arrival]) -> Plan:
    return Plan(len(arrivals) - _WARM_UP, _WARM_UP, None, None, 0, tuple(arrivals))


def _within(arrival: Arrival, config: Config) -> Arrival:
    """Cut to what the configuration's model and pool can hold."""
    most = config.model.max_model_len or 2048
    prompt = min(arrival.prompt, most * 3 // 4)
    return replace(arrival, prompt=prompt, output=max(1, min(arrival.output, most - prompt)))


def _worth(config: Config, profile: Profile, arrivals: Sequence[Arrival]) -> float:
    """Requests of the trace that cost the slower pool, or a worker that does both, at most as much as one of the
    workload."""
    draws = list(Load(config.workload, requests=2000).open().arrivals)
    prompts = _prompt_s(config, profile, draws) / _prompt_s(config, profile, arrivals)
    return min(prompts, _output(draws) / _output(arrivals))
