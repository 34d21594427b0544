"""The service vllm.grpc.engine.VllmEngine of one worker."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from typing import Any, NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer

from ..proto import worker_pb2 as pb
from ..proto.errors import BatonError, Cancelled, Unavailable
from ..router.bounds import check_ids_count
from ..router.front_door import FrontDoor
from ..router.grpc_errors import Context, abort
from ..router.life_messages import Peer
from ..router.live import Answer
from ..router.requests import ChoiceEnd, Chunk
from ..text.source import ModelSource
from . import facts, handoff
from .messages import Answers, client_request
from .params import VllmParams

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20  # of the tokenizer's archive


class VllmEngine(VllmEngineServicer):  # type: ignore[misc]
    """Serves through a router of its own, whose view of this worker's pool is this worker alone."""

    def __init__(self, params: VllmParams, door: FrontDoor, source: ModelSource) -> None:
        self._params = params
        self._door = door
        self._source = source
        self._me = Peer(params.worker_id, params.incarnation)
        self._running: dict[str, list[Answer]] = {}  # by the gateway's id, which need not be unique
        self._started = time.monotonic()
        self._rate = _Rate(self._started)
        self._archive: bytes | None = None

    # ---- generation --------------------------------------------------------------------------------------------------

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        """One request, or the prefill half of one; a failure ends the stream with a status."""
        try:
            prefill_only, holder = handoff.read(request.kv_transfer_params_json)
            self._door.bounded(
                lambda limits, room: check_ids_count("tokenized", len(request.tokenized.input_ids), room)
            )
            asked = client_request(request, context.time_remaining(), prefill_only=prefill_only)
            answer = self._door.submit(await self._door.prepare(asked, prefer=holder))
        except BatonError as error:
            await abort(context, error)
        ticket = handoff.write(self._me, answer.prompt_tokens) if prefill_only else ""
        answers = Answers(request, answer.prompt_tokens, asked.n or 1, ticket)
        self._running.setdefault(request.request_id, []).append(answer)
        try:
            await self._relay(answer, answers, context)
        except Cancelled:  # by Abort: a cancel of the call itself raises CancelledError
            for message in answers.aborted():
                await context.write(message)
        except BatonError as error:
            await abort(context, error, answer.request_id)
        finally:
            answer.cancel()
            self._forget(request.request_id, answer)

    async def _relay(self, answer: Answer, answers: Answers, context: Context) -> None:
        scored = answer.scored
        async for outputs in answer.outputs():
            if scored:
                scored = False
                answers.prompt(answer.prompt_ids, await answer.prompt_scores())
            for output in outputs:
                if isinstance(output, Chunk):
                    self._rate.add(len(output.token_ids), time.monotonic())
                message = answers.end(output) if isinstance(output, ChoiceEnd) else answers.chunk(output)
                if message is not None:
                    await context.write(message)

    def _forget(self, name: str, answer: Answer) -> None:
        left = [other for other in self._running.get(name, ()) if other is not answer]
        if left:
            self._running[name] = left
        else:
            self._running.pop(name, None)

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        """Ends the named streams; ids that are not known, or over, are fine."""
        for name in request.request_ids:
            for answer in self._running.get(name, ()):
                answer.cancel()
        return vllm.AbortResponse()

    # ---- what it says of itself --------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether the cluster lists this worker as ready; the other pool's state is not this worker's."""
        ready = self._door.core.sessions.ready(self._params.role)
        return any(session.member.peer == self._me for session in ready)

    def _reported(self) -> tuple[pb.Welcome, pb.Load]:
        """What the worker last said of itself. Raises Unavailable."""
        session = self._door.core.sessions.get(self._me)
        if session is None or session.welcome is None:
            raise Unavailable("starting: the worker is not ready yet", retry_after_s=1.0)
        return session.welcome, session.load

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        """What gateways poll."""
        ready = self.ready()
        return vllm.HealthCheckResponse(healthy=ready, message="ok" if ready else "not ready")

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        """The model."""
        try:
            known = self._door.core.facts()
        except BatonError as error:
            await abort(context, error)
        tokenizer, name = self._door.text.tokenizer, self._door.params.served_name
        return facts.model_info(self._source, tokenizer, name, known.context, known.vocab_size)

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        """The worker and its hand-off dialect."""
        try:
            welcome, _ = self._reported()
        except BatonError as error:
            await abort(context, error)
        active = sum(len(answers) for answers in self._running.values())
        return facts.server_info(self._params, welcome, active, self._started)

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        """The worker's load, whoever caused it."""
        try:
            welcome, load = self._reported()
        except BatonError as error:
            await abort(context, error)
        return facts.load(self._params, welcome, load, self._rate.per_s(time.monotonic()))

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: Context) -> None:
        """The tokenizer's files as a zip in pieces, so that a gateway needs no model hub."""
        if self._archive is None:
            tokenizer = self._door.text.tokenizer
            size = tokenizer.vocab_size
            self._archive = await asyncio.to_thread(facts.tokenizer_archive, self._source, tokenizer, size)
        data = self._archive
        digest = hashlib.sha256(data).hexdigest()
        for start in range(0, len(data), _CHUNK_BYTES):
            last = start + _CHUNK_BYTES >= len(data)
            piece = common_pb2.GetTokenizerChunk(data=data[start : start + _CHUNK_BYTES], sha256=digest if last else "")
            await context.write(piece)

    # ---- what it does not do -----------------------------------------------------------------------------------------

    async def Embed(self, request: Any, context: Context) -> Any:
        """Not served."""
        await _unimplemented(context, "embeddings are not served")

    async def FlushCache(self, request: Any, context: Context) -> Any:
        """Not served."""
        await _unimplemented(context, "the prefix cache is not flushed on demand")

    async def StartProfile(self, request: Any, context: Context) -> Any:
        """Not served."""
        await _unimplemented(context, "there is no profiler")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        """Not served."""
        await _unimplemented(context, "there is no profiler")

    async def SubscribeKvEvents(self, request: Any, context: Context) -> Any:
        """Not served: gateways then go by what they have sent themselves."""
        await _unimplemented(context, "block events go to baton's own routers only")


async def _unimplemented(context: Context, message: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)


class _Rate:
    """Tokens per second over the last seconds."""

    _WINDOW_S = 5.0

    def __init__(self, now: float) -> None:
        self._since, self._tokens, self._last = now, 0, 0.0

    def add(self, tokens: int, now: float) -> None:
        self._roll(now)
        self._tokens += tokens

    def per_s(self, now: float) -> float:
        self._roll(now)
        return self._last or self._tokens / self._WINDOW_S

    def _roll(self, now: float) -> None:
        elapsed = now - self._since
        if elapsed >= self._WINDOW_S:
            self._last, self._since, self._tokens = self._tokens / elapsed, now, 0
