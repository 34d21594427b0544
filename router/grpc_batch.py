"""GenerateBatch: a few requests at a time, each an ordinary one, their messages in one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from ..proto import baton_pb2 as api
from ..proto.errors import BatonError, DeadlineExceeded, Exhausted
from .front_door import FrontDoor
from .grpc_errors import failure
from .grpc_messages import client_request, tell
from .live import Answer

_LEAST_WAIT_S = 0.05  # before a full router is asked again


class Batch:
    """One call. `left`: seconds until its deadline, None: it has none. `write` sends a message to the client."""

    def __init__(
        self,
        door: FrontDoor,
        request: api.GenerateBatchRequest,
        metadata: Mapping[str, str],
        left: Callable[[], float | None],
        write: Callable[[Any], Awaitable[None]],
    ) -> None:
        self._door = door
        self._requests = request.requests
        self._metadata = metadata
        self._left = left
        self._write = write
        self._writing = asyncio.Lock()  # one message at a time: what gRPC cannot take holds all requests up
        most = door.params.limits.parallelism
        self._parallelism = request.parallelism if request.HasField("parallelism") else most
        self._until = time.monotonic() + door.params.request_deadline_s  # for its turn

    async def run(self) -> None:
        """Returns when every request has ended; a cancel ends those that run, and begins no more."""
        turns = iter(range(len(self._requests)))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self._parallelism, len(self._requests))):
                tasks.create_task(self._work(turns))

    async def _work(self, turns: Iterator[int]) -> None:
        for index in turns:
            try:
                await self._one(index)
            except BatonError as error:
                await self._say(api.GenerateBatchResponse(index=index, failure=failure(error)))

    async def _one(self, index: int) -> None:
        answer = await self._accepted(self._requests[index])
        try:
            await tell(answer, lambda event: self._say(api.GenerateBatchResponse(index=index, answer=event)))
        finally:
            answer.cancel()

    async def _accepted(self, request: api.GenerateRequest) -> Answer:
        """Waits while the router is full: the bound of a batch's own queue is the batch."""
        while True:
            left_s = self._left()
            if left_s is not None and left_s <= 0:
                raise DeadlineExceeded("the deadline passed before the request's turn")
            try:
                return await self._door.generate(client_request(request, self._metadata, left_s))
            except Exhausted as error:
                wait_s = max(error.retry_after_s, _LEAST_WAIT_S)
                if time.monotonic() + wait_s > self._until or (left_s is not None and wait_s > left_s):
                    raise
                await asyncio.sleep(wait_s)

    async def _say(self, message: api.GenerateBatchResponse) -> None:
        async with self._writing:
            await self._write(message)
