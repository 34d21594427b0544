"""Our errors as gRPC statuses: google.rpc's rich details, and plain trailers for clients that do not read those."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from ..proto import baton_pb2 as api
from ..proto.errors import BatonError

DOMAIN = "baton"  # of ErrorInfo
Context = grpc.aio.ServicerContext[Any, Any]


async def abort(context: Context, error: BatonError, request_id: str = "") -> NoReturn:
    """Ends the call with the error's status, its details and its trailers. Raises CancelledError when it is over."""
    rich = rpc_status.to_status(status_of(error, request_id))
    trailers = (*_trailers(error, request_id), *rich.trailing_metadata)
    try:
        await context.abort(error.grpc_status, error.message, trailers)
    except grpc.aio.InternalError:  # the client's deadline passed in this very moment: nobody hears it
        raise asyncio.CancelledError from None


def status_of(error: BatonError, request_id: str = "") -> status_pb2.Status:
    """ErrorInfo always; BadRequest where a field is to blame, RetryInfo where it is known when to try again."""
    status = status_pb2.Status(code=code_of(error), message=error.message)
    metadata = {"request_id": request_id} if request_id else {}
    info = error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=DOMAIN, metadata=metadata)
    status.details.add().Pack(info)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s > 0:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def failure(error: BatonError) -> api.Failure:
    """The error of one request among others."""
    return api.Failure(
        status=code_of(error),
        code=error.code,
        message=error.message,
        field=error.field,
        retry_after_s=error.retry_after_s,
    )


def code_of(error: BatonError) -> int:
    """The status as a number."""
    number: int = error.grpc_status.value[0]
    return number


def _trailers(error: BatonError, request_id: str) -> list[tuple[str, str]]:
    trailers = [("baton-code", error.code)]
    if error.field:
        trailers.append(("baton-field", error.field))
    if request_id:
        trailers.append(("x-request-id", request_id))
    if error.retry_after_s > 0:
        trailers.append(("grpc-retry-pushback-ms", str(int(1000 * error.retry_after_s))))  # gRPC's own retries obey it
    return trailers
