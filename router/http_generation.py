"""One generating HTTP call: its prompts run, and the answer sent whole or as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..proto.errors import BatonError
from .front_door import FrontDoor
from .live import Answer
from .openai_answer import AnswerBuilder, Echo, Wanted
from .openai_shapes import DONE, Format, error_body, event
from .requests import ClientRequest, Output

_MERGED_PARTS = 64  # parts of several prompts' answers that may wait for a slow reader


def error_response(error: BatonError) -> JSONResponse:
    """An error in OpenAI's shape."""
    headers = {}
    if error.http_status in (429, 503):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


class Generation(Response):
    """Runs the prompts of one call and sends the answer, whole or as events; a client that leaves cancels them."""

    def __init__(
        self, door: FrontDoor, clients: list[ClientRequest], form: Format, wanted: Wanted, *, stream: bool
    ) -> None:
        super().__init__()
        self._door = door
        self._clients = clients
        self._form = form
        self._wanted = wanted
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Races the answer against the client's leaving."""
        work = asyncio.create_task(self._respond(scope, receive, send))
        left = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, left):
                task.cancel()
            await asyncio.gather(work, left, return_exceptions=True)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers: list[Answer] = []
        try:
            prepared = [await self._door.prepare(client) for client in self._clients]
            for request in prepared:
                answers.append(self._door.submit(request))
            builder = AnswerBuilder(
                self._form,
                answers[0].request_id,
                int(time.time()),
                self._door.params.served_name,
                self._door.text.tokenizer,
                self._wanted,
            )
            parts = self._echoing(builder, answers)
            if self._stream:
                await self._send_events(builder, parts, answers[0].request_id, send)
                return
            async for prompt, outputs in parts:
                for output in outputs:
                    builder.add(prompt, output)
            await self._send_whole(builder, answers[0].request_id, scope, receive, send)
        except BatonError as error:
            await error_response(error)(scope, receive, send)
        finally:
            for answer in answers:
                answer.cancel()

    async def _echoing(self, builder: AnswerBuilder, answers: list[Answer]) -> AsyncIterator[tuple[int, list[Output]]]:
        """The parts of all answers; what is repeated of a prompt is with the builder before the first part."""
        wanted = self._wanted
        repeats = wanted.echo or wanted.prompt_logprobs or wanted.usage_in_each
        async for prompt, outputs in merged([answer.outputs() for answer in answers]):
            if repeats and prompt not in builder.echoes:
                answer, text = answers[prompt], self._clients[prompt].prompt
                if wanted.echo and text is None:
                    text = await self._door.text.decode(answer.prompt_ids, skip_special=False)
                scored = wanted.prompt_logprobs or (wanted.echo and wanted.logprobs)
                builder.echoes[prompt] = Echo(text or "", answer.prompt_ids, answer.prompt_scores() if scored else None)
            yield prompt, outputs

    async def _send_whole(
        self, builder: AnswerBuilder, request_id: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Scores of thousands of tokens are put into JSON beside the event loop."""

        def make() -> Response:
            return JSONResponse(builder.whole(), headers={"x-request-id": request_id})

        heavy = self._wanted.logprobs or self._wanted.prompt_logprobs
        await (await self._door.text.work(make) if heavy else make())(scope, receive, send)

    async def _send_events(
        self, builder: AnswerBuilder, parts: AsyncIterator[tuple[int, list[Output]]], request_id: str, send: Send
    ) -> None:
        """Headers leave with the first part, so that what fails before it has its own status."""
        first: tuple[int, list[Output]] | None = await anext(parts)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers.append((b"x-request-id", request_id.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while first is not None:
                prompt, outputs = first
                events = [body for output in outputs for body in builder.events(prompt, output)]
                if events:
                    await _send_part(send, b"".join(map(event, events)))
                first = await anext(parts, None)
            usage = builder.usage_event()
            await _send_part(send, (event(usage) if usage else b"") + DONE)
        except BatonError as error:
            await _send_part(send, event(error_body(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(answers: list[AsyncIterator[list[Output]]]) -> AsyncIterator[tuple[int, list[Output]]]:
    """(prompt, parts) of several answers as they come; the first error ends it."""
    if len(answers) == 1:
        async for outputs in answers[0]:
            yield 0, outputs
        return
    queue: asyncio.Queue[tuple[int, list[Output] | BaseException | None]] = asyncio.Queue(_MERGED_PARTS)

    async def pump(prompt: int, answer: AsyncIterator[list[Output]]) -> None:
        try:
            async for outputs in answer:
                await queue.put((prompt, outputs))
            await queue.put((prompt, None))
        except BatonError as error:
            await queue.put((prompt, error))

    tasks = [asyncio.create_task(pump(prompt, answer)) for prompt, answer in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            prompt, part = await queue.get()
            if isinstance(part, BaseException):
                raise part
            if part is None:
                left -= 1
            else:
                yield prompt, part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
