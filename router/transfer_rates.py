"""How fast KV travels between the workers' machines, measured from what the transfers themselves report."""

from __future__ import annotations

_KEPT = 0.95  # of what was measured before, with each transfer


class TransferRates:
    """Sums of bytes and seconds by (from, to) machine, which fade: large transfers count most."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[float, float]] = {}
        self._late: dict[tuple[str, str], float] = {}

    def observe(self, source: str, target: str, size: int, seconds: float) -> None:
        """`size` bytes took so long; what took no time says nothing."""
        if size > 0 and seconds > 0:
            moved, took = self._sums.get((source, target), (0.0, 0.0))
            self._sums[source, target] = (moved * _KEPT + size, took * _KEPT + seconds)

    def observe_late(self, source: str, target: str, seconds: float) -> None:
        """KV was there so long after it was computed."""
        before = self._late.get((source, target), seconds)
        self._late[source, target] = before * _KEPT + seconds * (1 - _KEPT)

    def late_s(self, source: str, target: str) -> float:
        """How long KV is late, of late; 0 for a way never measured."""
        return self._late.get((source, target), 0.0)

    def distances(self, source: str, targets: list[str]) -> list[float]:
        """Seconds a byte to each target, as multiples of the least; a way never measured counts as the best."""
        times = [
            took / moved if moved else None
            for moved, took in (self._sums.get((source, t), (0.0, 0.0)) for t in targets)
        ]
        least = min((time for time in times if time is not None), default=1.0)
        return [time / least if time is not None else 1.0 for time in times]
