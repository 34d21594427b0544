"""What a failed call meant, as the error that the router raised."""

from __future__ import annotations

from typing import Any

import grpc

from ..proto import baton_pb2 as api
from ..proto.errors import CODES, BatonError, InternalError, InvalidRequest, Unavailable, from_wire

_TOO_LARGE = "message larger than max"


def as_error(error: Any, address: str) -> BatonError:
    """The error that the server meant by a failed call, asyncio's or not; a connection that failed is Unavailable and
    names the address, a message that gRPC itself found too large is not to be tried again."""
    trailers = {key: str(value) for key, value in (error.trailing_metadata() or ()) if not key.endswith("-bin")}
    message = error.details() or error.code().name
    code = trailers.get("baton-code", "")
    if code:
        pushback = trailers.get("grpc-retry-pushback-ms", "0")
        return from_wire(code, message, trailers.get("baton-field", ""), int(pushback) / 1000)
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(f"{address} is not the gRPC port of a router (router.grpc): {message}")
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return Unavailable(f"{address}: {message}")
    if _TOO_LARGE in message:  # gRPC's own refusal, which trying again does not change
        if message.startswith("CLIENT"):
            return InternalError(f"a message of the answer is too large for this client ({message})")
        return InvalidRequest(f"the request is larger than {address} takes ({message})")
    for kind in CODES.values():
        if kind.grpc_status == error.code():
            return kind(message)
    return InternalError(message)


def of_failure(failure: api.Failure) -> BatonError:
    """The error of one request of a batch."""
    return from_wire(failure.code, failure.message, failure.field, failure.retry_after_s)
