"""The short way of tokens that merely continue an answer, nearly all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ..proto import worker_pb2 as pb
from .ledger import Ledger
from .life_messages import Peer
from .requests import Chunk
from .story import Story

if TYPE_CHECKING:
    from .live import Live


class Audience(Protocol):
    """Who takes what comes out."""

    def emitted(self, live: Live, tokens: Sequence[pb.Token]) -> None:
        """Tokens that may be more than their text."""
        ...

    def handed_on(self, live: Live, chunk: Chunk, now: float) -> None:
        """A part of the answer."""
        ...

    def textless(self, live: Live) -> None:
        """No text could be made of tokens, for the exception that is being handled."""
        ...


class Flow:
    """A leg that is being decoded, for as long as nothing is heard of its request but the next tokens.

    Whatever else happens to the request ends the flow first (lives.py): so nothing of its life is looked at here.
    """

    __slots__ = ("_attempt", "_audience", "_fresh", "_ledgers", "_live", "_peer", "_plain", "_story", "_together")

    def __init__(
        self, live: Live, attempt: int, peer: Peer, ledgers: Mapping[int, Ledger], story: Story, audience: Audience
    ) -> None:
        """ledgers: by choice, of those that go on."""
        self._live, self._attempt, self._peer, self._ledgers = live, attempt, peer, ledgers
        self._story, self._audience = story, audience
        self._plain = live.output.plain
        self._together = live.request.stream_interval
        self._fresh: list[int] = []  # taken, and not yet text

    def take(self, peer: Peer, step: pb.StepToken, now: float) -> bool:
        """Takes the usual token, the next one of its choice, which ends nothing. False: nothing was done."""
        token = step.token
        ledger = self._ledgers.get(token.choice)
        if ledger is None or step.attempt != self._attempt or peer != self._peer or not ledger.goes_on(token):
            return False
        if self._plain:
            self._fresh.append(token.token_id)
            if len(self._fresh) >= self._together:
                self.hand_on(now)
        else:
            self._story.went_on(now, self._attempt, self._peer)
            self._audience.emitted(self._live, (token,))
        return True

    def hand_on(self, now: float) -> None:
        """Makes text of what was taken."""
        if not self._fresh:
            return
        live, fresh, self._fresh = self._live, self._fresh, []
        self._story.went_on(now, self._attempt, self._peer)
        try:
            chunk = live.output.go_on(fresh)
        except Exception:
            self._audience.textless(live)
        else:
            self._audience.handed_on(live, chunk, now)
