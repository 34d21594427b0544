"""How late the event loop is: everything of a router waits for it, so a gap in it is a gap in every stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_BEAT_S = 0.1  # it wakes an idle router


async def watch(observe: Callable[[float], None]) -> None:
    """Calls `observe` with the seconds by which each beat of the loop came late, for ever."""
    due = time.monotonic()
    while True:
        due = max(due + _BEAT_S, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        observe(max(0.0, time.monotonic() - due))
