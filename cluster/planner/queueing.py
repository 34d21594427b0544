"""Waiting in front of servers, and batches that share one, in closed form.

Waits: M/G/c as M/M/c scaled by (1 + cs2)/2 (Kimura 1994; Allen-Cunneen), with Erlang's C for the chance to wait.
Batches: a decode worker whose step takes a + k * b for b sequences is a processor sharing queue; with Poisson arrivals
its occupancy is negative binomial whatever the law of lengths (insensitivity, Kelly 1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

SHARES = (0.5, 0.9, 0.99)
_NORMAL = NormalDist()


def erlang_c(servers: int, load: float) -> float:
    """The chance that a customer waits. `load`: arrivals * mean service, below `servers`; 1 where it is not."""
    if load <= 0:
        return 0.0
    if load >= servers:
        return 1.0
    blocked = 1.0  # Erlang's B by its recursion, which cannot overflow
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


@dataclass(frozen=True, slots=True)
class Queue:
    """First come, first served. `services`: equally likely service times, seconds, ascending.

    `together`: seconds of a step that takes in as many as it can of those that wait; 0: each is served by itself. All
    of one step end when the step does, so a customer also waits for those who came behind it while the step before ran:
    utilisation x what was left of that step, of which we take half of the work found to be, and no more than such a
    step lasts beyond the customer's own service. (Against the simulator: `tests/test_planner_simulated.py`.)
    """

    servers: int
    rate: float
    services: Sequence[float]
    together: float = 0.0

    @property
    def service(self) -> float:
        """Mean."""
        return sum(self.services) / len(self.services)

    @property
    def variability(self) -> float:
        """cs2: variance of the services / square of their mean."""
        mean = self.service
        return max(0.0, sum(s * s for s in self.services) / len(self.services) / mean**2 - 1) if mean else 0.0

    @property
    def utilisation(self) -> float:
        """rho."""
        return self.rate * self.service / self.servers

    @property
    def decay(self) -> float:
        """P(wait > t) = C * exp(-decay * t), for every t >= 0."""
        return 2 * (self.servers / self.service - self.rate) / (1 + self.variability)

    def mean_wait(self) -> float:
        """C / (c * mu - rate) * (1 + cs2) / 2, and what `together` adds; infinite from rho 1 on."""
        if self.utilisation >= 1:
            return math.inf
        wait = erlang_c(self.servers, self.rate * self.service) / self.decay
        more = self.utilisation / 2
        if not self.together or not more:
            return wait
        parts = (1 - math.exp(-self.decay * max(0.0, self.together - s) / more) for s in self.services)
        return wait * (1 + more * sum(parts) / len(self.services))

    def wait(self, share: float) -> float:
        """The percentile: ln(C / (1 - share)) / decay, 0 where so few wait."""
        if self.utilisation >= 1:
            return math.inf
        waits = erlang_c(self.servers, self.rate * self.service)
        return max(0.0, math.log(waits / (1 - share)) / self.decay) if waits > 0 else 0.0

    def within(self, limit: float, latencies: Sequence[float] | None = None) -> float:
        """Share of customers whose wait and own time (`latencies`; the services) together take at most `limit`.

        The two are independent under first come, first served: the sum's distribution is their convolution.
        """
        if self.utilisation >= 1:
            return 0.0
        own = self.services if latencies is None else latencies
        waits, decay, more = erlang_c(self.servers, self.rate * self.service), self.decay, self.utilisation / 2
        late = 0.0
        for seconds in own:
            left, most = limit - seconds, max(0.0, self.together - seconds)  # most: for those who came behind
            late += 1.0 if left < 0 else waits * math.exp(-decay * max(left / (1 + more), left - most))
        return 1 - late / len(own)

    def percentile(self, share: float, latencies: Sequence[float] | None = None) -> float:
        """Of wait and own time together; infinite from rho 1 on."""
        if self.utilisation >= 1:
            return math.inf
        own = self.services if latencies is None else latencies
        longest = own[-1] + self.wait(1 - (1 - share) / 2) + 1 / self.decay * 50 + self.together
        return quantile(share, lambda t: self.within(t, own), longest)


@dataclass(frozen=True, slots=True)
class Sharing:
    """One decode worker. A step of b sequences takes a + k * b seconds; each request needs `tokens` of them."""

    a: float
    k: float
    rate: float
    tokens: float

    @property
    def utilisation(self) -> float:
        """rho = rate * tokens * k; a batch exists only below 1."""
        return self.rate * self.tokens * self.k

    @property
    def batch(self) -> float:
        """Mean: rho * (a / k + 1) / (1 - rho), which for k = 0 is rate * tokens * a."""
        if self.utilisation >= 1:
            return math.inf
        return self.rate * self.tokens * (self.a + self.k) / (1 - self.utilisation)

    @property
    def deviation(self) -> float:
        """sqrt(mean / (1 - rho)), of the negative binomial."""
        return math.sqrt(self.batch / (1 - self.utilisation)) if self.utilisation < 1 else math.inf

    def batch_at(self, share: float) -> float:
        """The percentile, at least 1."""
        return max(1.0, self.batch + _NORMAL.inv_cdf(share) * self.deviation)

    @property
    def step(self) -> float:
        """Mean seconds between the tokens of a request: batch / (rate * tokens) (Little's law)."""
        if self.rate <= 0:
            return self.a + self.k
        return self.batch / (self.rate * self.tokens)


def quantile(share: float, distribution: Callable[[float], float], most: float) -> float:
    """Where a distribution function reaches `share`, by bisection up to `most`."""
    low, high = 0.0, most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if distribution(middle) < share else (low, middle)
    return high


def normal_within(limit: float, mean: float, deviation: float) -> float:
    """P(X <= limit) of a normal distribution; a step where it does not vary."""
    if deviation <= 0:
        return float(limit >= mean)
    return _NORMAL.cdf((limit - mean) / deviation)
