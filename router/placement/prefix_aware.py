"""Prefix-aware: what of the leg is cached at each worker, weighed in tokens against what is queued there.

At prefill, the tokens until the leg's first token: its own that are not cached, and of each leg before it as many as
run before this one ends. Half of each step is for the oldest prompt and half for the shortest, so a longer leg delays a
shorter one by about the shorter one's own length; a long queue thus does not part a short follow-up from its prefix.
At decode, the tokens of KV that the worker comes to hold: what is outstanding, and what of the leg is not there yet;
the latter weighs more, as it must be moved, and takes the place of what others would have found.
Both add a little for what was placed there of late (`recent.py`), so that caches fill evenly on an idle cluster too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .policy import Candidate, Choice, Demand, least
from .recent import Recent

_MISS = 4  # tokens of KV held that one to be moved is worth


class PrefixAwarePrefill:
    """The fewest tokens until the first one is out."""

    uses_prefixes = True
    uses_distances = False
    uses_laws = False

    def __init__(self) -> None:
        self._recent = Recent()

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """One of those with the fewest tokens."""
        costs = [_until_first(demand, candidate) + self._recent.cost(candidate.peer) for candidate in candidates]
        return _place(costs, demand, candidates, self._recent, rng)


class PrefixAwareDecode:
    """The least KV in the end, what must be moved counting more."""

    uses_prefixes = True
    uses_distances = False
    uses_laws = False

    def __init__(self) -> None:
        self._recent = Recent()

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """One of the cheapest."""
        costs = [c.outstanding + _MISS * (demand.tokens - c.cached + self._recent.cost(c.peer)) for c in candidates]
        return _place(costs, demand, candidates, self._recent, rng)


def _place(
    costs: Sequence[float], demand: Demand, candidates: Sequence[Candidate], recent: Recent, rng: random.Random
) -> Choice:
    chosen = least(costs, candidates, rng)
    recent.placed(chosen.peer, demand.tokens - chosen.cached)
    return Choice(chosen.peer)


def _until_first(demand: Demand, candidate: Candidate) -> int:
    fresh = demand.tokens - candidate.cached
    return fresh + sum(min(work.tokens, fresh) for work in candidate.works)
