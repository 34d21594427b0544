"""One generating HTTP call: its prompts run, and the answer is sent whole or as events."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..proto.errors import BatonError
from .front_door import FrontDoor
from .http_leaving import while_there
from .http_protocol import writer
from .openai_calls import OpenAICall, Running
from .openai_shapes import DONE, error_body, event


def error_response(error: BatonError) -> JSONResponse:
    """An error in OpenAI's shape."""
    return JSONResponse(error_body(error), error.http_status, retry_headers(error))


def retry_headers(error: BatonError) -> dict[str, str]:
    """When to try again, where that may help."""
    return {"Retry-After": str(max(1, round(error.retry_after_s)))} if error.http_status in (429, 503) else {}


class Generation(Response):
    """Runs the prompts of one call and sends the answer, whole or as events; a client that leaves cancels them."""

    def __init__(self, door: FrontDoor, call: OpenAICall) -> None:
        super().__init__()
        self._call = call
        self._running = Running(door, call)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Races the answer against the client's leaving."""
        await while_there(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._running.start()
            if self._call.stream:
                await self._send_events(send, writer(scope))
                return
            headers = self._running.headers
            response = await self._running.whole(lambda builder: JSONResponse(builder.whole(), headers=headers))
            await response(scope, receive, send)
        except BatonError as error:
            await error_response(error)(scope, receive, send)
        finally:
            self._running.cancel()

    async def _send_events(self, send: Send, write: Callable[[bytes], bool] | None) -> None:
        """Headers leave with the first part, so that what fails before it has its own status."""
        builder, parts = self._running.builder, self._running.parts()
        part = await anext(parts, None)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers += [(name.encode(), value.encode()) for name, value in self._running.headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if write is not None:
            self._running.shortcut(write)
        try:
            while part is not None:
                prompt, outputs = part
                events = [body for output in outputs for body in builder.events(prompt, output)]
                if events:
                    await _send_part(send, b"".join(map(event, events)))
                part = await anext(parts, None)
            usage = builder.usage_event()
            await _send_part(send, (event(usage) if usage else b"") + DONE)
        except BatonError as error:
            await _send_part(send, event(error_body(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
