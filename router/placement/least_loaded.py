"""Least outstanding tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .policy import Candidate, Choice, Demand, least


class LeastLoaded:
    """The fewest outstanding tokens; ties at random, so that idle workers share evenly."""

    uses_prefixes = False

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """One of the least loaded."""
        return Choice(least([candidate.outstanding for candidate in candidates], candidates, rng).peer)
