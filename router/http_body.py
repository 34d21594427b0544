"""Bodies of HTTP calls: bounded in size and in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from ..proto.errors import Cancelled, DeadlineExceeded
from .errors import BodyTooLarge
from .front_door import FrontDoor

_BODY_S = 30.0  # for a whole body to arrive


async def read_body(door: FrontDoor, request: Request) -> bytes:
    """The body. Raises BodyTooLarge, and counts it; DeadlineExceeded, Cancelled."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in bounded(door, request.stream(), door.params.limits.body_bytes):
                body += part
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {_BODY_S:g} s") from None
    except ClientDisconnect:
        raise Cancelled("the client left while it sent the body") from None
    return bytes(body)


async def bounded(door: FrontDoor, parts: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    """The same parts. Raises BodyTooLarge, and counts it, after `limit` bytes."""
    size = 0
    async for part in parts:
        size += len(part)
        if size > limit:
            error = BodyTooLarge(f"the body has more than {limit} bytes")
            door.refused(error)
            raise error
        yield part
