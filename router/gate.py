"""The lookahead of one prefill worker: decode blocks are reserved only for prompts that are about to run.

A prompt is let through while the prompts that the worker would run before it, which are those let through that are no
longer than it, hold at most `lookahead x max_batch_tokens` tokens; and in any case when everything let through arrived
after it. This mirrors the worker's own order (half of a step for the oldest prompt, half for the shortest): a short
prompt does not wait here for a long one to end, and a long one is not overtaken for ever. Prompts of equal length go
through in order of arrival.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .outstanding import LegId


class _Entry(NamedTuple):
    arrival: int
    tokens: int


class LookaheadGate:
    """Pure: the legs that wait for one prefill worker and those that were let through to it."""

    def __init__(self, limit_tokens: int) -> None:
        self._limit = limit_tokens
        self._arrivals = 0
        self._waiting: dict[LegId, _Entry] = {}  # in order of arrival
        self._through: dict[LegId, _Entry] = {}

    def enter(self, leg: LegId, tokens: int) -> list[LegId]:
        """Adds a leg; returns those that are let through now."""
        self._arrivals += 1
        self._waiting[leg] = _Entry(self._arrivals, tokens)
        return self._open()

    def leave(self, leg: LegId) -> list[LegId]:
        """Removes a leg that was prefilled or given up; returns those that are let through now."""
        self._waiting.pop(leg, None)
        self._through.pop(leg, None)
        return self._open()

    def _open(self) -> list[LegId]:
        opened: list[LegId] = []
        too_long, oldest = self._bounds()
        for leg, entry in list(self._waiting.items()):
            if entry.tokens < too_long or entry.arrival < oldest:
                self._through[leg] = self._waiting.pop(leg)
                opened.append(leg)
                too_long, oldest = self._bounds()
        return opened

    def _bounds(self) -> tuple[float, float]:
        """(the least length that has more than the limit before it, the arrival of the oldest leg let through)."""
        held = 0
        too_long = math.inf
        for tokens in sorted(entry.tokens for entry in self._through.values()):
            held += tokens
            if held > self._limit:
                too_long = tokens
                break
        return too_long, min((entry.arrival for entry in self._through.values()), default=math.inf)
