"""What is asked of a cluster: how many requests of which lengths, and what their users may expect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from ...proto.errors import ConfigError
from ..config import Config
from ..config_workload import Lengths, Percentiles

_POINTS = 64
_WINDOW_S, _SHORT_S = 300.0, 60.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """Lengths in tokens as equally likely points, ascending: sums over them are the integrals of the planner."""

    points: tuple[float, ...]

    @staticmethod
    def of(lengths: Lengths) -> Distribution:
        """Log-normal with this mean and coefficient of variation, at the middles of 64 equal shares.

        The points are scaled so that their mean is exactly the one given.
        """
        if lengths.cv == 0:
            return Distribution((lengths.mean,))
        sigma = math.sqrt(math.log(1 + lengths.cv**2))
        normal = NormalDist()
        raw = [math.exp(sigma * normal.inv_cdf((i + 0.5) / _POINTS)) for i in range(_POINTS)]
        scale = lengths.mean * _POINTS / sum(raw)
        return Distribution(tuple(max(1.0, value * scale) for value in raw))

    @staticmethod
    def sampled(values: Sequence[float]) -> Distribution:
        """Of recorded lengths: the means of 64 equal shares of them. Raises ConfigError where there are none."""
        if not values:
            raise ConfigError("workload.trace: it holds no requests")
        ordered = sorted(values)
        count = min(_POINTS, len(ordered))
        edges = [i * len(ordered) // count for i in range(count + 1)]
        parts = [ordered[edges[i] : edges[i + 1]] for i in range(count)]
        return Distribution(tuple(sum(part) / len(part) for part in parts))

    @property
    def mean(self) -> float:
        """Tokens."""
        return sum(self.points) / len(self.points)

    @property
    def square(self) -> float:
        """The mean of the squares."""
        return sum(point * point for point in self.points) / len(self.points)

    @property
    def most(self) -> float:
        """The largest point."""
        return self.points[-1]


@dataclass(frozen=True, slots=True)
class Workload:
    """`rate`: requests a second, mean; `peak`: the load of the busiest five minutes / the mean."""

    rate: float
    prompt: Distribution
    output: Distribution
    prefix_share: float = 0.0
    peak: float = 1.0
    burstiness: float = 1.0  # busiest minute / busiest five minutes; above 2 no closed form is to be trusted
    origin: str = "the configuration's workload"

    @property
    def busiest(self) -> float:
        """Requests a second that is planned for."""
        return self.rate * self.peak

    def at(self, busiest: float) -> Workload:
        """The same requests, at another rate of the busiest window."""
        return replace(self, rate=busiest / self.peak)


def from_config(config: Config) -> Workload:
    """The workload of a configuration, recorded or described."""
    section = config.workload
    return Workload(
        section.rate,
        Distribution.of(section.prompt_tokens),
        Distribution.of(section.output_tokens),
        section.prefix_share,
        section.peak,
    )


def from_requests(requests: Sequence[tuple[float, int, int]], prefix_share: float, origin: str) -> Workload:
    """Of recorded requests (arrival in seconds, prompt and output tokens), ascending in time.

    `peak` is taken in tokens of work, prompt and output, not in requests: long prompts come in bursts too.
    """
    if len(requests) < 2 or requests[-1][0] <= requests[0][0]:
        raise ConfigError(f"workload.trace: {origin}: needs at least two requests at different times")
    span = requests[-1][0] - requests[0][0]
    mean = sum(prompt + output for _, prompt, output in requests) / span
    five, one = (_busiest(requests, min(window, span)) for window in (_WINDOW_S, _SHORT_S))
    return Workload(
        len(requests) / span,
        Distribution.sampled([prompt for _, prompt, _ in requests]),
        Distribution.sampled([output for _, _, output in requests]),
        prefix_share,
        max(1.0, five / mean),
        max(1.0, one / five),
        origin,
    )


def _busiest(requests: Sequence[tuple[float, int, int]], window: float) -> float:
    """The most tokens a second in any window of this length."""
    most, load, first = 0, 0, 0
    for now, prompt, output in requests:
        load += prompt + output
        while requests[first][0] <= now - window:
            load -= requests[first][1] + requests[first][2]
            first += 1
        most = max(most, load)
    return most / window


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds by percentile (0.5, 0.9, 0.99). `attainment`: the share of requests that must be within the
    strictest limit of both; None: only each percentile by itself."""

    ttft: dict[float, float]
    tpot: dict[float, float]
    attainment: float | None = None


def slo_of(config: Config) -> Slo:
    """Raises ConfigError for a limit of zero: no plan meets it."""
    limits = {}
    for name in ("ttft", "tpot"):
        section: Percentiles = getattr(config.slo, name)
        limits[name] = {
            share: value
            for share, key in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
            if (value := getattr(section, key)) is not None
        }
        for share, value in limits[name].items():
            if value <= 0:
                raise ConfigError(f"slo.{name}.p{share * 100:.0f}: is 0, but must be more than 0")
    return Slo(limits["ttft"], limits["tpot"], config.slo.attainment)
