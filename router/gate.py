"""The lookahead of one prefill worker: decode blocks are reserved only for prompts that are about to run.

A prompt is let through while the prompts that the worker would run before it, which are those let through that are no
longer than it, hold at most `lookahead x max_batch_tokens` tokens; and in any case when its turn comes before that of
everything let through. This mirrors the worker's own order (half of a step for the oldest prompt, half for the
shortest): a short prompt does not wait here for a long one to end, and a long one is not overtaken for ever.

Whose turn is first: the lower `priority`; among equals, tenants share the worker's tokens by their weights, however
many prompts one of them has waiting (start-time fair queueing, Goyal, Vin, Cheng, 1996: a prompt begins, in virtual
time, when its tenant's last one ends or now, and ends its tokens, divided by the tenant's weight, later); of one
tenant, the order of arrival.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .outstanding import LegId


class _Turn(NamedTuple):
    priority: int
    start: float  # virtual: tokens of a tenant of weight 1
    arrival: int


class _Entry(NamedTuple):
    turn: _Turn
    tokens: int


class LookaheadGate:
    """Pure: the legs that wait for one prefill worker and those that were let through to it."""

    def __init__(self, limit_tokens: int) -> None:
        self._limit = limit_tokens
        self._arrivals = 0
        self._now = 0.0  # virtual time: the latest start of a leg that was let through
        self._ends: dict[str, float] = {}  # virtual, of each tenant's last leg; only those to come
        self._waiting: dict[LegId, _Entry] = {}
        self._through: dict[LegId, _Entry] = {}

    def enter(self, leg: LegId, tokens: int, *, priority: int, tenant: str, weight: float = 1.0) -> list[LegId]:
        """Adds a leg; returns those that are let through now. weight: the tenant's share, relative to others'."""
        self._arrivals += 1
        start = self._ends.get(tenant, self._now)
        self._ends[tenant] = start + tokens / weight
        self._waiting[leg] = _Entry(_Turn(priority, start, self._arrivals), tokens)
        return self._open()

    def leave(self, leg: LegId) -> list[LegId]:
        """Removes a leg that was prefilled or given up; returns those that are let through now."""
        self._waiting.pop(leg, None)
        self._through.pop(leg, None)
        return self._open()

    def _open(self) -> list[LegId]:
        opened: list[LegId] = []
        too_long, first = self._bounds()
        for leg, entry in sorted(self._waiting.items(), key=lambda item: item[1].turn):
            if entry.tokens < too_long or first is None or entry.turn < first:
                self._through[leg] = self._waiting.pop(leg)
                self._now = max(self._now, entry.turn.start)
                opened.append(leg)
                too_long, first = self._bounds()
        self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}
        return opened

    def _bounds(self) -> tuple[float, _Turn | None]:
        """(the least length that has more than the limit before it, the first turn of a leg let through)."""
        held = 0
        too_long = math.inf
        for tokens in sorted(entry.tokens for entry in self._through.values()):
            held += tokens
            if held > self._limit:
                too_long = tokens
                break
        return too_long, min((entry.turn for entry in self._through.values()), default=None)
