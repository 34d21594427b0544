"""How long an event loop stood still, without what other processes took of the machine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

_BEAT_S = 0.01


class Gaps:
    """The worst gap so far. Of a gap at most as much counts as this process computed in it, in all its threads: a
    busy machine gives the loop its turns late, and that says nothing about the loop."""

    worst_s = 0.0
    beats = 0

    async def watch(self) -> None:
        """For ever."""
        last, used = time.monotonic(), time.process_time()
        while True:
            await asyncio.sleep(_BEAT_S)
            now, computed = time.monotonic(), time.process_time()
            self.worst_s = max(self.worst_s, min(now - last - _BEAT_S, computed - used))
            self.beats += 1
            last, used = now, computed


@contextlib.asynccontextmanager
async def gaps() -> AsyncIterator[Gaps]:
    """Of the running loop, as long as the block runs."""
    found = Gaps()
    watching = asyncio.create_task(found.watch())
    try:
        yield found
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
