"""One accepted request, with its life, text and measurements, and the answer as the frontends see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, Cancelled, Unavailable
from ..text.tokenizer import Tokenizer
from .mailbox import Mailbox
from .output import RequestOutput
from .record import Record
from .request_life import RequestLife
from .requests import Chunk, Output, Prepared, TokenScore, TopToken
from .trace_context import parent, traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import Span

SCORES_S = 5.0  # for the scores of a prompt, which may come behind its answer


class Live:
    """One accepted request."""

    def __init__(self, request_id: str, request: Prepared, now: float, attempts: int, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.request_id = request_id
        self.request = request
        self.life = RequestLife(len(request.prompt_ids), sampling.n, sampling.max_tokens, attempts, request.prefer)
        self.output = RequestOutput(tokenizer, request)
        self.record = Record(now, len(request.prompt_ids), sampling.n)
        self.mailbox = Mailbox(request.stream_interval)
        self.sampling = sampling.to_wire()
        self.traceparent = parent.get()
        self.span: Span | None = None  # where requests are traced
        self.deadline = now + request.deadline_s
        self.scores: dict[int, TokenScore] = {}  # of the prompt's tokens, by position
        self.all_scored = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None

    @property
    def phase(self) -> str:
        """Where its legs are, "mixed" when they differ."""
        states = {leg.state.value for leg in self.life.legs.values()}
        return states.pop() if len(states) == 1 else "mixed"

    def scored(self, news: pb.PromptScores) -> None:
        """Takes in what the model thinks of a part of the prompt; attempts that begin anew say the same again."""
        for position, score in enumerate(news.scores, start=news.start):
            top = tuple(TopToken(t.token_id, t.logprob) for t in score.top)
            self.scores[position] = TokenScore(score.logprob, top)
        if len(self.scores) >= len(self.request.prompt_ids) - 1:
            self.all_scored.set()

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
        self.prompt_ids = live.request.prompt_ids
        self.prompt_tokens = len(self.prompt_ids)
        self.scored = live.request.sampling.prompt_logprobs is not None  # whether prompt_scores were asked for

    @property
    def headers(self) -> dict[str, str]:
        """What is said beside the answer: its id and, where requests are traced, its span."""
        named, span = {"x-request-id": self.request_id}, self._live.span
        return named if span is None else {**named, "traceparent": traceparent(span)}

    def outputs(self) -> AsyncIterator[list[Output]]:
        """The answer in order; raises the BatonError that ended it. To be read once."""
        return self._live.mailbox.read()

    def shortcut(self, take: Callable[[Chunk], bool]) -> None:
        """While the reader of `outputs` waits, `take` may have each chunk at once; where it returns False, and for all
        else, the reader is woken."""
        self._live.mailbox.shortcut = take

    async def prompt_scores(self) -> list[TokenScore | None]:
        """One for each token of the prompt, the first aside, where they were asked for.

        They are there with the first output, or soon: the decode worker may be heard before the prefill worker. Raises
        Unavailable when they do not come, because the worker that had them was lost.
        """
        if self.prompt_tokens > 1:
            try:
                await asyncio.wait_for(self._live.all_scored.wait(), SCORES_S)
            except TimeoutError:
                raise Unavailable("the prompt's logprobs were lost with a worker", retry_after_s=0.1) from None
        return [self._live.scores.get(position) for position in range(self.prompt_tokens)]

    def cancel(self) -> None:
        """Ends the request on every worker; nothing happens when it is over."""
        self._give_up(self._live, Cancelled("the client left"))
