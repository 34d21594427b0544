"""Which worker takes a leg: pure choices among the ready ones, and the load that they are weighed by."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from .life_messages import LegKey, Peer


class Candidate(NamedTuple):
    """A ready worker and the tokens outstanding there: of prompts to compute, or of sequences to hold."""

    peer: Peer
    outstanding: int


class Policy(Protocol):
    """Picks one of at least one candidates; draws only from `rng`."""

    def choose(self, candidates: Sequence[Candidate], rng: random.Random) -> Peer: ...


class RoundRobin:
    """Each worker in turn, by name; one that comes or goes does not disturb the others' order."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[Candidate], rng: random.Random) -> Peer:
        """The first worker after the one chosen last."""
        ordered = sorted(candidate.peer for candidate in candidates)
        peer = next((peer for peer in ordered if peer.worker_id > self._last), ordered[0])
        self._last = peer.worker_id
        return peer


class LeastLoaded:
    """The fewest outstanding tokens; ties at random, so that idle workers share evenly."""

    def choose(self, candidates: Sequence[Candidate], rng: random.Random) -> Peer:
        """One of the least loaded."""
        least = min(candidate.outstanding for candidate in candidates)
        return rng.choice([candidate.peer for candidate in candidates if candidate.outstanding == least])


POLICIES: dict[str, Callable[[], Policy]] = {"round_robin": RoundRobin, "least_loaded": LeastLoaded}


def pick(
    policy: Policy,
    candidates: Sequence[Candidate],
    rng: random.Random,
    *,
    prefer: Peer | None,
    avoid: Collection[Peer],
    may_use_avoided: bool,
) -> Peer | None:
    """The worker for a leg: `prefer` when it is ready, else the policy's choice; None when there is none."""
    if prefer is not None and prefer not in avoid and any(candidate.peer == prefer for candidate in candidates):
        return prefer
    fresh = [candidate for candidate in candidates if candidate.peer not in avoid]
    usable = fresh if fresh or not may_use_avoided else candidates
    return policy.choose(usable, rng) if usable else None


class Room(NamedTuple):
    """What a decode worker could take in: tokens of KV, in whole free blocks, and sequences."""

    tokens: int
    seats: int

    def fits(self, tokens: int) -> bool:
        """Whether one more sequence of so many tokens has room."""
        return self.seats > 0 and tokens <= self.tokens

    def less(self, tokens: int) -> Room:
        """What is left beside such a sequence."""
        return Room(self.tokens - tokens, self.seats - 1)


class LegId(NamedTuple):
    """A leg among all requests of this router."""

    request_id: str
    leg: LegKey


class Outstanding:
    """Tokens outstanding per worker, counted by leg: a leg is added once and removed once, so no sum goes negative."""

    def __init__(self) -> None:
        self._peers: dict[LegId, Peer] = {}
        self._tokens: dict[Peer, dict[LegId, int]] = {}
        self._sums: dict[Peer, int] = {}

    def add(self, leg: LegId, peer: Peer, tokens: int) -> None:
        """Counts the leg against `peer`; whatever it counted for before is removed."""
        self.remove(leg)
        self._peers[leg] = peer
        self._tokens.setdefault(peer, {})[leg] = tokens
        self._sums[peer] = self._sums.get(peer, 0) + tokens

    def remove(self, leg: LegId) -> None:
        """Counts the leg no longer; nothing happens when it is not counted."""
        peer = self._peers.pop(leg, None)
        if peer is not None:
            self._sums[peer] -= self._tokens[peer].pop(leg)
            if not self._tokens[peer]:
                del self._tokens[peer], self._sums[peer]

    def of(self, peer: Peer) -> int:
        """Tokens outstanding at `peer`."""
        return self._sums.get(peer, 0)
