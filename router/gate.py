"""The lookahead of one prefill worker: decode blocks are reserved only for prompts that are about to run.

A prompt is let through, in order of arrival, while the prompts let through before it hold at most
`lookahead x max_batch_tokens` tokens that are not prefilled yet, or none at all.
"""

from __future__ import annotations

from .placement import LegId


class LookaheadGate:
    """Pure: the legs that wait for one prefill worker and those that were let through to it."""

    def __init__(self, limit_tokens: int) -> None:
        self._limit = limit_tokens
        self._waiting: dict[LegId, int] = {}  # in order of arrival
        self._through: dict[LegId, int] = {}
        self._outstanding = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, leg: LegId, tokens: int) -> list[LegId]:
        """Adds a leg; returns those that are let through now."""
        self._waiting[leg] = tokens
        return self._open()

    def leave(self, leg: LegId) -> list[LegId]:
        """Removes a leg that was prefilled or given up; returns those that are let through now."""
        self._waiting.pop(leg, None)
        self._outstanding -= self._through.pop(leg, 0)
        return self._open()

    def _open(self) -> list[LegId]:
        opened: list[LegId] = []
        while self._waiting and (not self._through or self._outstanding <= self._limit):
            leg = next(iter(self._waiting))
            tokens = self._waiting.pop(leg)
            self._through[leg] = tokens
            self._outstanding += tokens
            opened.append(leg)
        return opened
