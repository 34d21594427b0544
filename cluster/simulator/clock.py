"""Virtual time: what is due, in order of time; what is due at one moment runs in the order in which it was said."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Act = Callable[[Any], None]


class Clock:
    """Seconds from the beginning of the run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Act, Any]] = []
        self._order = 0

    def at(self, moment: float, act: Act, argument: Any = None) -> None:
        """Call `act(argument)` then; a moment that has passed counts as now."""
        self._order += 1
        heappush(self._due, (moment, self._order, act, argument))

    def run(self, until: float | None = None) -> None:
        """Until nothing is left to do, or only what is due after `until`."""
        due = self._due
        while due and (until is None or due[0][0] <= until):
            moment, _, act, argument = heappop(due)
            if moment > self.now:
                self.now = moment
            self.events += 1
            act(argument)
