"""One accepted request: its life, its answer, its measurements."""

from __future__ import annotations

import asyncio

from ..text.tokenizer import Tokenizer
from .life_messages import LegKey
from .mailbox import Mailbox
from .output import RequestOutput
from .record import Record
from .request_life import RequestLife
from .requests import Prepared


class Live:
    """One accepted request."""

    def __init__(self, request_id: str, request: Prepared, now: float, attempts: int, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.request_id = request_id
        self.request = request
        self.life = RequestLife(len(request.prompt_ids), sampling.n, sampling.max_tokens, attempts)
        self.output = RequestOutput(tokenizer, request)
        self.record = Record(now, len(request.prompt_ids), sampling.n)
        self.mailbox = Mailbox()
        self.sampling = sampling.to_wire()
        self.deadline = now + request.deadline_s
        self.queued_at: dict[LegKey, float] = {}
        self.timer: asyncio.TimerHandle | None = None
