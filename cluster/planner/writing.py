"""`baton plan --write`: the configuration that was planned from, with the plan's pools; `baton serve` runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ...proto.errors import ConfigError
from ..config import Config
from ..units import show_bytes
from .plans import Plan
from .report import Report, max_sequences, verdict


def write(config: Config, report: Report, place: Path) -> str:
    """What was written, in words. An aggregated plan is never written: the cluster has two pools, so the best
    disaggregated one is, with the verdict above it. Raises ConfigError: there is none, or the file is not writable."""
    plan = report.found.disaggregated or _of_kind(report.best_effort)
    if plan is None:
        raise ConfigError("--write: no disaggregated plan was found, and a cluster has two pools")
    values = _nested(config.raw)
    _relocate(config, values, place)
    pools = values.setdefault("pools", {})
    for role, cost, replicas in (
        ("prefill", plan.prefill, plan.replicas[0]),
        ("decode", plan.decode, plan.replicas[1]),
    ):
        pool = pools.setdefault(role, {})
        pool |= {"replicas": replicas, "tensor_parallel": cost.tp}
        if cost.options.kv_memory is None:
            size = int(cost.kv_blocks * cost.options.block_size * cost.kv_rank_bytes)
            pool["memory"] = show_bytes(size // 2**20 * 2**20)
    pools["prefill"]["max_batch_tokens"] = plan.prefill.options.max_batch_tokens
    pools["decode"]["max_sequences"] = max_sequences(plan)
    text = f"# Written by baton plan: {verdict(report)}.\n" + yaml.safe_dump(values, sort_keys=False)
    try:
        place.write_text(text)
    except OSError as error:
        raise ConfigError(f"--write: {place}: {error.strerror}") from None
    return f"wrote {place}: {plan.replicas[0]} prefill and {plan.replicas[1]} decode workers"


def _of_kind(plan: Plan | None) -> Plan | None:
    return plan if plan is not None and plan.kind == "disaggregated" else None


def _nested(raw: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys -> nested tables."""
    values: dict[str, Any] = {}
    for key, value in raw.items():
        at, parts = values, key.split(".")
        for part in parts[:-1]:
            at = at.setdefault(part, {})
        at[parts[-1]] = value
    return values


def _relocate(config: Config, values: dict[str, Any], place: Path) -> None:
    """Paths that are relative to the configuration's folder, where the new file is in another one."""
    if place.resolve().parent == config.folder:
        return
    for section, key in ((values.get("model"), "path"), (values, "hardware"), (values.get("workload"), "trace")):
        if isinstance(section, dict) and isinstance(section.get(key), str):
            beside = config.folder / Path(section[key]).expanduser()
            if beside.exists():
                section[key] = str(beside)
