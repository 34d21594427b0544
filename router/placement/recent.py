"""Tokens placed of late on each worker, so that caches fill evenly where queues alone would not tell workers apart.

On an idle cluster every prompt that shares a prefix with others, if only a system prompt, would go to the first worker
that has it, whose cache would then hold one conversation at the expense of another while its peers' stay empty.
"""

from __future__ import annotations

from ..life_messages import Peer

_FADE = 0.99  # of what was placed before, with each leg
_WEIGHT = 1 / 16  # of a token placed of late, beside one to compute now


class Recent:
    """Fading sums by worker; a worker that is gone fades away."""

    def __init__(self) -> None:
        self._tokens: dict[Peer, float] = {}

    def cost(self, peer: Peer) -> float:
        """In tokens to compute now."""
        return _WEIGHT * self._tokens.get(peer, 0.0)

    def placed(self, peer: Peer, tokens: int) -> None:
        """So many new tokens went to that worker."""
        faded = {known: _FADE * count for known, count in self._tokens.items() if count > 1}
        self._tokens = {**faded, peer: faded.get(peer, 0.0) + tokens}
