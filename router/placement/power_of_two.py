"""Power of two choices: of two workers drawn at random, the one with fewer outstanding tokens.

Nearly as even as asking all, and several routers that see the same loads late do not all run to the same worker
(Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .policy import Candidate, Choice, Demand


class PowerOfTwo:
    """Two at random, the less loaded of them."""

    uses_prefixes = False
    uses_distances = False
    uses_laws = False

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """One of two."""
        count = len(candidates)
        one = rng.randrange(count)
        if count == 1:
            return Choice(candidates[one].peer)
        other = rng.randrange(count - 1)
        first, second = candidates[one], candidates[other + (other >= one)]
        return Choice((first if first.outstanding <= second.outstanding else second).peer)  # either may be the first
