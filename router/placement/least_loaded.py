"""Least outstanding tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .policy import Candidate, Choice, Demand, least, outstanding


class LeastLoaded:
    """The fewest outstanding tokens; ties at random, so that idle workers share evenly."""

    uses_prefixes = False
    uses_distances = False
    uses_laws = False

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """One of the least loaded."""
        return Choice(least(outstanding(candidates), candidates, rng).peer)
