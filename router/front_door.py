"""What both frontends do with a request before it is accepted: bounds, text to ids, parameters; and readiness."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

from ..proto.errors import BatonError, DeadlineExceeded
from . import tenants
from .core import Core
from .life_messages import Peer
from .live import Answer
from .params import RequestLimits, RouterParams
from .requests import ClientRequest, Prepared
from .text_service import TextService
from .validate import check_ids, check_parameters, check_size, prepare


class FrontDoor:
    """Shared by the gRPC and the HTTP frontend."""

    def __init__(self, params: RouterParams, core: Core, text: TextService, rng: random.Random) -> None:
        self.params = params
        self.core = core
        self.text = text
        self._rng = rng

    async def generate(self, request: ClientRequest) -> Answer:
        """Validates and takes a request. Raises InvalidRequest, Exhausted, Unavailable."""
        return self.submit(await self.prepare(request))

    def bounded(self, check: Callable[[RequestLimits, int], None]) -> None:
        """Runs a check of bounds.py, and counts its refusal. Raises InvalidRequest, Unavailable."""
        try:
            check(self.params.limits, self.core.facts().context)
        except BatonError as error:
            self.refused(error)
            raise

    async def prepare(self, request: ClientRequest, prefer: Peer | None = None) -> Prepared:
        """The request as token ids with every parameter resolved; `prefer`: the prefill worker that has it, when one
        is known. Raises InvalidRequest, Exhausted, Unavailable."""
        try:
            return await self._prepare(request, prefer)
        except BatonError as error:
            self.refused(error)
            raise

    def submit(self, request: Prepared) -> Answer:
        """Takes a prepared request. Raises Exhausted, Unavailable."""
        try:
            return self.core.submit(request)
        except BatonError as error:
            self.refused(error)
            raise

    def refused(self, error: BatonError) -> None:
        """Counts a request that was not taken."""
        self.core.metrics.rejections.inc(error.code)

    async def tokenize(self, request: ClientRequest) -> list[int]:
        """The ids of a prompt or a chat, whatever their number. Raises InvalidRequest, Exhausted, Unavailable."""
        check_size(request, self.params.limits, self.core.facts().context)
        return await self._ids(request)

    async def detokenize(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of `ids`. Raises InvalidRequest, Exhausted, Unavailable."""
        check_ids("token_ids", ids, self.core.facts())
        return await self.text.decode(ids, skip_special=skip_special)

    async def _ids(self, request: ClientRequest) -> list[int]:
        if request.token_ids is not None:
            return list(request.token_ids)
        if request.prompt is not None:
            return await self.text.encode(request.prompt, request.bos)
        return await self.text.render(request.messages or (), request.tools)

    async def _prepare(self, request: ClientRequest, prefer: Peer | None) -> Prepared:
        begun, limits, facts = time.monotonic(), self.params.limits, self.core.facts()
        check_size(request, limits, facts.context)
        check_parameters(request, limits)
        wanted = request.constraint
        grammar = await self.text.compile(wanted, limits.grammar_bytes) if wanted else ""
        ids = await self._ids(request)
        deadline_s = self.params.request_deadline_s
        if request.deadline_s is not None:
            deadline_s = min(deadline_s, request.deadline_s - (time.monotonic() - begun))
            if deadline_s <= 0:
                raise DeadlineExceeded(f"the deadline of {request.deadline_s:.3g} s passed before the request began")
        seed = self._rng.getrandbits(63)
        eos = self.text.tokenizer.eos_token_ids
        prepared = prepare(
            request,
            ids,
            limits,
            facts,
            eos,
            grammar=grammar,
            seed=seed,
            deadline_s=deadline_s,
            stream_interval=self.params.stream_interval,
            tenant=tenants.current.get(),
            prefer=prefer,
        )
        return dataclasses.replace(prepared, shown_ids=self.text.tool_marks) if request.tools else prepared
