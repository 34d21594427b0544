"""A thin adapter: the Open Inference Protocol (KServe v2, gRPC) in front of the same door as everything else.

Tensors: `text_input` (BYTES, one prompt) and, if wished, `streaming` (BOOL) in; `text_output` and `finish_reason`
(BYTES) out. Request parameters are the fields of a GenerateRequest by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from .. import __version__
from ..proto import baton_pb2 as api
from ..proto import open_inference_pb2 as oip
from ..proto.errors import BatonError, InvalidRequest, UnknownModel
from ..proto.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from .bounds import check_message
from .front_door import FrontDoor
from .grpc_errors import Context, abort
from .grpc_messages import client_request
from .live import Answer
from .requests import Chunk

SERVICE = "inference.GRPCInferenceService"
_INPUTS = {"text_input": "BYTES", "streaming": "BOOL"}
_NOT_PARAMETERS = {"prompt", "token_ids", "messages", "logit_bias", "request_id", "n", "logprobs"}
_FINAL = "triton_final_response"
_LENGTH_BYTES = 4  # in front of each element of a raw BYTES tensor


class OpenInference(GRPCInferenceServiceServicer):
    """See open_inference.proto."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    async def ServerLive(self, request: oip.ServerLiveRequest, context: Context) -> oip.ServerLiveResponse:
        """The process answers."""
        return oip.ServerLiveResponse(live=True)

    async def ServerReady(self, request: oip.ServerReadyRequest, context: Context) -> oip.ServerReadyResponse:
        """Requests can be served."""
        return oip.ServerReadyResponse(ready=not self._door.core.not_ready())

    async def ModelReady(self, request: oip.ModelReadyRequest, context: Context) -> oip.ModelReadyResponse:
        """The model is ours, and requests can be served."""
        ours = request.name == self._door.params.served_name
        return oip.ModelReadyResponse(ready=ours and not self._door.core.not_ready())

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Context) -> oip.ServerMetadataResponse:
        """Who we are."""
        return oip.ServerMetadataResponse(name="baton", version=__version__, extensions=["model_stream_infer"])

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Context) -> oip.ModelMetadataResponse:
        """The tensors of the model."""
        try:
            self._check_model(request.name)
        except BatonError as error:
            await abort(context, error)
        kind = oip.ModelMetadataResponse.TensorMetadata
        return oip.ModelMetadataResponse(
            name=request.name,
            versions=["1"],
            platform="baton",
            inputs=[kind(name=name, datatype=datatype, shape=[1]) for name, datatype in _INPUTS.items()],
            outputs=[kind(name=name, datatype="BYTES", shape=[1]) for name in ("text_output", "finish_reason")],
        )

    async def ModelInfer(self, request: oip.ModelInferRequest, context: Context) -> oip.ModelInferResponse:
        """One prompt, its whole answer."""
        try:
            answer = await self._begin(request, context, allow_stream=False)
        except BatonError as error:
            await abort(context, error)
        try:
            text, reason = "", ""
            async for piece, end in _pieces(answer):
                text, reason = text + piece, end
            return _response(request, text, reason)
        except BatonError as error:
            await abort(context, error, answer.request_id)
        finally:
            answer.cancel()

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[oip.ModelInferRequest], context: Context) -> None:
        """Prompts one after the other; a failure is an answer with a message, and the stream goes on."""
        async for request in request_iterator:
            try:
                await self._stream(request, context)
            except BatonError as error:
                failed = oip.ModelInferResponse(model_name=request.model_name, id=request.id)
                failed.parameters[_FINAL].bool_param = True
                await context.write(oip.ModelStreamInferResponse(error_message=error.message, infer_response=failed))

    async def _stream(self, request: oip.ModelInferRequest, context: Context) -> None:
        streaming = _bool(request, "streaming")
        answer = await self._begin(request, context, allow_stream=True)
        try:
            text = ""
            async for piece, end in _pieces(answer):
                text += piece
                if end or (streaming and text):
                    said = _response(request, text, end)
                    said.parameters[_FINAL].bool_param = bool(end)
                    await context.write(oip.ModelStreamInferResponse(infer_response=said))
                    text = ""
        finally:
            answer.cancel()

    async def _begin(self, request: oip.ModelInferRequest, context: Context, *, allow_stream: bool) -> Answer:
        self._check_model(request.model_name)
        if not allow_stream and _bool(request, "streaming"):
            raise InvalidRequest("streaming: only ModelStreamInfer streams", field="streaming")
        asked = _generate_request(request)
        self._door.bounded(lambda limits, room: check_message(asked, limits, room))
        return await self._door.generate(client_request(asked, {}, context.time_remaining()))

    def _check_model(self, name: str) -> None:
        served = self._door.params.served_name
        if name != served:
            raise UnknownModel(f"model_name: {name[:100]!r} is not served here, {served!r} is", field="model_name")


