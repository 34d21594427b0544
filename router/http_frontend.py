"""The OpenAI-compatible HTTP service, with health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .. import __version__
from ..proto.errors import BatonError, Cancelled, DeadlineExceeded, InternalError, InvalidRequest
from ..text import strict_json
from .bounds import check_body
from .errors import AddressTaken, BodyTooLarge, NoSuchPath, WrongMethod
from .front_door import FrontDoor
from .http_generation import Generation, error_response
from .openai_answer import Wanted
from .openai_schema import ChatRequest, CompletionRequest, parse
from .openai_shapes import ChatFormat, CompletionFormat
from .requests import ClientRequest

_BODY_S = 30.0  # for a whole body to arrive
_STOP_S = 2  # for responses that are being written when the server stops


def bind(address: str) -> socket.socket:
    """A listening socket. Raises AddressTaken, naming the address."""
    host, _, port = address.rpartition(":")
    try:
        family = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family[0], socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise AddressTaken(f"router.http: cannot listen on {address}: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # on Linux: past TIME_WAIT, never a shared port
        sock.bind(family[4])
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise AddressTaken(f"router.http: cannot listen on {address}: {error}") from error
    return sock


class HttpFrontend:
    """Binds at once, serves while `serve` runs. Create it inside the event loop."""

    def __init__(self, address: str) -> None:
        """Raises AddressTaken."""
        self._socket = bind(address)
        self.address = f"{address.rsplit(':', 1)[0]}:{self._socket.getsockname()[1]}"
        self._server: _Server | None = None

    async def serve(self, door: FrontDoor) -> None:
        """Serves until `stop`."""
        config = uvicorn.Config(
            application(door),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_STOP_S,
        )
        self._server = _Server(config)
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Lets `serve` return; frees the port when it never ran."""
        if self._server is not None:
            self._server.stop()
        else:
            self._socket.close()


class _Server(uvicorn.Server):
    """Leaves the process' signals alone: the router's own main handles them. Stops at once instead of at a tick."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Let `serve` return."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Once a second the date of the headers is renewed."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def application(door: FrontDoor) -> Starlette:
    """The ASGI application."""
    routes = _Routes(door)
    return Starlette(
        routes=[
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/health", routes.ready),
            Route("/ready", routes.ready),
            Route("/live", routes.live),
            Route("/metrics", routes.metrics),
            Route("/version", routes.version),
            Route("/debug/requests/{request_id}", routes.story),
        ],
        exception_handlers={BatonError: _on_error, HTTPException: _on_http_error, Exception: _on_bug},
    )


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error if isinstance(error, BatonError) else InternalError("internal error"))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """A path or method that is not served, or what Starlette itself refuses."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    kind = WrongMethod if status == WrongMethod.http_status else NoSuchPath
    response = error_response(kind(f"{request.method} {request.scope['path']} is not served here"))
    response.status_code = status
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, error: Exception) -> Response:
    return error_response(InternalError("internal error"))


T = TypeVar("T")
Body = TypeVar("Body", CompletionRequest, ChatRequest)


class _Routes:
    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self._started = int(time.time())

    # ---- state -----------------------------------------------------------------------------------------------------

    async def live(self, request: Request) -> Response:
        """The event loop turns."""
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """A request can be served now; else 503 and why not."""
        reason = self._door.core.not_ready()
        if reason:
            return JSONResponse({"status": "not ready", "reason": reason}, 503, {"Retry-After": "1"})
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        return Response(self._door.core.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        """Ours."""
        return JSONResponse({"version": __version__})

    async def story(self, request: Request) -> Response:
        """What happened to a request that runs or ended lately; for people on this host only."""
        request_id = request.path_params["request_id"]
        story = self._door.core.lives.stories.find(request_id) if _from_here(request) else None
        if story is None:
            raise NoSuchPath(f"no request {request_id} is known here (any more)")
        return JSONResponse({"id": story.request_id, "story": story.lines()})

    async def models(self, request: Request) -> Response:
        """The one model that is served here."""
        facts = self._door.core.facts()
        model = {"id": self._door.params.served_name, "object": "model", "created": self._started}
        return JSONResponse(
            {"object": "list", "data": [{**model, "owned_by": "baton", "max_model_len": facts.context}]}
        )

    # ---- generation ------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """See OpenAI's /v1/completions."""
        body = await self._parse(CompletionRequest, request)
        clients = self._checked(lambda: body.clients(_label(request), self._door.params.limits.prompts))
        wanted = dataclasses.replace(_wanted(body, clients[0]), echo=bool(body.echo), scores_only=body.scores_only)
        return Generation(self._door, clients, CompletionFormat(), wanted, stream=bool(body.stream))

    async def chat(self, request: Request) -> Response:
        """See OpenAI's /v1/chat/completions."""
        body = await self._parse(ChatRequest, request)
        client = self._checked(lambda: body.client(_label(request)))
        style = self._door.text.tool_style
        if client.tools and style is None:
            error = InvalidRequest("tools: this model's chat template takes no tools", field="tools")
            self._door.refused(error)
            raise error
        wanted = dataclasses.replace(_wanted(body, client), tool_style=style if client.tools else None)
        return Generation(self._door, [client], ChatFormat(), wanted, stream=bool(body.stream))

    def _checked(self, work: Callable[[], T]) -> T:
        """Counts the refusal when the body cannot be served."""
        try:
            return work()
        except BatonError as error:
            self._door.refused(error)
            raise

    async def _parse(self, kind: type[Body], request: Request) -> Body:
        raw = await self._body(request)

        def work() -> Body:
            limits, context = self._door.params.limits, self._door.core.facts().context
            try:
                data = strict_json.loads(raw, lambda value: check_body(value, limits, context))
            except strict_json.JsonError as error:
                raise InvalidRequest(f"{error.field or 'the body'}: {error}", field=error.field) from None
            return parse(kind, data, self._door.params.served_name)

        return self._checked(work)

    async def _body(self, request: Request) -> bytes:
        limit = self._door.params.limits.body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        error = BodyTooLarge(f"the body has more than {limit} bytes")
                        self._door.refused(error)
                        raise error
        except TimeoutError:
            raise DeadlineExceeded(f"the body did not arrive within {_BODY_S:g} s") from None
        except ClientDisconnect:
            raise Cancelled("the client left while it sent the body") from None
        return bytes(body)


def _wanted(body: CompletionRequest | ChatRequest, client: ClientRequest) -> Wanted:
    """What both endpoints show alike."""
    return Wanted(
        n=client.n or 1,
        token_ids=bool(body.return_token_ids),
        logprobs=client.logprobs is not None,
        usage=body.include_usage,
        usage_in_each=body.usage_in_each,
        prompt_logprobs=body.prompt_logprobs is not None,
    )


def _from_here(request: Request) -> bool:
    """Whether the client is on this host, and no proxy for somebody else."""
    forwarded = {"forwarded", "x-forwarded-for"} & set(request.headers.keys())
    host = request.client.host if request.client else ""
    with contextlib.suppress(ValueError):
        return not forwarded and ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    return False


def _label(request: Request) -> str:
    return request.headers.get("x-request-id", "")
