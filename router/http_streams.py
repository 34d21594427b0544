"""Several answers as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from ..proto.errors import BatonError
from .requests import Output

_MERGED_PARTS = 64  # parts of several prompts' answers that may wait for a slow reader


async def merged(answers: list[AsyncIterator[list[Output]]]) -> AsyncIterator[tuple[int, list[Output]]]:
    """(prompt, parts) of several answers as they come; the first error ends it."""
    if len(answers) == 1:
        async for outputs in answers[0]:
            yield 0, outputs
        return
    queue: asyncio.Queue[tuple[int, list[Output] | BaseException | None]] = asyncio.Queue(_MERGED_PARTS)

    async def pump(prompt: int, answer: AsyncIterator[list[Output]]) -> None:
        try:
            async for outputs in answer:
                await queue.put((prompt, outputs))
            await queue.put((prompt, None))
        except BatonError as error:
            await queue.put((prompt, error))

    tasks = [asyncio.create_task(pump(prompt, answer)) for prompt, answer in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            prompt, part = await queue.get()
            if isinstance(part, BaseException):
                raise part
            if part is None:
                left -= 1
            else:
                yield prompt, part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