async def _pieces(answer: Answer) -> AsyncIterator[tuple[str, str]]:
    """(text, finish reason or ""), piece by piece; the reason comes once, last."""
    async for outputs in answer.outputs():
        for output in outputs:
            yield (output.text, "") if isinstance(output, Chunk) else ("", output.reason)


def _generate_request(request: oip.ModelInferRequest) -> api.GenerateRequest:
    """What it means in baton.v1. Raises InvalidRequest, naming the tensor or parameter."""
    unknown = next((tensor.name for tensor in request.inputs if tensor.name not in _INPUTS), None)
    if unknown is not None:
        raise InvalidRequest(f"inputs: there is no tensor {unknown[:100]!r}, only {', '.join(_INPUTS)}", field="inputs")
    text = _element(request, "text_input")
    if text is None:
        raise InvalidRequest("text_input: the tensor is missing", field="text_input")
    asked = api.GenerateRequest(request_id=request.id)
    try:
        asked.prompt = bytes(text).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("text_input: not valid UTF-8", field="text_input") from None
    for name, value in request.parameters.items():
        _set(asked, name, value)
    return asked


def _set(asked: api.GenerateRequest, name: str, value: oip.InferParameter) -> None:
    known = api.GenerateRequest.DESCRIPTOR.fields_by_name
    if name not in known or name in _NOT_PARAMETERS:
        raise InvalidRequest(f"parameters: {name[:100]!r} is not known here", field="parameters")
    kind = value.WhichOneof("parameter_choice")
    given = getattr(value, kind) if kind else None
    try:
        if known[name].is_repeated:
            getattr(asked, name).append(given)
        else:
            setattr(asked, name, given)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name}: {error}", field=name) from None


def _bool(request: oip.ModelInferRequest, name: str) -> bool:
    return bool(_element(request, name))


def _element(request: oip.ModelInferRequest, name: str) -> Any:
    """The one element of a tensor: bytes or a truth value; None: there is no such tensor. Raises InvalidRequest."""
    found = [(at, tensor) for at, tensor in enumerate(request.inputs) if tensor.name == name]
    if not found:
        return None
    at, tensor = found[0]
    if len(found) > 1 or tensor.datatype != _INPUTS[name] or any(size != 1 for size in tensor.shape):
        raise InvalidRequest(f"{name}: must be one {_INPUTS[name]} tensor with one element", field=name)
    if request.raw_input_contents:
        return _raw(name, request.raw_input_contents[at]) if at < len(request.raw_input_contents) else _missing(name)
    contents = tensor.contents.bytes_contents if name == "text_input" else tensor.contents.bool_contents
    return contents[0] if len(contents) == 1 else _missing(name)


def _raw(name: str, data: bytes) -> Any:
    if name == "streaming":
        return bool(data[0]) if len(data) == 1 else _missing(name)
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    return data[_LENGTH_BYTES:] if length == len(data) - _LENGTH_BYTES else _missing(name)


def _missing(name: str) -> Any:
    raise InvalidRequest(f"{name}: the tensor's contents are not one element", field=name)


def _response(request: oip.ModelInferRequest, text: str, reason: str) -> oip.ModelInferResponse:
    """Raw contents where the request had them, as clients expect."""
    answer = oip.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    for name, value in (("text_output", text.encode()), ("finish_reason", reason.encode())):
        tensor = answer.outputs.add(name=name, datatype="BYTES", shape=[1])
        if request.raw_input_contents:
            answer.raw_output_contents.append(len(value).to_bytes(_LENGTH_BYTES, "little") + value)
        else:
            tensor.contents.bytes_contents.append(value)
    return answer
