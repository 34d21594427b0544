"""A typed asyncio client of baton.v1: `from baton.client.api import Client, request`.

Calls go round all routers in turn. One that fails before its first token, because a router is busy, draining or gone,
is tried again; later the caller hears of it, since tokens that were said cannot be taken back.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..proto import baton_pb2 as api
from ..proto.errors import BatonError, Unavailable
from .completion import Completion
from .errors import as_error
from .retry import Retry
from .routers import Router, Routers

_SHORT_S = 10.0  # of calls that generate nothing


def request(
    prompt: str | None = None,
    *,
    token_ids: Iterable[int] | None = None,
    messages: Iterable[Mapping[str, str]] | None = None,
    **parameters: Any,
) -> api.GenerateRequest:
    """A GenerateRequest; messages are {"role", "content"}, `parameters` its other fields (one_of: texts). Raises
    ValueError."""
    if "one_of" in parameters:
        parameters["one_of"] = api.Choices(texts=parameters["one_of"])
    made = api.GenerateRequest(**parameters)
    if sum(given is not None for given in (prompt, token_ids, messages)) > 1:
        raise ValueError("give one of prompt, token_ids and messages")
    if prompt is not None:
        made.prompt = prompt
    elif token_ids is not None:
        made.token_ids.ids.extend(token_ids)
        made.token_ids.SetInParent()
    elif messages is not None:
        made.messages.messages.extend(_messages(messages))
        made.messages.SetInParent()
    return made


def _messages(messages: Iterable[Mapping[str, str]]) -> list[api.Message]:
    return [api.Message(role=message["role"], content=message["content"]) for message in messages]


class Client:
    """Make it inside the event loop, and close it there: `async with Client("127.0.0.1:50051") as client`.

    addresses: routers that serve the same model. credentials: of TLS; None: plain. metadata: sent with every call.
    Every method raises BatonError, and DeadlineExceeded after its `timeout_s`; leaving a stream cancels it.
    """

    def __init__(
        self,
        *addresses: str,
        retry: Retry | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._routers = Routers(addresses, credentials)
        self._retry = retry or Retry()
        self._metadata = tuple(metadata)
        self._rng = random.Random()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connections, and with them what still runs."""
        await self._routers.close()

    # ---- answers -----------------------------------------------------------------------------------------------------

    def stream(
        self, request: api.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncIterator[api.GenerateResponse]:
        """The messages of one request; an attempt that was accepted and then failed shows as `accepted` again."""
        return self._stream("Generate", request, timeout_s)

    def chat(
        self,
        messages: Iterable[Mapping[str, str]],
        parameters: api.GenerateRequest | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[api.GenerateResponse]:
        """The messages of one chat; messages are {"role", "content"}."""
        return self._stream("Chat", api.ChatRequest(messages=_messages(messages), parameters=parameters), timeout_s)

    async def complete(self, request: api.GenerateRequest, timeout_s: float | None = None) -> Completion:
        """One request, whole."""
        completion = Completion(time.monotonic(), [])
        async for message in self.stream(request, timeout_s):
            completion.take(message, time.monotonic())
        return completion

    def batch(
        self,
        requests: Iterable[api.GenerateRequest],
        *,
        parallelism: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[api.GenerateBatchResponse]:
        """The messages of many requests, as they come; `errors.of_failure` makes an exception of a failure."""
        return self._stream(
            "GenerateBatch", api.GenerateBatchRequest(requests=requests, parallelism=parallelism), timeout_s
        )

    # ---- words and models --------------------------------------------------------------------------------------------

    async def tokenize(
        self, prompt: str | None = None, *, messages: Iterable[Mapping[str, str]] | None = None
    ) -> list[int]:
        """Ids of a prompt, or of a chat through the model's template."""
        asked = api.TokenizeRequest(prompt=prompt)
        if messages is not None:
            asked.messages.messages.extend(_messages(messages))
        return list((await self._unary("Tokenize", asked)).token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ids."""
        asked = api.DetokenizeRequest(token_ids=token_ids, skip_special=skip_special)
        return str((await self._unary("Detokenize", asked)).text)

    async def models(self) -> list[api.Model]:
        """What is served."""
        return list((await self._unary("ListModels", api.ListModelsRequest())).models)

    async def wait_serving(self, timeout_s: float) -> None:
        """Return when a router is ready. Raises Unavailable when none is in time."""
        watches = {asyncio.ensure_future(_wait_serving(router, timeout_s)) for router in self._routers.all}
        try:
            await _first_success(watches)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    # ---- attempts ----------------------------------------------------------------------------------------------------

    async def _stream(self, method: str, request: Any, timeout_s: float | None) -> AsyncIterator[Any]:
        attempts = _Attempts(self._retry, self._routers, timeout_s, self._rng)
        while True:
            router, begun = attempts.next(), False
            call: Any = getattr(router.stub, method)(request, timeout=attempts.left_s(), metadata=self._metadata)
            try:
                async for message in call:
                    begun = begun or not _is_accepted(message)
                    yield message
                return
            except grpc.aio.AioRpcError as error:
                failure = as_error(error, router.address)
            finally:
                call.cancel()
            if begun:
                raise failure
            await attempts.failed(failure)

    async def _unary(self, method: str, request: Any) -> Any:
        attempts = _Attempts(self._retry, self._routers, _SHORT_S, self._rng)
        while True:
            router = attempts.next()
            try:
                return await getattr(router.stub, method)(request, timeout=attempts.left_s(), metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                failure = as_error(error, router.address)
            await attempts.failed(failure)


class _Attempts:
    """Those of one call."""

    def __init__(self, retry: Retry, routers: Routers, timeout_s: float | None, rng: random.Random) -> None:
        self._retry = retry
        self._routers = routers
        self._until = None if timeout_s is None else time.monotonic() + timeout_s
        self._rng = rng
        self._failed = 0
        self._tried: set[str] = set()

    def next(self) -> Router:
        router = self._routers.next(self._tried)
        self._tried.add(router.address)
        return router

    def left_s(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    async def failed(self, error: BatonError) -> None:
        """Waits until the next attempt. Raises the error when there is none."""
        self._failed += 1
        others = len(self._tried) < len(self._routers.all)
        wait_s = self._retry.wait_s(self._failed, error, self.left_s(), others=others, rng=self._rng)
        if wait_s is None:
            raise error
        if not others:
            self._tried.clear()
        await asyncio.sleep(wait_s)


def _is_accepted(message: Any) -> bool:
    answer = message.answer if isinstance(message, api.GenerateBatchResponse) else message
    return bool(answer.WhichOneof("event") == "accepted")


async def _first_success(tasks: Iterable[asyncio.Future[None]]) -> None:
    """Returns with the first that succeeds; raises what the last one raised when none does."""
    failure: Exception | None = None
    for done in asyncio.as_completed(tasks):
        try:
            return await done
        except BatonError as error:
            failure = error
    raise failure or Unavailable("no router was asked")


async def _wait_serving(router: Router, timeout_s: float) -> None:
    request = health_pb2.HealthCheckRequest(service="")
    stub: Any = health_pb2_grpc.HealthStub(router.channel)
    call = stub.Watch(request, timeout=timeout_s, wait_for_ready=True)
    try:
        async for answer in call:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
    except grpc.aio.AioRpcError as error:
        raise Unavailable(f"{router.address}: {error.details()}") from None
    finally:
        call.cancel()
    raise Unavailable(f"{router.address}: the router went away before it was ready")
