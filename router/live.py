"""One accepted request, with its life, text and measurements, and the answer as the frontends see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, Cancelled
from ..text.tokenizer import Tokenizer
from .mailbox import Mailbox
from .output import RequestOutput
from .record import Record
from .request_life import RequestLife
from .requests import Output, Prepared


class Live:
    """One accepted request."""

    def __init__(self, request_id: str, request: Prepared, now: float, attempts: int, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.request_id = request_id
        self.request = request
        self.life = RequestLife(len(request.prompt_ids), sampling.n, sampling.max_tokens, attempts)
        self.output = RequestOutput(tokenizer, request)
        self.record = Record(now, len(request.prompt_ids), sampling.n)
        self.mailbox = Mailbox(request.stream_interval)
        self.sampling = sampling.to_wire()
        self.deadline = now + request.deadline_s
        self.timer: asyncio.TimerHandle | None = None

    @property
    def phase(self) -> str:
        """Where its legs are, "mixed" when they differ."""
        states = {leg.state.value for leg in self.life.legs.values()}
        return states.pop() if len(states) == 1 else "mixed"

    def recomputed(self, first: pb.FirstTokens) -> int:
        """Tokens that a prefill has just computed although the request had been prefilled before."""
        leg = self.life.legs.get(first.leg.attempt)
        if leg is None or leg.resent or self.record.prefill_cached is None:
            return 0
        return max(0, len(self.request.prompt_ids) + len(leg.generated) - first.cached_tokens - first.fetched_tokens)


class Answer:
    """What the frontends read. Leave it with `cancel` when the client goes away before the end."""

    def __init__(self, live: Live, give_up: Callable[[Live, BatonError], None]) -> None:
        self._live = live
        self._give_up = give_up
        self.request_id = live.request_id
        self.prompt_tokens = len(live.request.prompt_ids)

    def outputs(self) -> AsyncIterator[list[Output]]:
        """The answer in order; raises the BatonError that ended it. To be read once."""
        return self._live.mailbox.read()

    def cancel(self) -> None:
        """Ends the request on every worker; nothing happens when it is over."""
        self._give_up(self._live, Cancelled("the client left"))
