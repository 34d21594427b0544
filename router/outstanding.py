"""What this router has placed on each worker and is not over there, by leg; what a decode worker has room for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from .life_messages import LegKey, Peer


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


class Work(NamedTuple):
    """What a leg is to a worker. At prefill: tokens to compute, and the part of its attention (end^2 - start^2).
    At decode: tokens of KV that it may come to hold, and its sequences."""

    tokens: int
    squares: int = 0
    sequences: int = 0


class Outstanding:
    """Work outstanding per worker, counted by leg: a leg is added once and removed once, so no sum goes negative."""

    def __init__(self) -> None:
        self._peers: dict[LegId, Peer] = {}
        self._works: dict[Peer, dict[LegId, Work]] = {}
        self._tokens: dict[Peer, int] = {}

    def add(self, leg: LegId, peer: Peer, work: Work) -> None:
        """Counts the leg against `peer`; whatever it counted for before is removed."""
        self.remove(leg)
        self._peers[leg] = peer
        self._works.setdefault(peer, {})[leg] = work
        self._tokens[peer] = self._tokens.get(peer, 0) + work.tokens

    def remove(self, leg: LegId) -> None:
        """Counts the leg no longer; nothing happens when it is not counted."""
        peer = self._peers.pop(leg, None)
        if peer is not None:
            self._tokens[peer] -= self._works[peer].pop(leg).tokens
            if not self._works[peer]:
                del self._works[peer], self._tokens[peer]

    def tokens(self, peer: Peer) -> int:
        """Tokens outstanding at `peer`."""
        return self._tokens.get(peer, 0)

    def all_tokens(self, peers: Iterable[Peer]) -> list[int]:
        """Tokens outstanding at each of them."""
        get = self._tokens.get
        return [get(peer, 0) for peer in peers]

    def works(self, peer: Peer) -> Collection[Work]:
        """Of each leg at `peer`."""
        return self._works.get(peer, {}).values()
