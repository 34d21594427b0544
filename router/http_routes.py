"""The paths of the HTTP service: what each call does."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .. import __version__
from ..proto.errors import BatonError, InternalError, UnknownModel
from .batches import Batches
from .errors import NoSuchPath, WrongMethod
from .front_door import FrontDoor
from .http_batches import BatchRoutes
from .http_body import read_body
from .http_generation import Generation, error_response
from .http_open_inference import OpenInferenceRoutes
from .metrics_peers import MetricsPeers
from .openai_calls import CHAT, COMPLETIONS, checked, json_of, read_call
from .openai_schema import parse
from .openai_text import DetokenizeRequest, TokenizeRequest
from .openapi import document

Endpoint = Callable[[Request], Awaitable[Response]]


def application(door: FrontDoor, batches: Batches | None, peers: MetricsPeers) -> Starlette:
    """The ASGI application; batches: None where they are off."""
    routes = _Routes(door, peers)
    paths: list[tuple[str, Endpoint, str]] = [
        (COMPLETIONS, routes.generate, "POST"),
        (CHAT, routes.generate, "POST"),
        ("/v1/models", routes.models, "GET"),
        ("/v1/models/{model:path}", routes.model, "GET"),
        ("/tokenize", routes.tokenize, "POST"),
        ("/detokenize", routes.detokenize, "POST"),
        ("/health", routes.ready, "GET"),
        ("/ready", routes.ready, "GET"),
        ("/live", routes.live, "GET"),
        ("/metrics", routes.metrics, "GET"),
        ("/version", routes.version, "GET"),
        ("/openapi.json", routes.openapi, "GET"),
        ("/debug/requests/{request_id}", routes.story, "GET"),
        *BatchRoutes(door, batches).paths(),
        *(OpenInferenceRoutes(door).paths() if door.params.grpc.open_inference else ()),
    ]
    return Starlette(
        routes=[Route(path, endpoint, methods=[method]) for path, endpoint, method in paths],
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


class _Routes:
    def __init__(self, door: FrontDoor, peers: MetricsPeers) -> None:
        self._door = door
        self._peers = peers
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
        """Prometheus' text format, for all routers of this host."""
        return Response(await self._peers.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        """Ours."""
        return JSONResponse({"version": __version__})

    async def openapi(self, request: Request) -> Response:
        """What is served here, as an OpenAPI document."""
        return JSONResponse(document(self._served))

    async def story(self, request: Request) -> Response:
        """What happened to a request that runs or ended lately; for people on this host only."""
        request_id = request.path_params["request_id"]
        story = self._door.core.lives.story(request_id) if _from_here(request) else None
        if story is None:
            raise NoSuchPath(f"no request {request_id} is known here (any more)")
        return JSONResponse({"id": story.request_id, "story": story.lines()})

    async def models(self, request: Request) -> Response:
        """The one model that is served here."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The same by its name."""
        name, served = request.path_params["model"], self._door.params.served_name
        if name != served:
            raise UnknownModel(f"model: {name!r:.100} is not served here, only {served!r}", field="model")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        model = {"id": self._door.params.served_name, "object": "model", "created": self._started}
        return {**model, "owned_by": "baton", "max_model_len": self._door.core.facts().context}

    # ---- text ------------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """vLLM's: the ids of a prompt or of a chat."""
        raw = await read_body(self._door, request)
        body = checked(self._door, lambda: parse(TokenizeRequest, json_of(self._door, raw), self._served))
        ids = await self._door.tokenize(checked(self._door, body.client))
        context, tokenizer = self._door.core.facts().context, self._door.text.tokenizer

        def make() -> Response:  # of hundreds of thousands of ids, beside the event loop
            answer = {"count": len(ids), "max_model_len": context, "tokens": ids}
            texts = [tokenizer.decode([i], skip_special=False) for i in ids] if body.return_token_strs else None
            return JSONResponse({**answer, "token_strs": texts})

        return await self._door.text.work(make)

    async def detokenize(self, request: Request) -> Response:
        """vLLM's: the text of ids."""
        raw = await read_body(self._door, request)
        body = checked(self._door, lambda: parse(DetokenizeRequest, json_of(self._door, raw), self._served))
        return JSONResponse({"prompt": await self._door.detokenize(body.tokens, skip_special=False)})

    @property
    def _served(self) -> str:
        return self._door.params.served_name

    # ---- generation ------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        """See OpenAI's /v1/completions and /v1/chat/completions."""
        raw = await read_body(self._door, request)
        call = read_call(self._door, request.scope["path"], raw, request.headers.get("x-request-id", ""))
        return Generation(self._door, call)


def _from_here(request: Request) -> bool:
    """Whether the client is on this host, and no proxy for somebody else."""
    forwarded = {"forwarded", "x-forwarded-for"} & set(request.headers.keys())
    host = request.client.host if request.client else ""
    with contextlib.suppress(ValueError):
        return not forwarded and ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    return False
