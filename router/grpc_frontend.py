"""The public gRPC service baton.v1, with the standard health and reflection services beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..proto import baton_pb2 as api
from ..proto.baton_pb2_grpc import BatonServicer, add_BatonServicer_to_server
from ..proto.errors import BatonError
from .bounds import check_message
from .channels import server_options
from .core import Core
from .errors import AddressTaken
from .front_door import FrontDoor
from .requests import ChoiceEnd, Chunk, ClientRequest, Output, Timing, Usage

_SERVICE = "baton.v1.Baton"
_HEALTH_POLL_S = 0.1
_STOP_S = 1.0
_Context = grpc.aio.ServicerContext[Any, Any]


class GrpcFrontend:
    """Serves from `start` to `stop`; make it with `bind`."""

    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self._server = server
        self.address = address
        self._health = health.aio.HealthServicer()

    @staticmethod
    async def bind(address: str, body_bytes: int) -> GrpcFrontend:
        """Takes the port. Raises AddressTaken."""
        server = grpc.aio.server(options=server_options(body_bytes))
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            await server.stop(None)
            raise AddressTaken(f"router.grpc: cannot listen on {address}: {error}") from error
        return GrpcFrontend(server, f"{address.rsplit(':', 1)[0]}:{port}")

    async def start(self, door: FrontDoor) -> None:
        """Begins to serve."""
        add_BatonServicer_to_server(_Service(door), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._set_health(False)
        await self._server.start()

    async def follow_health(self, core: Core) -> None:
        """Keeps the health service in step with readiness, for ever."""
        known = False
        while True:
            ready = not core.not_ready()
            if ready != known:
                known = ready
                await self._set_health(ready)
            await asyncio.sleep(_HEALTH_POLL_S)

    async def _set_health(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", _SERVICE):
            await self._health.set(name, status)

    async def stop(self) -> None:
        """Closes the port; answers that are over may still leave, the rest is cut."""
        await self._server.stop(_STOP_S)


class _Service(BatonServicer):
    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    async def Generate(self, request: api.GenerateRequest, context: _Context) -> None:
        """See baton.proto. Writes by itself, so that a cancel always ends in the `finally` below."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        try:
            self._door.bounded(lambda limits, room: check_message(request, limits, room))
            answer = await self._door.generate(client_request(request, metadata, context.time_remaining()))
        except BatonError as error:
            await _abort(context, error, "")
        try:
            await context.send_initial_metadata((("x-request-id", answer.request_id),))
            accepted = api.Accepted(request_id=answer.request_id, prompt_tokens=answer.prompt_tokens)
            await context.write(api.GenerateResponse(accepted=accepted))
            async for outputs in answer.outputs():
                for output in outputs:
                    await context.write(response(output))
        except BatonError as error:
            await _abort(context, error, answer.request_id)
        finally:
            answer.cancel()

    async def ListModels(self, request: api.ListModelsRequest, context: _Context) -> api.ListModelsResponse:
        """The one model that is served here."""
        try:
            facts = self._door.core.facts()
        except BatonError as error:
            await _abort(context, error, "")
        name = self._door.params.served_name
        return api.ListModelsResponse(models=[api.Model(name=name, max_model_len=facts.context)])


async def _abort(context: _Context, error: BatonError, request_id: str) -> NoReturn:
    """Ends the call with the error's status; trailers carry its code, field, request id and retry hint."""
    trailers = [("baton-code", error.code)]
    if error.field:
        trailers.append(("baton-field", error.field))
    if request_id:
        trailers.append(("x-request-id", request_id))
    if error.retry_after_s > 0:
        trailers.append(("grpc-retry-pushback-ms", str(int(1000 * error.retry_after_s))))
    await context.abort(error.grpc_status, error.message, tuple(trailers))


def client_request(request: api.GenerateRequest, metadata: dict[str, str], left_s: float | None) -> ClientRequest:
    """The protocol-neutral form of a Generate call; left_s: until the call's own deadline."""
    kind = request.WhichOneof("input")

    def given(name: str) -> Any:
        return getattr(request, name) if request.HasField(name) else None

    messages = [{"role": message.role, "content": message.content} for message in request.messages.messages]
    return ClientRequest(
        prompt=request.prompt if kind == "prompt" else None,
        token_ids=list(request.token_ids.ids) if kind == "token_ids" else None,
        messages=messages if kind == "messages" else None,
        input_field=kind or "prompt",
        label=request.request_id or metadata.get("x-request-id", ""),
        temperature=given("temperature"),
        top_k=given("top_k"),
        top_p=given("top_p"),
        min_p=given("min_p"),
        repetition_penalty=given("repetition_penalty"),
        presence_penalty=given("presence_penalty"),
        frequency_penalty=given("frequency_penalty"),
        logit_bias=dict(request.logit_bias),
        seed=given("seed"),
        n=given("n"),
        max_tokens=given("max_tokens"),
        min_tokens=given("min_tokens"),
        stop=list(request.stop),
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        include_stop=request.include_stop,
        logprobs=given("logprobs"),
        cache_salt=request.cache_salt,
        session=request.session_id,
        priority=given("priority"),
        deadline_s=left_s,
    )


def response(output: Output) -> api.GenerateResponse:
    """One message of the stream."""
    if isinstance(output, Chunk):
        scores = [
            api.TokenLogprobs(logprob=s.logprob, top=[api.TopLogprob(token_id=i, logprob=p) for i, p in _pairs(s.top)])
            for s in output.scores
        ]
        return api.GenerateResponse(
            tokens=api.TokenChunk(
                choice=output.choice,
                offset=output.offset,
                token_ids=output.token_ids,
                text=output.text,
                logprobs=scores,
            )
        )
    return api.GenerateResponse(finished=_finished(output))


def _pairs(top: Sequence[Any]) -> list[tuple[int, float]]:
    return [(alternative.token_id, alternative.logprob) for alternative in top]


def _finished(end: ChoiceEnd) -> api.Finished:
    return api.Finished(
        choice=end.choice,
        reason=end.reason,
        usage=_usage(end.usage) if end.usage else None,
        timing=_timing(end.timing) if end.timing else None,
        matched_stop=end.matched_stop,
    )


def _usage(usage: Usage) -> api.Usage:
    return api.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _timing(timing: Timing) -> api.Timing:
    return api.Timing(**{name: getattr(timing, name) for name in Timing.__slots__})
