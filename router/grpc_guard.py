"""Around every method of our services: bytes that are no message, and failures that nobody expected.

gRPC itself answers the first with INTERNAL and the second with UNKNOWN, which clients take for a broken server and a
status without a meaning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ..proto.errors import BatonError, InternalError, InvalidRequest
from .grpc_errors import Context, abort

_log = logging.getLogger(__name__)
_MALFORMED = object()


class Guard(grpc.aio.ServerInterceptor):
    """`services`: whose methods are guarded; those are coroutines that write their own streams."""

    def __init__(self, services: frozenset[str]) -> None:
        self._services = services

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method, guarded."""
        handler: grpc.RpcMethodHandler[Any, Any] | None = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.split("/")[1] not in self._services:
            return handler
        return _guarded(handler, method)


def _guarded(handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    kinds = {
        (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
        (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
        (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
        (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
    }
    name, make = kinds[handler.request_streaming, handler.response_streaming]
    inner = getattr(handler, name)

    def parse(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            return _MALFORMED

    async def call(request: Any, context: Context) -> Any:
        try:
            return await inner(_checked(request, method), context)
        except grpc.aio.AbortError:
            raise
        except BatonError as error:
            await abort(context, error)
        except Exception as error:
            if _is_over(error):
                raise asyncio.CancelledError from None
            _log.exception("%s failed", method)
            await abort(context, InternalError("a fault of the server; its log says more"))

    guarded: grpc.RpcMethodHandler[Any, Any] = make(
        call, request_deserializer=parse, response_serializer=handler.response_serializer
    )
    return guarded


def _is_over(error: BaseException) -> bool:
    """Whether a message was written to a call that is over: its client left, or its deadline passed."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_over(part) for part in error.exceptions)
    return isinstance(error, grpc.aio.InternalError)


def _checked(request: Any, method: str) -> Any:
    """The message, or the stream of them. Raises InvalidRequest for bytes that are none."""
    if hasattr(request, "__aiter__"):
        return _each_checked(request, method)
    if request is _MALFORMED:
        raise InvalidRequest(f"{method}: the bytes are not a message of this method")
    return request


async def _each_checked(requests: AsyncIterator[Any], method: str) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request, method)
