"""The service baton.v1.Baton: calls in, the front door's answers out."""

from __future__ import annotations

from ..proto import baton_pb2 as api
from ..proto.baton_pb2_grpc import BatonServicer
from ..proto.errors import BatonError
from .bounds import check_batch, check_detokenize, check_message, check_messages
from .front_door import FrontDoor
from .grpc_batch import Batch
from .grpc_errors import Context, abort
from .grpc_messages import chat_request, client_request, messages_of, tell
from .live import Answer
from .requests import ClientRequest


class BatonService(BatonServicer):
    """Streams are written by the methods themselves, so that a cancel always ends in their `finally`."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    async def Generate(self, request: api.GenerateRequest, context: Context) -> None:
        """See baton.proto."""
        try:
            self._door.bounded(lambda limits, room: check_message(request, limits, room))
            answer = await self._door.generate(client_request(request, metadata(context), context.time_remaining()))
        except BatonError as error:
            await abort(context, error)
        await _stream(answer, context)

    async def Chat(self, request: api.ChatRequest, context: Context) -> None:
        """See baton.proto."""
        try:
            self._door.bounded(lambda limits, room: check_message(request.parameters, limits, room))
            self._door.bounded(lambda limits, _: check_messages(request.messages, limits))
            answer = await self._door.generate(chat_request(request, metadata(context), context.time_remaining()))
        except BatonError as error:
            await abort(context, error)
        await _stream(answer, context)

    async def GenerateBatch(self, request: api.GenerateBatchRequest, context: Context) -> None:
        """See baton.proto."""
        try:
            self._door.bounded(lambda limits, room: check_batch(request, limits, room))
        except BatonError as error:
            await abort(context, error)
        await Batch(self._door, request, metadata(context), context.time_remaining, context.write).run()

    async def Tokenize(self, request: api.TokenizeRequest, context: Context) -> api.TokenizeResponse:
        """See baton.proto."""
        kind = request.WhichOneof("input")
        messages = messages_of(request.messages.messages) if kind == "messages" else None
        prompt = request.prompt if kind == "prompt" else None
        try:
            self._door.bounded(lambda limits, _: check_messages(request.messages.messages, limits))
            asked = ClientRequest(prompt=prompt, messages=messages, input_field=kind or "prompt")
            ids = await self._door.tokenize(asked)
            return api.TokenizeResponse(token_ids=ids, max_model_len=self._door.core.facts().context)
        except BatonError as error:
            await abort(context, error)

    async def Detokenize(self, request: api.DetokenizeRequest, context: Context) -> api.DetokenizeResponse:
        """See baton.proto."""
        try:
            self._door.bounded(lambda limits, _: check_detokenize(request, limits))
            text = await self._door.detokenize(request.token_ids, skip_special=request.skip_special)
            return api.DetokenizeResponse(text=text)
        except BatonError as error:
            await abort(context, error)

    async def ListModels(self, request: api.ListModelsRequest, context: Context) -> api.ListModelsResponse:
        """The one model that is served here."""
        try:
            facts = self._door.core.facts()
        except BatonError as error:
            await abort(context, error)
        name = self._door.params.served_name
        return api.ListModelsResponse(models=[api.Model(name=name, max_model_len=facts.context)])


def metadata(context: Context) -> dict[str, str]:
    """What the client sent beside the message, binary values aside."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


async def _stream(answer: Answer, context: Context) -> None:
    try:
        await context.send_initial_metadata(tuple(answer.headers.items()))
        await tell(answer, context.write)
    except BatonError as error:
        await abort(context, error, answer.request_id)
    finally:
        answer.cancel()
