"""The way of one request's answer from the event loop's callbacks to the frontend that reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from ..proto.errors import BatonError
from .output import merge
from .requests import Chunk, Output


class Mailbox:
    """Never drops: what a slow reader has not taken is merged into fewer, larger chunks.

    interval: tokens of a choice that wake the reader; its first ones, and its end, do so at once.
    shortcut: takes what is ripe at once, without waking a reader that waits for it; False: it has taken nothing.
    """

    def __init__(self, interval: int = 1) -> None:
        self._interval = interval
        self._items: list[Output] = []
        self._wake = asyncio.Event()
        self._closed = False
        self._error: BatonError | None = None
        self._awaited = False  # nothing is here, and the reader, done with what it took, waits
        self.shortcut: Callable[[Chunk], bool] | None = None

    def put(self, item: Output) -> None:
        """Adds an item for the reader."""
        ripe = not isinstance(item, Chunk) or item.offset == 0 or len(item.token_ids) >= self._interval
        if self._awaited and self.shortcut and ripe and isinstance(item, Chunk) and self.shortcut(item):
            return
        self._awaited = False
        last = self._last_chunk(item)
        if last is not None and isinstance(item, Chunk) and merge(last, item):
            ripe = ripe or len(last.token_ids) >= self._interval
        else:
            self._items.append(item)
        if ripe:
            self._wake.set()

    def close(self, error: BatonError | None) -> None:
        """Ends the answer: the reader gets what is left and then the end, or the error."""
        self._closed, self._error = True, error
        self._wake.set()

    async def read(self) -> AsyncIterator[list[Output]]:
        """All that is there, each time there is something. Raises the error that the request ended with."""
        while True:
            self._awaited = not (self._items or self._closed)
            await self._wake.wait()
            self._wake.clear()
            items, self._items = self._items, []
            if items:
                yield items
            if self._closed and not self._items:
                if self._error is not None:
                    raise self._error
                return

    def _last_chunk(self, item: Output) -> Chunk | None:
        if not self._items or not isinstance(item, Chunk):
            return None
        return next((i for i in reversed(self._items) if isinstance(i, Chunk) and i.choice == item.choice), None)
