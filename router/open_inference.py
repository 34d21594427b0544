"""A thin adapter: the Open Inference Protocol (KServe v2, gRPC) in front of the same door as everything else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from .. import __version__
from ..proto import open_inference_pb2 as oip
from ..proto.errors import BatonError, InvalidRequest
from ..proto.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from . import open_inference_call as calls
from .front_door import FrontDoor
from .grpc_errors import Context, abort
from .live import Answer

SERVICE = "inference.GRPCInferenceService"
_FINAL = "triton_final_response"


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
        ours = request.name == self._door.params.served_name and request.version in ("", calls.VERSION)
        return oip.ModelReadyResponse(ready=ours and not self._door.core.not_ready())

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Context) -> oip.ServerMetadataResponse:
        """Who we are."""
        return oip.ServerMetadataResponse(name="baton", version=__version__, extensions=["model_stream_infer"])

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Context) -> oip.ModelMetadataResponse:
        """The tensors of the model."""
        try:
            calls.check_model(self._door, request.name, request.version)
        except BatonError as error:
            await abort(context, error)
        kind = oip.ModelMetadataResponse.TensorMetadata
        return oip.ModelMetadataResponse(
            name=request.name,
            versions=[calls.VERSION],
            platform=calls.PLATFORM,
            inputs=[kind(name=name, datatype=datatype, shape=[1]) for name, datatype in calls.INPUTS.items()],
            outputs=[kind(name=name, datatype="BYTES", shape=[1]) for name in calls.OUTPUTS],
        )

    async def ModelInfer(self, request: oip.ModelInferRequest, context: Context) -> oip.ModelInferResponse:
        """One prompt, its whole answer."""
        try:
            answer = await self._begin(request, context, allow_stream=False)
        except BatonError as error:
            await abort(context, error)
        try:
            return _response(request, await calls.whole(answer))
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
            async for piece, end in calls.pieces(answer):
                text += piece
                if end or (streaming and text):
                    said = _response(request, {"text_output": text, "finish_reason": end})
                    said.parameters[_FINAL].bool_param = bool(end)
                    await context.write(oip.ModelStreamInferResponse(infer_response=said))
                    text = ""
        finally:
            answer.cancel()

    async def _begin(self, request: oip.ModelInferRequest, context: Context, *, allow_stream: bool) -> Answer:
        calls.check_model(self._door, request.model_name, request.model_version)
        calls.check_inputs(tensor.name for tensor in request.inputs)
        calls.chosen(output.name for output in request.outputs)
        if not allow_stream and _bool(request, "streaming"):
            raise InvalidRequest("streaming: only ModelStreamInfer streams", field="streaming")
        text, left_s = _element(request, "text_input"), context.time_remaining()
        return await calls.begin(self._door, request.id, text, _parameters(request), {}, left_s)


def _parameters(request: oip.ModelInferRequest) -> dict[str, Any]:
    given = {}
    for name, value in request.parameters.items():
        kind = value.WhichOneof("parameter_choice")
        given[name] = getattr(value, kind) if kind else None
    return given


def _bool(request: oip.ModelInferRequest, name: str) -> bool:
    return bool(_element(request, name))


def _element(request: oip.ModelInferRequest, name: str) -> Any:
    """The one element of a tensor: bytes or a truth value; None: there is no such tensor. Raises InvalidRequest."""
    found = [(at, tensor) for at, tensor in enumerate(request.inputs) if tensor.name == name]
    if not found:
        return None
    at, tensor = found[0]
    if len(found) > 1 or tensor.datatype != calls.INPUTS[name] or any(size != 1 for size in tensor.shape):
        calls.wrong_tensor(name)
    if raw := request.raw_input_contents:
        return calls.raw_element(name, raw[at]) if at < len(raw) else calls.no_element(name)
    contents = tensor.contents.bytes_contents if name == "text_input" else tensor.contents.bool_contents
    return contents[0] if len(contents) == 1 else calls.no_element(name)


def _response(request: oip.ModelInferRequest, said: dict[str, str]) -> oip.ModelInferResponse:
    """Raw contents where the request had them, as clients expect."""
    answer = oip.ModelInferResponse(model_name=request.model_name, model_version=calls.VERSION, id=request.id)
    for name in calls.chosen(output.name for output in request.outputs):
        tensor = answer.outputs.add(name=name, datatype="BYTES", shape=[1])
        if request.raw_input_contents:
            answer.raw_output_contents.append(calls.raw_text(said[name]))
        else:
            tensor.contents.bytes_contents.append(said[name].encode())
    return answer
