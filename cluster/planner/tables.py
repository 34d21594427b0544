"""`baton plan` for people: rich tables of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..units import human_bytes
from . import report as reports
from .plans import Plan
from .report import Report


def show(report: Report, console: Console) -> None:
    """Verdict, plans side by side, sensitivity, and what it rests on."""
    console.print(_shown(report))


def _shown(report: Report) -> Group:
    parts: list[RenderableType] = [Text(reports.verdict(report), style="bold green" if report.feasible else "bold red")]
    parts += [Text(f"infeasible: {text}", style="red") for text in report.found.impossible]
    plan = report.plan
    if plan is None:
        parts.append(Text("even one request at a time misses the limits with the GPUs allowed", style="red"))
        return Group(*parts)
    if report.found.best is None or report.found.impossible:
        limits = replace_limits(report)
        parts += [Text(f"missed: {text}", style="red") for text in (plan.misses or limits)]
    parts += [_plans(report), Text(f"serves up to {report.capacity:.3g} requests/s within the limits")]
    if report.changes:
        parts.append(_changes(report))
    parts += [Text(f"- {note}", style="dim") for note in reports.notes(report)]
    return Group(*parts)


def replace_limits(report: Report) -> list[str]:
    """Limits that the plan was made for, where those asked for are impossible."""
    found = []
    for name in ("ttft", "tpot"):
        asked, relaxed = getattr(report.found.slo, name), getattr(report.found.relaxed, name)
        found += [
            f"{name.upper()} p{share * 100:.0f}: planned for {relaxed[share] * 1e3:.1f} ms, "
            f"{relaxed[share] / limit - 1:.0%} more than asked for"
            for share, limit in asked.items()
            if relaxed[share] > limit
        ]
    return found


def _plans(report: Report) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    found = report.found
    tried = (found.disaggregated, found.aggregated, report.best_effort)
    shown = [plan for plan in tried if plan is not None]
    columns = []
    for plan in shown:
        mark = " *" if plan is report.plan else ""
        table.add_column(plan.kind + mark, justify="right")
        columns.append(reports.plan_json(plan))
    for title, cells in [*_rows(columns), *_simulated(report, shown)]:
        table.add_row(title, *cells)
    return table


def _rows(plans: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    def each(title: str, cell: Any) -> tuple[str, list[str]]:
        return title, [cell(plan) for plan in plans]

    def pool(plan: dict[str, Any], first: bool) -> str:
        found = plan["pools"].get("prefill" if first else "decode") or plan["pools"].get("workers")
        return (
            f"{found['replicas']} x TP {found['tensor_parallel']}" if "prefill" in plan["pools"] or not first else "-"
        )

    def last(plan: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = plan["pools"].get("decode") or plan["pools"]["workers"]
        return found

    def times(plan: dict[str, Any], name: str) -> str:
        return " / ".join(_time(plan[name][share]) for share in ("p50", "p90", "p99"))

    return [
        each("ranks", lambda p: str(p["ranks"])),
        each("prefill workers", lambda p: pool(p, True)),
        each("decode workers (or both)", lambda p: pool(p, False)),
        each("TTFT p50 / p90 / p99", lambda p: times(p, "ttft")),
        each("TPOT p50 / p90 / p99", lambda p: times(p, "tpot")),
        each("transfer not hidden", lambda p: _time(p["transfer_exposed_s"])),
        each("within both limits", lambda p: f"{p['within_both_limits']:.2%}"),
        each("goodput, requests/s and rank", lambda p: f"{p['goodput_rank_requests_s']:.3g}"),
        each("output tokens/s", lambda p: f"{p['output_tokens_s']:,.0f}"),
        each("batch mean / p99 / limit", lambda p: _batch(last(p))),
        each("max_sequences", lambda p: str(last(p)["max_sequences"])),
        each("KV of a rank", lambda p: f"{human_bytes(last(p)['kv_bytes_rank'])}, {last(p)['kv_blocks']:,} blocks"),
        each("prefill waits for", lambda p: str((p["pools"].get("prefill") or {}).get("bottleneck") or "-")),
        each("decode waits for", lambda p: str(last(p)["bottleneck"])),
        each("$ an hour", lambda p: _money(p["dollars_hour"])),
        each("$ a million output tokens", lambda p: _money(p["dollars_million_output_tokens"])),
        each("$ a million tokens", lambda p: _money(p["dollars_million_tokens"])),
    ]


def _simulated(report: Report, plans: list[Plan]) -> list[tuple[str, list[str]]]:
    """Rows that are there only where something was simulated."""
    found = [one for plan in plans if (one := report.simulation_of(plan)) is not None]
    if not found:
        return []

    def times(by: Mapping[str, float | None]) -> str:
        return " / ".join(_time(by[share]) for share in ("p50", "p90", "p99"))

    return [
        ("simulated TTFT", [times(one.ttft) for one in found]),
        ("simulated TPOT", [times(one.tpot) for one in found]),
        ("simulated: keeps the limits", ["no: " + "; ".join(one.misses) if one.misses else "yes" for one in found]),
    ]


def _batch(pool: dict[str, Any]) -> str:
    mean, p99 = pool["batch_mean"], pool["batch_p99"]
    return "unbounded" if mean is None or p99 is None else f"{mean:.1f} / {p99:.0f} / {pool['batch_limit']:.0f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unbounded"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _money(value: float | None) -> str:
    return "no price" if value is None else f"{value:.2f}"


def _changes(report: Report) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("one change to this plan")
    table.add_column("requests/s", justify="right")
    table.add_column("", justify="right")
    for change in report.changes:
        times = "" if change.times is None else f"{change.times - 1:+.0%}"
        table.add_row(change.what, f"{change.rate:.3g}", times)
    return table
