"""How many workers a pool should have: pure, from what its users ask of it and what one worker can do.

    workers = ceil(load / (capacity of one * use)),  within the pool's bounds

More is decided at once, less only when every decision of the last while was for less. While workers start nothing is
added: what they will take over is still counted against those that are there. "No data" keeps what there is; "no load"
is a load of zero, and comes to the least. Latency plays no part: one that a single request misses on an idle worker is
cured by no number of them (`infeasible`), and one that queues cause is a load that the capacity already says.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..proto.errors import ConfigError
from ..proto.step_time import StepTime

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a pool. `use`: the share of a worker's capacity that is planned for. Raises ConfigError."""

    least: int
    most: int
    use: float
    capacity: float  # tokens a second of one worker: prompt tokens, or tokens of answers

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"autoscaling: least {self.least}, most {self.most}: give 1 <= least <= most")
        if not 0 < self.use <= 1:
            raise ConfigError(f"autoscaling: use is {self.use:g}, must be more than 0 and at most 1")
        if not (math.isfinite(self.capacity) and self.capacity > 0):
            raise ConfigError(f"autoscaling: a capacity of {self.capacity:g} tokens/s: no worker has that")

    def workers(self, load: float) -> int:
        """For so many tokens a second."""
        return min(max(self.least, math.ceil(load / (self.capacity * self.use) - 1e-9)), self.most)


class Autoscaler:
    """Times are the caller's. `patience_s`: how long less must be enough before a pool shrinks."""

    def __init__(self, bounds: Mapping[Role, Bounds], patience_s: float) -> None:
        self._bounds = bounds
        self._patience_s = patience_s
        self._began: float | None = None
        self._seen: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in bounds}

    def decide(
        self, now: float, loads: Mapping[Role, float | None], ready: Mapping[Role, int], starting: Mapping[Role, int]
    ) -> dict[Role, int]:
        """The pools' sizes from now on. `loads`: tokens a second of late; None or not a number: nothing is known."""
        self._began = now if self._began is None else self._began
        sizes: dict[Role, int] = {}
        for role, bounds in self._bounds.items():
            load, present = loads.get(role), ready[role] + starting[role]
            if load is None or not math.isfinite(load) or load < 0:
                sizes[role] = min(max(present, bounds.least), bounds.most)
                continue
            wanted = bounds.workers(load)
            seen = self._seen[role]
            seen.append((now, wanted))
            while seen[0][0] < now - self._patience_s:
                seen.popleft()
            highest = max(size for _, size in seen)
            if wanted > present:
                sizes[role] = present if starting[role] else wanted
            elif now - self._began >= self._patience_s:
                sizes[role] = min(present, highest)
            else:
                sizes[role] = present
            sizes[role] = min(max(sizes[role], bounds.least), bounds.most)
        return sizes


def decode_capacity(law: StepTime, context: float, most_sequences: int, tpot_s: float | None) -> float:
    """Tokens a second of a decode worker whose sequences hold `context` tokens: at the largest batch whose step keeps
    `tpot_s`, or at its largest batch. Raises ConfigError where one sequence alone misses it."""
    if tpot_s is not None and tpot_s <= 0:
        raise ConfigError(f"slo.tpot: is {tpot_s:g} s, must be more than 0")
    batch = most_sequences
    each = law.b + law.c * context
    if tpot_s is not None:
        if law.a + each > tpot_s:
            raise ConfigError(f"slo.tpot: {infeasible('TPOT', tpot_s, law.a + each)}")
        batch = min(batch, math.floor((tpot_s - law.a) / each + 1e-9)) if each > 0 else batch
    seconds = law.a + each * batch
    if seconds <= 0:
        raise ConfigError("autoscaling: the step law says that steps take no time")
    return batch / seconds


def infeasible(metric: str, limit_s: float, alone_s: float) -> str | None:
    """Why no number of workers keeps the limit; None where an idle one does."""
    if alone_s <= limit_s:
        return None
    return (
        f"{metric} of {1000 * limit_s:.0f} ms is infeasible with this model and degree of tensor parallelism: one "
        f"request alone takes {1000 * alone_s:.0f} ms, however many workers there are"
    )
