"""The planner's plans in virtual time: closed forms say which are worth a look, the simulator says which of them holds.

Plans are looked at by cost, the cheapest first, and of one cost the most promising first; the first one whose simulated
percentiles keep every limit is the answer. A closed form leaves out what it sees break down (a pool that is too slow,
memory or a network that does not suffice), or what misses a limit by far.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...router.placement.choose import Objectives
from ..planner.plans import Plan
from ..planner.workload import Slo, Workload
from . import synthetic
from .request import Arrival
from .run import simulate
from .spec import Cluster, DecodePool, LayeredTransfer, PrefillPool, Rules

_REQUESTS = 2000  # twenty are above a p99
_FAR = 3.0  # times a limit that a closed form must be above to be believed without a simulation
_ENDLESS_S, _ANY = 1e9, 1 << 30
_RULES = Rules(
    "least_loaded", "least_loaded", True, Objectives(None, None), _ANY, _ENDLESS_S, _ENDLESS_S, _ENDLESS_S, 3
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`summary`: of the simulation, as `Results.summary`. `misses`: limits in words; empty: it holds."""

    plan: Plan
    summary: dict[str, Any]
    misses: tuple[str, ...]


def arrivals_of(workload: Workload, seed: int = 0, requests: int = _REQUESTS) -> list[Arrival]:
    """Poisson at the rate of the busiest window, with the workload's lengths, drawn independently."""
    rng = random.Random(seed)
    prompts, outputs = workload.prompt.points, workload.output.points
    draw = lambda: (round(rng.choice(prompts)), max(1, round(rng.choice(outputs))))  # noqa: E731
    times = synthetic.poisson(workload.busiest, random.Random(seed + 1))
    return list(itertools.islice(synthetic.requests(times, draw), requests))


def cluster_of(plan: Plan) -> Cluster:
    """As `baton serve` would run it, with the planner's laws."""
    prefill, decode = plan.prefill, plan.decode
    token_s = prefill.transfer_bytes(1, decode.tp) / prefill.bandwidth_to(decode.tp)
    own = decode if plan.kind == "aggregated" else prefill
    return Cluster(
        PrefillPool(max(1, plan.replicas[0]), own.prefill_law, max(1, own.kv_blocks), own.options.max_batch_tokens, 2),
        DecodePool(plan.replicas[1], decode.token_law, max(1, decode.kv_blocks), decode.options.max_sequences),
        decode.options.block_size,
        LayeredTransfer(prefill.message_s, token_s, prefill.groups),
        _RULES,
        aggregated=plan.kind == "aggregated",
    )


def judge(plan: Plan, slo: Slo, arrivals: Sequence[Arrival]) -> Verdict:
    """Simulates the plan, and holds it against the limits."""
    limits = {
        name: {f"p{round(100 * share)}": limit for share, limit in by.items()}
        for name, by in (("ttft", slo.ttft), ("tpot", slo.tpot))
    }
    strict = {name: {"p99": min(by.values())} for name, by in limits.items() if by}
    results = simulate(cluster_of(plan), arrivals).results
    summary = results.summary(strict)
    misses = [
        f"{name.upper()} {share} is {found:.3g} s, more than {limit:.3g} s"
        for name, by in limits.items()
        for share, limit in by.items()
        if (found := summary[f"{name}_s"][share]) is None or found > limit
    ]
    if summary["requests"]["completed"] < len(arrivals):
        misses.append(f"{len(arrivals) - summary['requests']['completed']} requests are not served")
    share = summary["share_within_p99_limits"]
    if slo.attainment is not None and (share is None or share < slo.attainment):
        misses.append(f"{share or 0.0:.1%} of requests are within both limits, less than {slo.attainment:.1%}")
    return Verdict(plan, summary, tuple(misses))


def decide(
    plans: Iterable[Plan], slo: Slo, arrivals: Sequence[Arrival], most: int | None = None
) -> tuple[Verdict | None, int]:
    """The cheapest plan that holds, of the first `most` to be simulated, and how many were for it; None: none does."""
    return _first(plans, slo, arrivals, _hopeless, most)


def exhaust(plans: Iterable[Plan], slo: Slo, arrivals: Sequence[Arrival]) -> tuple[Verdict | None, int]:
    """The same without a closed form's word: what `decide` must agree with."""
    return _first(plans, slo, arrivals, lambda plan, slo: False, None)


def _first(
    plans: Iterable[Plan],
    slo: Slo,
    arrivals: Sequence[Arrival],
    hopeless: Callable[[Plan, Slo], bool],
    most: int | None,
) -> tuple[Verdict | None, int]:
    """By cost; closed forms are asked about plans of one cost when it is their turn, and about no others."""
    count = 0
    for _, alike in itertools.groupby(sorted(plans, key=lambda plan: plan.gpus), lambda plan: plan.gpus):
        fitting = [plan for plan in alike if _weights_fit(plan) and not hopeless(plan, slo)]
        for plan in sorted(fitting, key=lambda plan: (-plan.attained, plan.kind)):
            if count == most:
                return None, count
            count += 1
            verdict = judge(plan, slo, arrivals)
            if not verdict.misses:
                return verdict, count
    return None, count


def _weights_fit(plan: Plan) -> bool:
    return plan.decode.kv_blocks >= 1 and (plan.kind == "aggregated" or plan.prefill.kv_blocks >= 1)


def _hopeless(plan: Plan, slo: Slo) -> bool:
    if plan.binding is not None:
        return True
    for limits, latency in ((slo.ttft, plan.ttft), (slo.tpot, plan.tpot)):
        for share, limit in limits.items():
            took = latency.percentiles[share]
            if not math.isfinite(took) or took > _FAR * limit:
                return True
    return False
