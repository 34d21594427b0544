"""Line charts as SVG: axes with round ticks, series by class name so that the page's style sheet has the colours.

Pure: text from numbers. A value that is not finite is left out of its line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

_WIDTH, _HEIGHT = 620, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 44
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """`kind`: measured | simulated | planned | a, b, c for others. `marks`: points instead of a line."""

    name: str
    kind: str
    points: Sequence[Point]
    marks: bool = False
    step: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """`limit`: a line across the chart, such as an objective."""

    label: str
    scale: Literal["linear", "log"] = "linear"
    low: float | None = None
    high: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class _Scale:
    axis: Axis
    low: float
    high: float
    begin: float  # pixels
    end: float

    def place(self, value: float) -> float:
        low, high = self._map(self.low), self._map(self.high)
        return self.begin + (self._map(value) - low) / (high - low) * (self.end - self.begin)

    def _map(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.axis.scale == "log" else value

    @property
    def ticks(self) -> list[float]:
        if self.axis.scale == "log":
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(powers) <= 3 else (1,)
            found = [step * 10.0**power for power in powers for step in steps]
        else:
            step = _round_step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            found = [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        slack = 1e-9 * (abs(self.low) + abs(self.high))
        return [tick for tick in found if self.low - slack <= tick <= self.high + slack]


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """A figure with its legend; a chart without a point says so."""
    shown = [_finite(one, x, y) for one in series]
    shown = [one for one in shown if one.points]
    if not shown:
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="none">no data</p></figure>'
    across = _scale(x, [p[0] for one in shown for p in one.points], _LEFT, _WIDTH - _RIGHT)
    up = _scale(y, [p[1] for one in shown for p in one.points], _HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(across, up), *_limits(across, up)]
    parts += [_marks(one, across, up) if one.marks else _line(one, across, up) for one in shown]
    legend = "".join(f'<span class="key {escape(one.kind)}">{escape(one.name)}</span>' for one in shown)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )


def number(value: float) -> str:
    """Short: 0.25, 12, 3.4k."""
    if value == 0:
        return "0"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _finite(series: Series, x: Axis, y: Axis) -> Series:
    def fits(value: float, axis: Axis) -> bool:
        return math.isfinite(value) and (axis.scale == "linear" or value > 0)

    points = [(a, b) for a, b in series.points if fits(a, x) and fits(b, y)]
    return Series(series.name, series.kind, points, series.marks, series.step)


def _scale(axis: Axis, values: Sequence[float], begin: float, end: float) -> _Scale:
    values = [*values, *([axis.limit] if axis.limit is not None else [])]
    low = axis.low if axis.low is not None else min(values)
    high = axis.high if axis.high is not None else max(values)
    if axis.scale == "log":
        low, high = low / 1.1, high * 1.1
    elif axis.low is None and low > 0 and low < 0.5 * high:
        low = 0.0
    if axis.high is None and axis.scale == "linear":
        high += 0.05 * (high - low)
    if high <= low:
        high = low + (abs(low) or 1.0)
    return _Scale(axis, low, high, begin, end)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= rough * 0.999)


def _grid(x: _Scale, y: _Scale) -> list[str]:
    parts = []
    for tick in x.ticks:
        at = x.place(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{y.end}" x2="{at:.1f}" y2="{y.begin}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{y.begin + 16}" text-anchor="middle">{number(tick)}</text>')
    for tick in y.ticks:
        at = y.place(tick)
        parts.append(f'<line class="grid" x1="{x.begin}" y1="{at:.1f}" x2="{x.end}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{x.begin - 8}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    middle_x, middle_y = (x.begin + x.end) / 2, (y.begin + y.end) / 2
    parts.append(
        f'<text class="label" x="{middle_x}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x.axis.label)}</text>'
    )
    turned = f'transform="rotate(-90 14 {middle_y})"'
    parts.append(
        f'<text class="label" x="14" y="{middle_y}" text-anchor="middle" {turned}>{escape(y.axis.label)}</text>'
    )
    parts.append(f'<line class="axis" x1="{x.begin}" y1="{y.begin}" x2="{x.end}" y2="{y.begin}"/>')
    return parts


def _limits(x: _Scale, y: _Scale) -> list[str]:
    parts = []
    if x.axis.limit is not None:
        at = x.place(x.axis.limit)
        parts.append(f'<line class="limit" x1="{at:.1f}" y1="{y.end}" x2="{at:.1f}" y2="{y.begin}"/>')
    if y.axis.limit is not None:
        at = y.place(y.axis.limit)
        parts.append(f'<line class="limit" x1="{x.begin}" y1="{at:.1f}" x2="{x.end}" y2="{at:.1f}"/>')
    return parts


def _line(series: Series, x: _Scale, y: _Scale) -> str:
    places = [(x.place(a), y.place(b)) for a, b in series.points]
    path = [f"M{places[0][0]:.1f},{places[0][1]:.1f}"]
    for a, b in places[1:]:
        path.append(f"H{a:.1f}V{b:.1f}" if series.step else f"L{a:.1f},{b:.1f}")
    title = f"<title>{escape(series.name)}</title>"
    return f'<path class="line {escape(series.kind)}" d="{"".join(path)}">{title}</path>'


def _marks(series: Series, x: _Scale, y: _Scale) -> str:
    dots = []
    for a, b in series.points:
        title = f"<title>{escape(series.name)}: {number(a)}, {number(b)}</title>"
        dots.append(
            f'<circle class="mark {escape(series.kind)}" r="3.2" '
            f'cx="{x.place(a):.1f}" cy="{y.place(b):.1f}">{title}</circle>'
        )
    return "".join(dots)
