"""Failures that only the front door knows."""

from __future__ import annotations

from typing import ClassVar

import grpc

from ..proto.errors import BatonError, InvalidRequest


class AddressTaken(Exception):
    """A listening address is in use or cannot be bound; the message names its configuration key and the address."""


class Unauthenticated(BatonError):
    """The call has no API key, or one that nobody has."""

    code: ClassVar[str] = "unauthenticated"
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNAUTHENTICATED
    http_status: ClassVar[int] = 401


class BodyTooLarge(InvalidRequest):
    """The HTTP body is over the limit."""

    http_status: ClassVar[int] = 413


class NoSuchPath(InvalidRequest):
    """Nothing is served at that path."""

    code: ClassVar[str] = "not_found"
    http_status: ClassVar[int] = 404


class WrongMethod(InvalidRequest):
    """The path is served, but not with that method."""

    code: ClassVar[str] = "method_not_allowed"
    http_status: ClassVar[int] = 405
