"""A baton.v1 server without workers: emits scripted messages at scripted times, for clients and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from baton.proto import baton_pb2 as api
from baton.proto.baton_pb2_grpc import BatonServicer, add_BatonServicer_to_server
from baton.proto.errors import BatonError

Script = Sequence[tuple[float, api.GenerateResponse | BatonError]]  # seconds to wait before each message


def tokens(*ids: int, text: str = "x", choice: int = 0, offset: int = 0) -> api.GenerateResponse:
    """A message with tokens."""
    return api.GenerateResponse(tokens=api.TokenChunk(choice=choice, offset=offset, token_ids=ids, text=text))


def accepted(prompt_tokens: int = 1) -> api.GenerateResponse:
    """The first message: it has no token."""
    return api.GenerateResponse(accepted=api.Accepted(request_id="req-1", prompt_tokens=prompt_tokens))


def finished(choice: int = 0, completion: int = 1) -> api.GenerateResponse:
    """The last message."""
    usage = api.Usage(prompt_tokens=1, completion_tokens=completion)
    timing = api.Timing(total_s=0.5, kv_bytes=2**40, prefill_worker="prefill-0", decode_worker="decode-0")
    return api.GenerateResponse(finished=api.Finished(choice=choice, reason="length", usage=usage, timing=timing))


class MockRouter(BatonServicer):
    """`answer(request)` gives the script of each request."""

    def __init__(self, answer: Callable[[api.GenerateRequest], Script]) -> None:
        self._answer = answer
        self.requests: list[api.GenerateRequest] = []
        self.running = 0
        self.most_running = 0

    async def Generate(self, request: api.GenerateRequest, context: Any) -> AsyncIterator[api.GenerateResponse]:
        """Plays the script."""
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for delay, message in self._answer(request):
                await asyncio.sleep(delay)
                if isinstance(message, BatonError):
                    trailers = (("baton-code", message.code), ("baton-field", message.field))
                    await context.abort(message.grpc_status, message.message, trailers)
                else:
                    yield message
        finally:
            self.running -= 1

    async def ListModels(self, request: api.ListModelsRequest, context: Any) -> api.ListModelsResponse:
        """One."""
        return api.ListModelsResponse(models=[api.Model(name="mock", max_model_len=100)])


@asynccontextmanager
async def serving(router: MockRouter) -> AsyncIterator[str]:
    """The router's address."""
    server = grpc.aio.server()
    add_BatonServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
