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
from bisect import bisect_left, insort
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
        self._order: list[tuple[_Turn, LegId]] = []  # of those that wait; no two have the same turn
        self._through: dict[LegId, _Entry] = {}

    def enter(self, leg: LegId, tokens: int, *, priority: int, tenant: str, weight: float = 1.0) -> list[LegId]:
        """Adds a leg; returns those that are let through now. weight: the tenant's share, relative to others'."""
        self._arrivals += 1
        start = self._ends.get(tenant, self._now)
        self._ends[tenant] = start + tokens / weight
        entry = _Entry(_Turn(priority, start, self._arrivals), tokens)
        opened = [leg] if self._may_pass(entry, *self._bounds()) else []
        if opened:  # of the others nobody may: nothing has changed for them
            self._let_through(leg, entry)
        else:
            self._waiting[leg] = entry
            insort(self._order, (entry.turn, leg))
        self._forget_ended()
        return opened

    def leave(self, leg: LegId) -> list[LegId]:
        """Removes a leg that was prefilled or given up; returns those that are let through now."""
        waiting = self._waiting.pop(leg, None)
        if waiting is not None:
            del self._order[bisect_left(self._order, (waiting.turn, leg))]
        opened = self._open() if self._through.pop(leg, None) is not None else []
        self._forget_ended()
        return opened

    def _open(self) -> list[LegId]:
        opened: list[LegId] = []
        too_long, first = self._bounds()
        for _, leg in self._order:
            entry = self._waiting[leg]
            if self._may_pass(entry, too_long, first):
                self._let_through(leg, entry)
                opened.append(leg)
                too_long, first = self._bounds()
        if opened:
            for leg in opened:
                del self._waiting[leg]
            self._order = [place for place in self._order if place[1] in self._waiting]
        return opened

    @staticmethod
    def _may_pass(entry: _Entry, too_long: float, first: _Turn | None) -> bool:
        return entry.tokens < too_long or first is None or entry.turn < first

    def _let_through(self, leg: LegId, entry: _Entry) -> None:
        self._through[leg] = entry
        self._now = max(self._now, entry.turn.start)

    def _forget_ended(self) -> None:
        self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}

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
