"""Transfer-aware: the KV that the decode worker comes to hold, and the way that what is new of it has to go.

The tokens that must travel count as often as the way is longer than the shortest one, by the bytes a second that were
measured between the two machines (`router/transfer_rates.py`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .policy import Candidate, Choice, Demand, least


class TransferAware:
    """Outstanding tokens plus those that are not cached, times their way."""

    uses_prefixes = True
    uses_distances = True
    uses_laws = False

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """One of the cheapest."""
        costs = [c.outstanding + (demand.tokens - c.cached) * c.distance for c in candidates]
        return Choice(least(costs, candidates, rng).peer)
