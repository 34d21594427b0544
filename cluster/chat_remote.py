"""A running cluster as the model of `baton chat --address`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from ..client.errors import as_error
from ..proto import baton_pb2 as api
from ..proto.baton_pb2_grpc import BatonStub
from .access import NOBODY, Access
from .chat import Ended, Message, Pieces, Wanted


class RemoteModel:
    """Speaks gRPC to a router."""

    def __init__(self, address: str, access: Access = NOBODY) -> None:
        self._address = address
        self._metadata = tuple(access.headers.items())
        credentials = access.credentials
        if credentials is None:
            self._channel = grpc.insecure_channel(address)
        else:
            self._channel = grpc.secure_channel(address, credentials)
        self._stub = BatonStub(self._channel)

    def __enter__(self) -> RemoteModel:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def answer(self, messages: Sequence[Message], wanted: Wanted) -> Pieces:
        """See ChatModel."""
        turns = [api.Message(role=message["role"], content=message["content"]) for message in messages]
        request = api.GenerateRequest(
            messages=api.Messages(messages=turns),
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            seed=wanted.seed,
        )
        if wanted.max_tokens is not None:
            request.max_tokens = wanted.max_tokens
        call: Any = self._stub.Generate(request, metadata=self._metadata)
        try:
            for event in call:
                if event.WhichOneof("event") == "tokens":
                    yield event.tokens.text
                elif event.WhichOneof("event") == "finished" and event.finished.HasField("usage"):
                    usage = event.finished.usage
                    yield Ended(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        except grpc.RpcError as error:
            raise as_error(error, self._address) from None
        finally:
            call.cancel()
