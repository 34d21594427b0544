"""`baton plan`: the search's answer as numbers (JSON) and as tables for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import Config
from . import setup
from .estimate import Latency
from .plans import Plan
from .search import Found, Search
from .sensitivity import Change, changes
from .setup import Site
from .workload import Workload, slo_of

_UNRELIABLE = 2.0
_HEADROOM = 1.25  # max_sequences / the 99th percentile of the batch


@dataclass(frozen=True)
class Simulated:
    """What the simulator says of a plan; seconds by percentile, as `Results.summary` has them."""

    plan: Plan
    ttft: Mapping[str, float | None]
    tpot: Mapping[str, float | None]
    misses: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Everything that is shown."""

    site: Site
    workload: Workload
    found: Found
    best_effort: Plan | None  # where nothing within the GPUs allowed is enough
    changes: list[Change]
    capacity: float  # requests a second of the busiest window
    simulated: tuple[Simulated, ...] = ()
    simulated_requests: int = 0

    @property
    def plan(self) -> Plan | None:
        """The recommended one."""
        return self.found.best or self.best_effort

    @property
    def feasible(self) -> bool:
        """Whether all that was asked for is met."""
        refused = any(one.misses for one in self.simulated if one.plan is self.plan)
        return self.found.best is not None and not self.found.impossible and not refused

    def simulation_of(self, plan: Plan) -> Simulated | None:
        """None: it was not simulated."""
        return next((one for one in self.simulated if one.plan is plan), None)


def make(config: Config, workload: Workload) -> Report:
    """Raises ConfigError."""
    site = setup.site(config)
    search = Search(site, config.plan.gpus, config.plan.tensor_parallel)
    found = search.run(workload, slo_of(config))
    return about(site, search, workload, found)


def about(site: Site, search: Search, workload: Workload, found: Found) -> Report:
    """What there is to say of what was found."""
    effort = search.within_gpus(workload, found.relaxed) if found.best is None else None
    if effort is not None:
        effort = Plan(effort.kind, effort.prefill, effort.decode, effort.replicas, workload, found.slo)
    plan = found.best or effort
    able = search.capacity(plan) if plan is not None else 0.0
    return Report(
        site, workload, found, effort, changes(search, site, found.best) if found.best is not None else [], able
    )


def max_sequences(plan: Plan) -> int:
    """To set: the 99th percentile of the batch and a quarter, in eights, within what the KV pool holds."""
    batch = plan.answers.sharing.batch_at(0.99)
    limit = max(1.0, plan.answers.batch_limit)
    wanted = batch * _HEADROOM if math.isfinite(batch) else limit
    return max(1, int(min(math.ceil(wanted / 8) * 8, limit)))


def verdict(report: Report) -> str:
    """Disaggregate or not, and why."""
    split, whole = report.found.disaggregated, report.found.aggregated
    if split is None and whole is None:
        return "no plan meets the limits with the GPUs allowed; below is the nearest"
    if whole is None or (split is not None and split.gpus < whole.gpus):
        if split is None:
            return ""
        beside = "no aggregated plan meets the limits" if whole is None else f"aggregated needs {whole.gpus}"
        return f"disaggregate: {split.gpus} ranks; {beside}"
    if split is None:
        return f"do not disaggregate: {whole.gpus} ranks aggregated; no disaggregated plan meets the limits"
    if split.gpus == whole.gpus:
        return (
            f"do not disaggregate: {whole.gpus} ranks either way, and one pool has less that can fail "
            f"(share within both limits: {whole.attained:.2%} aggregated, {split.attained:.2%} disaggregated)"
        )
    return f"do not disaggregate: {whole.gpus} ranks aggregated, {split.gpus} disaggregated"


def notes(report: Report) -> list[str]:
    """What the numbers rest on."""
    load, site = report.workload, report.site
    found = [
        f"workload: {load.origin}; {load.rate:.3g} requests/s, planned for the busiest five minutes at "
        f"{load.busiest:.3g}/s (times {load.peak:.2f})",
        "TTFT: M/G/c with Kimura's percentiles; TPOT: processor sharing in closed form",
        _simulation(report),
        "each share within both limits takes TTFT and TPOT as independent",
    ]
    if load.burstiness > _UNRELIABLE:
        found.append(
            f"closed form unreliable: the busiest minute has {load.burstiness:.1f} times the load of the busiest five; "
            "simulate this load"
        )
    plan = report.plan
    if plan is not None:
        found += _profile(site, plan)
    return found


def _simulation(report: Report) -> str:
    if not report.simulated:
        return "not simulated: --simulate has the simulator choose"
    return (
        f"chosen by simulation: the cheapest plan of each kind that keeps the limits for {report.simulated_requests} "
        "requests, Poisson at the busiest rate, lengths drawn anew"
    )


