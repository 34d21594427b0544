"""The short way of tokens that merely continue an answer, nearly all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ..proto import worker_pb2 as pb
from .ledger import Ledger
from .life_messages import Peer
from .metrics import Metrics
from .output import ChoiceText
from .requests import Chunk
from .story import Story

if TYPE_CHECKING:
    from .live import Live


class Audience(Protocol):
    """Who takes tokens of which more is asked than their text, and what goes wrong with the others."""

    metrics: Metrics

    def emitted(self, live: Live, tokens: Sequence[pb.Token]) -> None:
        """Tokens for the client, each once and in order."""
        ...

    def textless(self, live: Live) -> None:
        """No text could be made of tokens, for the exception that is being handled."""
        ...


class Flow:
    """A leg that is being decoded, while nothing is heard of its request but next tokens.

    Whatever else happens to the request ends the flow first (lives.py). So nothing of its life is looked at here, and
    what a token changes is kept here until `settle`: what a token costs is the memory that it touches.
    """

    __slots__ = (
        *("_attempt", "_audience", "_choice", "_gaps", "_given", "_ids", "_last", "_ledgers", "_live", "_mailbox"),
        *("_peer", "_story", "_times", "_together"),
    )

    def __init__(
        self,
        live: Live,
        attempt: int,
        peer: Peer,
        ledgers: Mapping[int, Ledger],
        story: Story,
        audience: Audience,
    ) -> None:
        """ledgers: by choice, of those that go on."""
        self._live, self._attempt, self._peer, self._ledgers = live, attempt, peer, ledgers
        self._story, self._audience, self._gaps, self._mailbox = story, audience, audience.metrics.gaps, live.mailbox
        self._choice = live.output.plain
        self._ids = ledgers[0].token_ids if self._choice else []
        self._given = len(self._ids)  # of them, those that are text
        self._together = live.request.stream_interval
        self._last = live.record.last_at
        self._times = 0

    def take(self, peer: Peer, step: pb.StepToken, now: float) -> bool:
        """Takes the usual token, the next one of its choice, which ends nothing. False: nothing was done."""
        token = step.token
        ledger = self._ledgers.get(token.choice)
        if ledger is None or step.attempt != self._attempt or peer != self._peer or not ledger.goes_on(token):
            return False
        self._times += 1
        if self._choice is None:
            self._last = now
            self._audience.emitted(self._live, (token,))
        elif len(self._ids) - self._given >= self._together:
            self._hand_on(self._choice, now)
        return True

    def settle(self, now: float) -> None:
        """Gives on what was taken, and brings what others know of the request up to date."""
        if self._choice is not None:
            if len(self._ids) > self._given:
                self._hand_on(self._choice, now)
            self._live.record.went_on(self._last)
        self.tell()

    def tell(self) -> None:
        """Adds to the request's story what it does not have yet."""
        if self._times:
            self._story.went_on(self._last, self._attempt, self._peer, self._times)
            self._times = 0

    def _hand_on(self, choice: ChoiceText, now: float) -> None:
        given, fresh = self._given, self._ids[self._given :]
        self._given += len(fresh)
        try:
            text = choice.text(fresh)
        except Exception:
            self._audience.textless(self._live)
            return
        self._gaps.observe((now - self._last) / len(fresh), len(fresh))
        self._last = now
        self._mailbox.put(Chunk(0, given, fresh, text, []))
