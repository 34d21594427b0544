"""Whether the cluster stands still: requests wait, and for long nothing has changed that says they go on."""

from __future__ import annotations


class Stall:
    """Pure. `limit_s`: without any progress that long, a router with requests is not ready."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._fingerprint: object = None
        self._since = now

    def seconds(self, fingerprint: object, waiting: int, now: float) -> float:
        """How long nothing has moved; 0 while that is shorter than the limit.

        fingerprint: anything that changes with progress (events heard, workers' steps). waiting: requests in flight.
        """
        if fingerprint != self._fingerprint or not waiting:
            self._fingerprint, self._since = fingerprint, now
        still = now - self._since
        return still if still > self._limit_s else 0.0
