"""Token rates: a bucket that fills at a steady rate and pays for requests before they run."""

from __future__ import annotations


class TokenBucket:
    """Pure. `rate`: tokens a second; `burst`: tokens that a bucket holds when nothing was taken for long.

    A request may cost more than the bucket ever holds: it is then let in when the bucket is full, and the bucket owes.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._at = burst, now

    def take(self, tokens: int, now: float) -> float:
        """Pays and returns 0, or takes nothing and returns the seconds after which it could pay."""
        self._fill(now)
        missing = min(tokens, self._burst) - self._level
        if missing > 0:
            return missing / self._rate
        self._level -= tokens
        return 0.0

    def give_back(self, tokens: int, now: float) -> None:
        """What was paid for and not used."""
        self._fill(now)
        self._level = min(self._burst, self._level + tokens)

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)
