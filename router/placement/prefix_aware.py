"""Prefix-aware: what of the leg is cached at each worker, weighed in tokens against what is queued there.

At prefill, the tokens until the leg's first token: its own that are not cached, and of each leg before it as many as
run before this one ends. Half of each step is for the oldest prompt and half for the shortest, so a longer leg delays a
shorter one by about the shorter one's own length; a long queue thus does not part a short follow-up from its prefix.
At decode, the tokens of KV that the worker comes to hold: what is outstanding, and what of the leg is not there yet.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .policy import Candidate, Choice, Demand, least


class PrefixAwarePrefill:
    """The fewest tokens until the first one is out."""

    uses_prefixes = True

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """One of those with the fewest tokens."""
        return Choice(least([_until_first(demand, candidate) for candidate in candidates], candidates, rng).peer)


class PrefixAwareDecode:
    """The least KV in the end."""

    uses_prefixes = True

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """One of those with the least KV."""
        costs = [candidate.outstanding + demand.tokens - candidate.cached for candidate in candidates]
        return Choice(least(costs, candidates, rng).peer)


def _until_first(demand: Demand, candidate: Candidate) -> int:
    fresh = demand.tokens - candidate.cached
    return fresh + sum(min(work.tokens, fresh) for work in candidate.works)
