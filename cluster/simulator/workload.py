"""The load of a simulation as its user asks for it: a trace, or arrivals that are made up; the same each time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...proto.errors import ConfigError
from ..config_workload import WorkloadSection
from . import synthetic, traces
from .request import Arrival

Shape = Literal["poisson", "gamma", "diurnal"]
_SHAPES: tuple[Shape, ...] = ("poisson", "gamma", "diurnal")
_ENOUGH = 2000  # requests, where nothing says how many; a p99 has twenty of them above it
_AMPLITUDE, _DAY_S = 0.6, 86_400.0


def shape_of(name: str) -> Shape:
    """Raises ConfigError: there is none of that name."""
    for shape in _SHAPES:
        if shape == name:
            return shape
    raise ConfigError(f"--workload: is {name}; there are {', '.join(_SHAPES)}")


@dataclass(frozen=True, slots=True)
class Load:
    """`section`: rate and lengths where the rest does not say them. `cv`: of the gaps of `gamma`. `speed` multiplies
    rates and keeps lengths and their order."""

    section: WorkloadSection
    trace: Path | None = None
    shape: Shape = "poisson"
    rate: float | None = None
    cv: float = 3.0
    period_s: float = _DAY_S
    requests: int | None = None
    start_s: float = 0.0
    duration_s: float | None = None
    speed: float = 1.0
    jitter_s: float | None = None
    pool: str | None = None
    lengths: Path | None = None  # a trace whose lengths are drawn from
    contents: bool = True
    seed: int = 0

    def faster(self, times: float) -> Load:
        """The same requests, so many times as dense."""
        return replace(self, speed=self.speed * times)

    def open(self) -> traces.Trace:
        """The requests. Raises ConfigError."""
        self._check()
        rng = random.Random(f"lengths {self.seed}")
        if self.lengths is not None:
            draw = synthetic.resampled(traces.lengths_of(self.lengths), rng)
        else:
            draw = synthetic.drawn(self.section.prompt_tokens, self.section.output_tokens, rng)
        options = traces.Options(
            speed=self.speed,
            start_s=self.start_s,
            duration_s=self.duration_s,
            requests=self.requests,
            jitter_s=self.jitter_s,
            seed=self.seed,
            rate=self.rate or self.section.rate,
            draw=draw,
            pool=self.pool,
            contents=self.contents,
        )
        return traces.load(self.trace, options) if self.trace is not None else self._made(draw)

    def _made(self, draw: synthetic.Draw) -> traces.Trace:
        rate, rng = (self.rate or self.section.rate), random.Random(f"times {self.seed}")
        times: dict[Shape, Iterator[float]] = {
            "poisson": synthetic.poisson(rate, rng),
            "gamma": synthetic.gamma(rate, self.cv, rng),
            "diurnal": synthetic.diurnal(rate, _AMPLITUDE, self.period_s, rng),
        }
        made = synthetic.requests(times[self.shape], draw)
        if self.duration_s is not None:
            end = self.duration_s
            made = itertools.takewhile(lambda arrival: arrival.at < end, made)
        if self.requests is not None or self.duration_s is None:
            made = itertools.islice(made, self.requests or _ENOUGH)
        words = {"poisson": "", "gamma": f", cv {self.cv:g}", "diurnal": f", a wave of {self.period_s:g} s"}
        speed = self.speed
        arrivals = (Arrival(a.at / speed, a.prompt, a.output, a.contents, a.session) for a in made)
        return traces.Trace(f"{self.shape} {rate * speed:g}/s{words[self.shape]}", arrivals, ())

    def _check(self) -> None:
        for name, value in (("rate", self.rate), ("speed", self.speed), ("cv", self.cv), ("period", self.period_s)):
            if value is not None and not 0 < value < 1e9:
                raise ConfigError(f"--{name}: is {value:g}, must be more than 0")
        if self.trace is None and self.start_s:
            raise ConfigError("--start: needs --trace: made up arrivals begin at 0")
