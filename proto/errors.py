"""The error tree: one class for each way in which a request can fail, with its gRPC status and HTTP code.

Workers send an error over the wire as `code` (the class's name in CODES), `message` and `field`; `from_wire` makes it
the same exception again on the other side.
"""

from __future__ import annotations

from typing import ClassVar

import grpc


class BatonError(Exception):
    """Base of all errors that a client may see. `retryable`: another attempt or another worker may succeed."""

    code: ClassVar[str] = "internal"
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InternalError(BatonError):
    """A fault of ours; the request ends, the service goes on."""


class InvalidRequest(BatonError):
    """A field of the request cannot be served as given; `field` names it."""

    code = "invalid_request"
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400


class Unauthenticated(BatonError):
    """The call has no API key, or one that nobody has."""

    code = "unauthenticated"
    grpc_status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class UnknownModel(BatonError):
    """The request names a model that is not served here."""

    code = "unknown_model"
    grpc_status = grpc.StatusCode.NOT_FOUND
    http_status = 404


class Exhausted(BatonError):
    """No capacity now: queues or pools are full. Carries a retry hint."""

    code = "exhausted"
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    retryable = True


class Unavailable(BatonError):
    """No worker can serve this now: starting, draining, or lost while serving."""

    code = "unavailable"
    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class DeadlineExceeded(BatonError):
    """The request's own deadline passed."""

    code = "deadline_exceeded"
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class Cancelled(BatonError):
    """The client left or asked to stop."""

    code = "cancelled"
    grpc_status = grpc.StatusCode.CANCELLED
    http_status = 499


class TransferFailed(BatonError):
    """The KV of a leg did not arrive whole: link, checksum, range or deadline."""

    code = "transfer_failed"
    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class Incompatible(BatonError):
    """Two workers' KV layouts cannot be converted into each other; the message lists the differences."""

    code = "incompatible"
    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 500


class ConfigError(Exception):
    """A mistake in configuration or arguments: commands print it and exit 2 before anything is loaded."""


CODES: dict[str, type[BatonError]] = {
    kind.code: kind
    for kind in (
        InternalError,
        InvalidRequest,
        Unauthenticated,
        UnknownModel,
        Exhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        TransferFailed,
        Incompatible,
    )
}


def from_wire(code: str, message: str, field: str = "", retry_after_s: float = 0.0) -> BatonError:
    """The exception that a peer reported; an unknown code is an internal error that keeps the message."""
    return CODES.get(code, InternalError)(message, field=field, retry_after_s=retry_after_s)
