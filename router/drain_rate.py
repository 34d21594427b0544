"""How fast requests end, and so when there will be room for one more: the retry hint of a refusal."""

from __future__ import annotations

import math

_MEMORY_S = 10.0  # an end counts 1/e of its weight after so long
_LEAST_S, _MOST_S = 0.1, 10.0  # of a hint


class DrainRate:
    """Ends per second, older ones fading. Times are the caller's monotonic clock."""

    def __init__(self, now: float) -> None:
        self._weight = 0.0
        self._at = now
        self._began = now

    def ended(self, now: float) -> None:
        """A request ended."""
        self._weight = self._faded(now) + 1.0
        self._at = now

    def per_second(self, now: float) -> float:
        """The rate of late; what was watched for less than the memory is not taken for less."""
        watched = _MEMORY_S * (1.0 - math.exp(-(now - self._began) / _MEMORY_S))
        return self._faded(now) / watched if watched > 0 else 0.0

    def hint_s(self, surplus: int, now: float) -> float:
        """Seconds until `surplus` requests will have ended, within bounds that suit a client."""
        rate = self.per_second(now)
        return min(max(surplus / rate, _LEAST_S), _MOST_S) if rate > 0 else _MOST_S

    def _faded(self, now: float) -> float:
        return self._weight * math.exp(-(now - self._at) / _MEMORY_S)
