"""Power of two choices: of two workers drawn at random, the one with fewer outstanding tokens.

Nearly as even as asking all, and several routers that see the same loads late do not all run to the same worker
(Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .policy import Candidate, Choice, Demand, least


class PowerOfTwo:
    """Two at random, the less loaded of them."""

    uses_prefixes = False
    uses_distances = False
    uses_laws = False

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """One of two."""
        two = rng.sample(candidates, min(2, len(candidates)))
        return Choice(least([candidate.outstanding for candidate in two], two, rng).peer)
