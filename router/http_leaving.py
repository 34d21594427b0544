"""Clients that leave while their answer is made."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


async def while_there(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work` to its end, or until the client leaves, which cancels it. Raises what it raises."""
    working = asyncio.create_task(work)
    left = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, left), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, left):
            task.cancel()
        await asyncio.gather(working, left, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
