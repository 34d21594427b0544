"""The HTML report of `simulate` and `bench`: one file, nothing loaded from elsewhere, for light and dark screens.

It shows what the JSON has: `comparison.py` says how the columns planned, simulated and measured are made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from ..proto.errors import ConfigError
from .charts import Axis, Series, chart
from .comparison import SOURCES, Line, comparison, milliseconds

_KINDS = ("measured", "simulated", "planned", "a", "b", "c")
_TEMPLATE = Path(__file__).with_name("report_page.html.j2")
_QUEUES = (
    ("gates", "at the router", "a"),
    ("prefill_waiting", "waiting at prefill", "b"),
    ("prefill_running", "in prefill", "simulated"),
    ("decode_waiting", "waiting for decode blocks", "c"),
    ("decode_running", "decoding", "measured"),
)


def write_page(path: Path, result: Mapping[str, Any]) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        path.write_text(page(result))
    except OSError as error:
        raise ConfigError(f"--html: {path}: {error.strerror or error}") from None


def page(result: Mapping[str, Any]) -> str:
    """The report as HTML."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(_TEMPLATE.read_text())
    lines = comparison(result)
    sources = [source for source in SOURCES if result.get(source)]
    load, profile = result["load"], result.get("profile")
    notes = [*load["notes"], *([f"profile: {profile['source']}"] if profile else []), *result.get("notes", ())]
    return template.render(
        title="baton: " + " | ".join(sources),
        lead=f"{load['workload']}, {result[sources[-1]]['requests']['completed']} requests",
        notes=notes,
        tiles=_tiles(result[sources[-1]]),
        table_title="Planned, simulated, measured" if len(sources) > 1 else "What requests see",
        headings=["", *sources, *[f"{name} error" for name in sources if name != "measured" and "measured" in sources]],
        rows=[_row(line, sources) for line in lines],
        sections=[
            {"title": "Latencies", "charts": _cdfs(result)},
            {"title": "Over time", "charts": _timelines(result)},
            {"title": "Operating points", "charts": [*_roofline(result), *_frontier(result)]},
        ],
        kinds=_KINDS,
        details=json.dumps({k: result[k] for k in ("load", "profile", "limits_s", "run") if k in result}, indent=2),
    )


def _tiles(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    def shown(value: float | None, text: str) -> str:
        return "–" if value is None else text.format(value)

    rates, share = summary["throughput"], summary["share_within_p99_limits"]
    tiles = [(f"{m.upper()} {p}", summary[f"{m}_s"][p]) for m in ("ttft", "tpot") for p in ("p50", "p99")]
    return [
        *({"label": label, "value": "–" if v is None else milliseconds(v)} for label, v in tiles),
        {"label": "output tokens/s", "value": shown(rates["output_tokens_per_s"], "{:,.0f}")},
        {"label": "requests/s", "value": shown(rates["requests_per_s"], "{:.3g}")},
        {"label": "within the limits", "value": shown(None if share is None else 100 * share, "{:.1f} %")},
    ]


def _row(line: Line, sources: Sequence[str]) -> dict[str, Any]:
    cells = [{"text": line.label, "mark": ""}]
    cells += [{"text": line.text(source), "mark": ""} for source in sources]
    if "measured" in sources:
        for source in sources:
            if source != "measured":
                error = line.error(source)
                mark = "" if error is None or line.limit is None else "good" if abs(error) <= line.limit else "bad"
                cells.append({"text": "–" if error is None else f"{error:+.1%}", "mark": mark})
    return {"cells": cells, "first": line.first}


def _cdfs(result: Mapping[str, Any]) -> list[str]:
    charts = []
    for metric, title in (("ttft", "Time to first token"), ("tpot", "Time per output token"), ("e2e", "End to end")):
        series = []
        for source, values in result["cdf"].get(metric, {}).items():
            count = max(1, len(values) - 1)
            series.append(Series(source, source, [(1000 * v, n / count) for n, v in enumerate(values)]))
        limit = result["limits_s"].get(metric, {}).get("p99")
        spread = max((p[0] for s in series for p in s.points), default=1) / max(
            1e-9, min((p[0] for s in series for p in s.points if p[0] > 0), default=1)
        )
        x = Axis("ms", "log" if spread > 20 else "linear", limit=1000 * limit if limit is not None else None)
        charts.append(chart(title, x, Axis("share of requests", low=0, high=1), series))
    return charts


def _timelines(result: Mapping[str, Any]) -> list[str]:
    charts = []
    for source, columns in result.get("timeline", {}).items():
        at = columns["at"]
        if not at:
            continue
        queues = [
            Series(name, kind, list(zip(at, columns[key], strict=True)), step=True)
            for key, name, kind in _QUEUES
            if any(columns.get(key, ()))
        ]
        charts.append(chart(f"Queues and batches, {source}", Axis("s"), Axis("requests", low=0), queues))
        pools = (("prefill_blocks", "prefill", "simulated"), ("decode_blocks", "decode", "measured"))
        blocks = [
            Series(name, kind, [(t, 100 * v) for t, v in zip(at, columns[key], strict=True)], step=True)
            for key, name, kind in pools
            if key in columns
        ]
        charts.append(chart(f"KV blocks in use, {source}", Axis("s"), Axis("% of the pool", low=0), blocks))
        sizes = (("prefill_workers", "prefill", "simulated"), ("decode_workers", "decode", "measured"))
        if any(len(set(columns[key])) > 1 for key, _, _ in sizes):
            lines = [
                Series(name, kind, list(zip(at, columns[key], strict=True)), step=True) for key, name, kind in sizes
            ]
            charts.append(chart(f"Workers, {source}", Axis("s"), Axis("workers", low=0), lines))
    return charts


def _roofline(result: Mapping[str, Any]) -> list[str]:
    points = result.get("roofline")
    if not points:
        return []
    series = [Series("the step law", "measured", points["decode"])]
    series.append(
        Series("this run", "simulated", points["points"][:: max(1, len(points["points"]) // 120)], marks=True)
    )
    title = f"Decode speed by batch, {points['context']:.0f} tokens of context each"
    return [chart(title, Axis("sequences in the batch", "log"), Axis("tokens/s of a worker", "log"), series)]


def _frontier(result: Mapping[str, Any]) -> list[str]:
    rows = result.get("frontier")
    if not rows:
        return []
    known = [row for row in rows if row["rate"] is not None]
    limits = result["limits_s"]
    charts = []
    if any(row["goodput"] is not None for row in known):
        good = Series(
            "within the p99 limits", "a", [(row["rate"], row["goodput"]) for row in known if row["goodput"] is not None]
        )
        ideal = Series("all", "planned", [(row["rate"], row["rate"]) for row in known])
        charts.append(
            chart(
                "Goodput frontier",
                Axis("requests/s offered", low=0),
                Axis("requests/s within limits", low=0),
                [ideal, good],
            )
        )
    for name, kind in (("ttft", "simulated"), ("tpot", "measured")):
        limit = limits.get(name, {}).get("p99")
        line = Series(
            f"p99 {name.upper()}", kind, [(r["rate"], 1000 * r[f"{name}_p99"]) for r in known if r[f"{name}_p99"]]
        )
        y = Axis("ms", "log", limit=1000 * limit if limit is not None else None)
        charts.append(chart(f"p99 {name.upper()} by load", Axis("requests/s offered", low=0), y, [line]))
    return charts
