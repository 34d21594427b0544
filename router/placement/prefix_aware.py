"""Prefix-aware: where the leg's own new tokens and those outstanding there are together the fewest.

At prefill that is the work until the leg's first token, at decode the KV that the worker comes to hold. Cached and
queued tokens are thus weighed in one unit: a worker that holds a prefix is worth just as many tokens of queue.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .policy import Candidate, Choice, Demand, least


class PrefixAware:
    """Outstanding tokens plus those that are not cached."""

    uses_prefixes = True

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """One of those with the fewest tokens in all."""
        costs = [candidate.outstanding + demand.tokens - candidate.cached for candidate in candidates]
        return Choice(least(costs, candidates, rng).peer)
