"""API keys at the gRPC door: before any method, also those that do not exist."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from ..proto.errors import Unauthenticated
from .tenants import Tenants, current
from .trace_context import parent

if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})


class Authenticated(grpc.aio.ServerInterceptor):
    """Lets a call through as its tenant's, or ends it with UNAUTHENTICATED."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Called in the task that then runs the method."""
        if handler_call_details.method in OPEN_METHODS:
            return await continuation(handler_call_details)
        sent = dict(handler_call_details.invocation_metadata or ())
        parent.set(str(sent.get("traceparent", "")))
        given = [value for name, value in handler_call_details.invocation_metadata or () if name == "authorization"]
        try:
            current.set(self._tenants.authenticate(str(given[0]) if len(given) == 1 else ""))
        except Unauthenticated as error:
            return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: Unauthenticated) -> _Handler:
    """Handles a call of any kind: it reads nothing."""

    async def refuse(requests: Any, context: Any) -> None:
        await context.abort(error.grpc_status, error.message, (("baton-code", error.code),))

    return grpc.stream_stream_rpc_method_handler(refuse)
