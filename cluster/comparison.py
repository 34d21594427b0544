"""Planned, simulated and measured side by side, with the errors of the first two: pure, over the JSON of a result.

An error is (predicted - measured) / measured; that of a share is the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SOURCES = ("planned", "simulated", "measured")
_PERCENTILES = ("mean", "p50", "p90", "p99")
LIMITS = {("tpot_s", "p50"): 0.05, ("ttft_s", "p50"): 0.15, ("ttft_s", "p99"): 0.30, ("share", ""): 0.10}
Unit = Literal["ms", "rate", "share", "count"]


@dataclass(frozen=True, slots=True)
class Line:
    """`limit`: of the error that a prediction should keep. `first`: of its group."""

    label: str
    unit: Unit
    values: Mapping[str, float | None]
    limit: float | None = None
    first: bool = False

    def text(self, source: str) -> str:
        """The value in its unit."""
        value = self.values.get(source)
        if value is None:
            return "–"
        shown = {
            "ms": milliseconds(value),
            "rate": f"{value:.2f}",
            "share": f"{value:.1%}",
            "count": f"{value:.0f}",
        }
        return shown[self.unit]

    def error(self, source: str) -> float | None:
        """Against what was measured; None where either is not known."""
        value, truth = self.values.get(source), self.values.get("measured")
        if value is None or truth is None:
            return None
        if self.unit == "share":
            return value - truth
        return (value - truth) / truth if truth else None


def milliseconds(value: float) -> str:
    """Of seconds; from ten on seconds."""
    return f"{1000 * value:.1f} ms" if value < 10 else f"{value:.1f} s"


def comparison(result: Mapping[str, Any]) -> list[Line]:
    """Every line that any source has a value for."""
    sources = {source: result[source] for source in SOURCES if result.get(source)}
    lines: list[Line] = []
    for key, name in (
        ("ttft_s", "TTFT"),
        ("tpot_s", "TPOT"),
        ("e2e_s", "End to end"),
        ("transfer_s", "Transfer, exposed"),
    ):
        for place, part in enumerate(_PERCENTILES):
            values = {s: (found.get(key) or {}).get(part) for s, found in sources.items()}
            lines.append(Line(f"{name} {part}", "ms", values, LIMITS.get((key, part)), first=not place))
    for key, name in (
        ("requests_per_s", "Requests/s"),
        ("output_tokens_per_s", "Output tokens/s"),
        ("goodput_per_s", "Goodput/s"),
    ):
        rates = {s: found.get("throughput", {}).get(key) for s, found in sources.items()}
        limit = LIMITS["share", ""] if key == "goodput_per_s" else None
        lines.append(Line(name, "rate", rates, limit, first=key == "requests_per_s"))
    share = {s: found.get("share_within_p99_limits") for s, found in sources.items()}
    lines.append(Line("Within the p99 limits", "share", share, LIMITS["share", ""]))
    for role in ("prefill", "decode"):
        peak = {s: found.get("workers", {}).get(f"{role}_blocks_peak") for s, found in sources.items()}
        lines.append(Line(f"KV blocks at most, {role}", "share", peak, first=role == "prefill"))
    return [line for line in lines if any(value is not None for value in line.values.values())]
