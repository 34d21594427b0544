"""Requests made up: when they come (Poisson, Gamma bursts, a day's wave, rates over time) and how long they are."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

from ..config_workload import Lengths
from .request import Arrival

Draw = Callable[[], tuple[int, int]]  # prompt and output tokens of one request


def length(lengths: Lengths, rng: random.Random) -> int:
    """One draw, at least 1."""
    if lengths.cv == 0:
        return max(1, round(lengths.mean))
    variance = math.log(1 + lengths.cv**2)
    return max(1, round(rng.lognormvariate(math.log(lengths.mean) - variance / 2, math.sqrt(variance))))


def drawn(prompt: Lengths, output: Lengths, rng: random.Random) -> Draw:
    """Both independent of each other."""
    return lambda: (length(prompt, rng), length(output, rng))


def resampled(pairs: Sequence[tuple[int, int]], rng: random.Random) -> Draw:
    """A trace's own lengths, each pair as often as any other."""
    return lambda: rng.choice(pairs)


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Times of a Poisson process of so many a second, for ever."""
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())


def gamma(rate: float, cv: float, rng: random.Random) -> Iterator[float]:
    """Times whose gaps are Gamma distributed: `cv` above 1 comes in bursts, below 1 is more even than Poisson.

    A gap has shape 1/cv^2 and mean 1/rate.
    """
    shape = 1 / cv**2
    return itertools.accumulate(rng.gammavariate(shape, 1 / (rate * shape)) for _ in itertools.count())


def diurnal(rate: float, amplitude: float, period_s: float, rng: random.Random) -> Iterator[float]:
    """Poisson with a rate that goes up and down once a period: rate * (1 + amplitude * sin), beginning in its trough.

    Thinned from the highest rate (Lewis, Shedler, 1979). `amplitude`: 0 to 1.
    """
    for now in poisson(rate * (1 + amplitude), rng):
        wave = 1 - amplitude * math.cos(2 * math.pi * now / period_s)
        if rng.random() * (1 + amplitude) < wave:
            yield now


def stepwise(rates: Sequence[tuple[float, float]], rng: random.Random) -> Iterator[float]:
    """Poisson with a rate for each window: (its beginning in seconds, a second). The last one is as long as the one
    before it."""
    ends = [begin for begin, _ in rates[1:]]
    last = rates[-1][0] + (rates[-1][0] - rates[-2][0] if len(rates) > 1 else 1.0)
    for (begin, rate), end in zip(rates, [*ends, last], strict=True):
        now = begin
        while rate > 0 and (now := now + rng.expovariate(rate)) < end:
            yield now


def requests(times: Iterator[float], draw: Draw) -> Iterator[Arrival]:
    """Each time with lengths of its own."""
    return (Arrival(now, *draw()) for now in times)