def _profile(site: Site, plan: Plan) -> list[str]:
    cost = plan.decode
    source = "kv.memory" if cost.options.kv_memory is not None else "computed from the profile's memory"
    found = [f"KV blocks: {source}"]
    if cost.measured is None:
        fit = site.hardware.efficiency
        found.append(f"step times: sizes and coefficients ({fit.origin}), not measured on this machine")
        return found
    for name, law in (("prefill", cost.measured.prefill), ("decode", cost.measured.decode)):
        found.append(
            f"{name} step times: calibrated {cost.measured.date}, {law.steps} steps, mean error {law.mean_error:.1%}"
        )
    batch = plan.answers.sharing.batch_at(0.99)
    if batch > cost.measured.decode.tokens[1]:
        found.append(f"extrapolated: batches of {batch:.0f}, measured up to {cost.measured.decode.tokens[1]}")
    if plan.workload.prompt.most > cost.measured.prefill.context[1]:
        longest, known = plan.workload.prompt.most, cost.measured.prefill.context[1]
        found.append(f"extrapolated: prompts of {longest:.0f} tokens, measured up to {known}")
    return found


def as_json(report: Report) -> dict[str, Any]:
    """Seconds, bytes, tokens; infinite values are null."""
    found, load = report.found, report.workload
    return {
        "verdict": verdict(report),
        "feasible": report.feasible,
        "impossible": found.impossible,
        "plan": None if report.plan is None else plan_json(report.plan),
        "simulated": [
            {"kind": one.plan.kind, "ttft": one.ttft, "tpot": one.tpot, "misses": one.misses}
            for one in report.simulated
        ],
        "alternatives": {
            "disaggregated": None if found.disaggregated is None else plan_json(found.disaggregated),
            "aggregated": None if found.aggregated is None else plan_json(found.aggregated),
        },
        "capacity_requests_s": report.capacity,
        "sensitivity": [{"change": c.what, "requests_s": c.rate, "times": c.times} for c in report.changes],
        "workload": {
            "rate": load.rate,
            "busiest": load.busiest,
            "prompt_tokens": load.prompt.mean,
            "output_tokens": load.output.mean,
            "prefix_share": load.prefix_share,
            "origin": load.origin,
        },
        "notes": notes(report),
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    """One plan."""
    pools: dict[str, Any] = {}
    if plan.kind == "disaggregated":
        pools["prefill"] = {
            "replicas": plan.replicas[0],
            "tensor_parallel": plan.prefill.tp,
            "max_batch_tokens": plan.prefill.options.max_batch_tokens,
            "kv_blocks": plan.prefill.kv_blocks,
            "kv_bytes_rank": _kv_bytes(
                plan.prefill.kv_blocks, plan.prefill.options.block_size, plan.prefill.kv_rank_bytes
            ),
            "utilisation": _finite(plan.prompts.queue.utilisation),
            "bottleneck": plan.prompts.bottleneck
            if plan.kind == "disaggregated" and hasattr(plan.prompts, "bottleneck")
            else None,
        }
    pools["decode" if plan.kind == "disaggregated" else "workers"] = {
        "replicas": plan.replicas[1],
        "tensor_parallel": plan.decode.tp,
        "max_sequences": max_sequences(plan),
        "kv_blocks": plan.decode.kv_blocks,
        "kv_bytes_rank": _kv_bytes(plan.decode.kv_blocks, plan.decode.options.block_size, plan.decode.kv_rank_bytes),
        "utilisation": _finite(plan.answers.sharing.utilisation),
        "batch_mean": _finite(plan.answers.sharing.batch),
        "batch_p99": _finite(plan.answers.sharing.batch_at(0.99)),
        "batch_limit": plan.answers.batch_limit,
        "bottleneck": plan.answers.bottleneck,
    }
    return {
        "kind": plan.kind,
        "pools": pools,
        "ranks": plan.gpus,
        "ttft": _latency(plan.ttft),
        "tpot": _latency(plan.tpot),
        "transfer_exposed_s": _finite(plan.exposed),
        "within_both_limits": plan.attained,
        "goodput_rank_requests_s": plan.goodput_gpu,
        "output_tokens_s": plan.output_tokens,
        "dollars_hour": plan.dollars_hour,
        "dollars_million_output_tokens": plan.dollars_million(True),
        "dollars_million_tokens": plan.dollars_million(False),
        "misses": plan.misses,
    }


def _kv_bytes(blocks: int, size: int, token: float) -> int:
    return int(blocks * size * token)


def _latency(latency: Latency) -> dict[str, Any]:
    shares = {f"p{share * 100:.0f}": _finite(value) for share, value in latency.percentiles.items()}
    return {"mean": _finite(latency.mean), **shares, "method": latency.method}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
