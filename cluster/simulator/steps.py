"""Several steps of one batch in a row: when each of them ends, without running them one by one.

Each step takes as much longer than the one before as its sequences have grown, so n of them take
n * (first + more * (n - 1) / 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Steps:
    """`count` steps from `since` on; `first_s`: of the first; `more_s`: what each takes more than the one before."""

    since: float
    count: int
    first_s: float
    more_s: float

    def seconds(self, count: int) -> float:
        """That the first `count` take."""
        return count * (self.first_s + 0.5 * self.more_s * (count - 1))

    def end(self, count: int) -> float:
        """When they are over."""
        return self.since + self.seconds(count)

    def running(self, now: float) -> int:
        """The least number of steps whose end is not before now; at least 1, at most all."""
        elapsed, half = now - self.since, 0.5 * self.more_s
        slope = self.first_s - half
        if half * elapsed > 1e-9 * slope * slope:
            guess = (math.sqrt(slope * slope + 4 * half * elapsed) - slope) / (2 * half)
        else:
            guess = elapsed / slope if slope else 1.0
        steps = min(max(1, math.ceil(guess)), self.count)
        while steps < self.count and self.seconds(steps) < elapsed:
            steps += 1
        while steps > 1 and self.seconds(steps - 1) >= elapsed:
            steps -= 1
        return steps

    def done(self, now: float) -> int:
        """Steps that are over."""
        running = self.running(now)
        return running if self.end(running) <= now else running - 1
