"""A typed asyncio client of the public gRPC API, used by the commands."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..proto import baton_pb2 as api
from ..proto.baton_pb2_grpc import BatonStub
from ..proto.errors import CODES, BatonError, InternalError, InvalidRequest, Unavailable, from_wire

_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)]
_TOO_LARGE = "message larger than max"


@dataclass
class Choice:
    """One answer, whole."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[api.TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    matched_stop: str = ""


@dataclass
class Completion:
    """One request, whole. Times are of this process's monotonic clock."""

    started_s: float
    choices: list[Choice]
    request_id: str = ""
    prompt_tokens: int = 0
    usage: api.Usage | None = None
    timing: api.Timing | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens) of each message that had tokens
    ended_s: float = 0.0

    def take(self, event: api.GenerateResponse, now: float) -> None:
        """Add one message of the stream."""
        kind = event.WhichOneof("event")
        self.ended_s = now
        if kind == "accepted":
            self.request_id, self.prompt_tokens = event.accepted.request_id, event.accepted.prompt_tokens
        elif kind == "tokens":
            choice = self._choice(event.tokens.choice)
            choice.token_ids += event.tokens.token_ids
            choice.text += event.tokens.text
            choice.logprobs += event.tokens.logprobs
            if event.tokens.token_ids:
                self.arrivals.append((now, len(event.tokens.token_ids)))
        elif kind == "finished":
            choice = self._choice(event.finished.choice)
            choice.finish_reason, choice.matched_stop = event.finished.reason, event.finished.matched_stop
            if event.finished.HasField("usage"):
                self.usage = event.finished.usage
            if event.finished.HasField("timing"):
                self.timing = event.finished.timing

    def _choice(self, index: int) -> Choice:
        while len(self.choices) <= index:
            self.choices.append(Choice())
        return self.choices[index]


class Client:
    """One channel to a router."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = BatonStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def wait_serving(self, timeout_s: float) -> None:
        """Return when the service is ready. Raises Unavailable."""
        request = health_pb2.HealthCheckRequest(service="")
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        call = stub.Watch(request, timeout=timeout_s, wait_for_ready=True)
        try:
            async for answer in call:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{self.address}: {error.details()}") from None
        finally:
            call.cancel()
        raise Unavailable(f"{self.address}: the router went away before it was ready")

    async def models(self) -> list[api.Model]:
        """What is served. Raises BatonError."""
        try:
            answer = await self._stub.ListModels(api.ListModelsRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            raise as_error(error, self.address) from None
        return list(answer.models)

    async def stream(
        self, request: api.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncIterator[api.GenerateResponse]:
        """The messages of one request; leaving early cancels it. Raises BatonError."""
        call: Any = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise as_error(error, self.address) from None
        finally:
            call.cancel()

    async def complete(self, request: api.GenerateRequest, timeout_s: float | None = None) -> Completion:
        """One request, whole. Raises BatonError."""
        completion = Completion(time.monotonic(), [])
        async for message in self.stream(request, timeout_s):
            completion.take(message, time.monotonic())
        return completion


def as_error(error: Any, address: str) -> BatonError:
    """The error that the server meant by a failed call, asyncio's or not; a connection that failed is Unavailable and
    names the address, a message that gRPC itself found too large is not to be tried again."""
    trailers = {key: str(value) for key, value in (error.trailing_metadata() or ())}
    message = error.details() or error.code().name
    code = trailers.get("baton-code", "")
    if code:
        pushback = trailers.get("grpc-retry-pushback-ms", "0")
        return from_wire(code, message, trailers.get("baton-field", ""), int(pushback) / 1000)
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(f"{address} is not the gRPC port of a router (router.grpc): {message}")
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return Unavailable(f"{address}: {message}")
    if _TOO_LARGE in message:  # gRPC's own refusal, which trying again does not change
        if message.startswith("CLIENT"):
            return InternalError(f"a message of the answer is too large for this client ({message})")
        return InvalidRequest(f"the request is larger than {address} takes ({message})")
    for kind in CODES.values():
        if kind.grpc_status == error.code():
            return kind(message)
    return InternalError(message)
