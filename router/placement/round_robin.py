"""Round robin: each worker in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .policy import Candidate, Choice, Demand


class RoundRobin:
    """In turn, by name; a worker that comes or goes does not disturb the others' order."""

    uses_prefixes = False
    uses_distances = False
    uses_laws = False

    def __init__(self) -> None:
        self._last = ""

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The first worker after the one chosen last."""
        ordered = sorted(candidate.peer for candidate in candidates)
        peer = next((peer for peer in ordered if peer.worker_id > self._last), ordered[0])
        self._last = peer.worker_id
        return Choice(peer)
