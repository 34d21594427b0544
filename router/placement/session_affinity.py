"""Session affinity: legs of one session go to one worker, without anybody remembering it.

Rendezvous hashing: each worker has a rank for each session, and the highest takes it. Several routers agree, and when
a worker comes or goes only its own sessions move. Bounded loads: a worker that has `_FACTOR` times its share of the
outstanding tokens, this leg included, is passed over, so that a few busy sessions do not overload one
(Mirrokni, Thorup, Zadimoghaddam, Consistent Hashing with Bounded Loads, 2018).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from ..life_messages import Peer
from .policy import Candidate, Choice, Demand, least

_FACTOR = 1.25


class SessionAffinity:
    """The highest ranked worker that has room; legs of no session go where the load is least."""

    uses_prefixes = False
    uses_distances = False
    uses_laws = False

    def choose(self, demand: Demand, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The session's worker."""
        loads = [candidate.outstanding for candidate in candidates]
        if not demand.session:
            return Choice(least(loads, candidates, rng).peer)
        bound = _FACTOR * (sum(loads) + demand.tokens) / len(candidates)
        roomy = [candidate for candidate in candidates if not loads_over(candidate, demand, bound)]
        return Choice(max(roomy or candidates, key=lambda candidate: _rank(demand.session, candidate.peer)).peer)


def loads_over(candidate: Candidate, demand: Demand, bound: float) -> bool:
    """Whether the leg would bring a worker that has something to do over the bound; an idle one takes any leg."""
    return candidate.outstanding > 0 and candidate.outstanding + demand.tokens > bound


def _rank(session: str, peer: Peer) -> bytes:
    """By name: a worker that restarts keeps its sessions."""
    return hashlib.blake2b(f"{session}\0{peer.worker_id}".encode(), digest_size=8).digest()
