"""A thin adapter: the Open Inference Protocol (KServe v2) over HTTP under /v2, with its binary tensors, and the
`generate` and `generate_stream` that language models have beside `infer`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .. import __version__
from ..proto.errors import BatonError, InvalidRequest
from . import open_inference_call as calls
from . import open_inference_json as bodies
from .front_door import FrontDoor
from .http_body import read_body
from .http_generation import retry_headers
from .http_leaving import while_there
from .live import Answer
from .openai_calls import checked, json_of
from .openai_shapes import event

_MODEL = "/v2/models/{model:path}"
Json = dict[str, Any]
Endpoint = Callable[[Request], Awaitable[Response]]


class OpenInferenceRoutes:
    """What is served under /v2."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    def paths(self) -> list[tuple[str, Endpoint, str]]:
        """(path, endpoint, method); the most particular first, for names of models may hold slashes."""
        found: list[tuple[str, Endpoint, str]] = [
            ("/v2", self.server, "GET"),
            ("/v2/health/live", self.live, "GET"),
            ("/v2/health/ready", self.ready, "GET"),
        ]
        for model in (_MODEL + "/versions/{version}", _MODEL):
            found += [
                (model + "/ready", _plain(self.model_ready), "GET"),
                (model + "/infer", _plain(self.infer), "POST"),
                (model + "/generate", _plain(self.generate), "POST"),
                (model + "/generate_stream", _plain(self.generate_stream), "POST"),
                (model, _plain(self.model), "GET"),
            ]
        return found

    # ---- state -----------------------------------------------------------------------------------------------------

    async def server(self, request: Request) -> Response:
        """Who we are."""
        return JSONResponse({"name": "baton", "version": __version__, "extensions": ["binary_tensor_data", "generate"]})

    async def live(self, request: Request) -> Response:
        """The event loop turns."""
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """A request can be served now."""
        return self._readiness({})

    async def model_ready(self, request: Request) -> Response:
        """The same, for the model that is ours."""
        return self._readiness({"name": self._model(request)})

    def _readiness(self, named: Json) -> Response:
        reason = self._door.core.not_ready()
        answer = {**named, "ready": not reason}
        return JSONResponse({**answer, "reason": reason}, 503, {"Retry-After": "1"}) if reason else JSONResponse(answer)

    async def model(self, request: Request) -> Response:
        """The tensors of the model."""
        inputs = [{"name": name, "datatype": kind, "shape": [1]} for name, kind in calls.INPUTS.items()]
        outputs = [{"name": name, "datatype": "BYTES", "shape": [1]} for name in calls.OUTPUTS]
        named = {"name": self._model(request), "versions": [calls.VERSION], "platform": calls.PLATFORM}
        return JSONResponse({**named, "inputs": inputs, "outputs": outputs})

    def _model(self, request: Request) -> str:
        model = str(request.path_params["model"])
        calls.check_model(self._door, model, str(request.path_params.get("version", "")))
        return model

    # ---- answers ---------------------------------------------------------------------------------------------------

    async def infer(self, request: Request) -> Response:
        """One prompt, its whole answer, as tensors."""
        named, raw = self._named(request), await read_body(self._door, request)
        length = request.headers.get(bodies.HEADER_LENGTH)

        def read() -> tuple[Json, dict[str, bool], bytes | str | None]:
            head, behind = bodies.split(raw, length)
            body = bodies.json_object(json_of(self._door, head))
            return (body, *bodies.read_infer(body, behind))

        body, wanted, text = checked(self._door, read)
        named |= bodies.id_of(body)
        answer = await self._begin(request, body, text)
        return _Answering(answer, lambda said: bodies.tensors(named, said, wanted))

    async def generate(self, request: Request) -> Response:
        """The same in one object: text_input and parameters in, text_output out."""
        named, answer = await self._generate(request)
        return _Answering(answer, lambda said: JSONResponse({**named, **said}))

    async def generate_stream(self, request: Request) -> Response:
        """The same, an event for each piece of text."""
        named, answer = await self._generate(request)
        return _Streaming(answer, named)

    async def _generate(self, request: Request) -> tuple[Json, Answer]:
        named, raw = self._named(request), await read_body(self._door, request)

        def read() -> Json:
            body = bodies.json_object(json_of(self._door, raw))
            beside = {name: value for name, value in body.items() if name not in ("text_input", "id", "parameters")}
            return {**body, "parameters": {**bodies.parameters_of(body), **beside}}

        body = checked(self._door, read)
        return {**named, **bodies.id_of(body)}, await self._begin(request, body, body.get("text_input"))

    async def _begin(self, request: Request, body: Json, text: Any) -> Answer:
        label, asked = bodies.id_of(body).get("id", ""), bodies.asked_of(body)
        if not isinstance(text, bytes | str | None):
            raise InvalidRequest("text_input: must be a text", field="text_input")
        metadata = {"x-request-id": request.headers.get("x-request-id", "")}
        return await calls.begin(self._door, label, text, asked, metadata, None)

    def _named(self, request: Request) -> Json:
        return {"model_name": self._model(request), "model_version": calls.VERSION}


class _OfAnswer(Response):
    """What becomes of an answer; a client that leaves cancels it."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        try:
            await while_there(receive, self._respond(scope, receive, send))
        finally:
            self._answer.cancel()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class _Answering(_OfAnswer):
    """Waits for the whole of it."""

    def __init__(self, answer: Answer, shown: Callable[[Mapping[str, str]], Response]) -> None:
        super().__init__(answer)
        self._shown = shown

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = self._shown(await calls.whole(self._answer))
        except BatonError as error:
            response = _refusal(error)
        response.headers.update(self._answer.headers)
        await response(scope, receive, send)


class _Streaming(_OfAnswer):
    """Server-sent events, as they come; a failure is the last of them."""

    def __init__(self, answer: Answer, named: Json) -> None:
        super().__init__(answer)
        self._named = named

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = calls.pieces(self._answer)
        try:
            part = await anext(parts, None)  # what fails before it has a status of its own
            said = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            headers = [(k.encode(), v.encode()) for k, v in {**said, **self._answer.headers}.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                while part is not None:
                    text, reason = part
                    if text or reason:
                        await _send(send, {**self._named, "text_output": text, "finish_reason": reason})
                    part = await anext(parts, None)
            except BatonError as error:
                await _send(send, {"error": error.message})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except BatonError as error:
            await _refusal(error)(scope, receive, send)


async def _send(send: Send, body: Json) -> None:
    await send({"type": "http.response.body", "body": event(body), "more_body": True})


def _plain(endpoint: Endpoint) -> Endpoint:
    """The same with errors in this protocol's shape."""

    async def served(request: Request) -> Response:
        try:
            return await endpoint(request)
        except BatonError as error:
            return _refusal(error)

    return served


def _refusal(error: BatonError) -> Response:
    return JSONResponse({"error": error.message}, error.http_status, retry_headers(error))
