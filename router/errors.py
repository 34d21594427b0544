"""Failures that only the front door knows."""

from __future__ import annotations

from typing import ClassVar

from ..proto.errors import InvalidRequest


class AddressTaken(Exception):
    """A listening address is in use or cannot be bound; the message names its configuration key and the address."""


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
