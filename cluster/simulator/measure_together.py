"""What the two pools of a running cluster do to each other where they share a machine."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence

from ...client.completion import Completion
from ...proto.step_time import StepTime
from .measure_rig import Rig, timing_of

_BATCH, _SHORT, _LENGTH = 4, 32, 256  # sequences, their prompts, and the prompts beside them
_ALONE_S = 1.5
_TOGETHER_S = 4.0
_LEAST = 10  # tokens of a stream in a window


async def together(rig: Rig, prefill: StepTime, decode: StepTime) -> list[tuple[float, float]]:
    """Time with the other pool at work / time alone: of prompts, of steps; empty where the answers were too short.

    Streams run by themselves, with prompts one after the other, and by themselves again. Prompts go on to the decode
    worker, as they do under load; between two of them the prefill worker rests a little, so its share of the time
    counts.
    """
    batch, length = min(_BATCH, rig.limits.max_sequences), min(_LENGTH, rig.limits.longest - 2)
    alone = [timing_of(await rig.prompt(length, 2)).prefill_s for _ in range(3)]
    step_s = decode.seconds((1.0, float(batch), batch * 2.0 * _SHORT))
    output = min(rig.limits.longest - _SHORT, round((2 * _ALONE_S + 1.1 * _TOGETHER_S) / step_s))
    streams = [asyncio.create_task(rig.prompt(_SHORT, output)) for _ in range(batch)]
    await asyncio.sleep(_ALONE_S + batch * prefill.seconds(rig.features(_SHORT)))
    began, beside = time.monotonic(), list[float]()
    while time.monotonic() < began + _TOGETHER_S and not any(stream.done() for stream in streams):
        beside.append(timing_of(await rig.prompt(length, 2)).prefill_s)
    ended = time.monotonic()
    dones = await asyncio.gather(*streams)
    starts, ends = max(d.arrivals[0][0] for d in dones), min(d.arrivals[-1][0] for d in dones)
    windows = ([(starts, began), (ended, ends)], [(began, min(ended, ends))])
    by_themselves, disturbed = (_pace(dones, inside, batch, decode) for inside in windows)
    if by_themselves is None or disturbed is None or not beside:
        return []
    share = min(1.0, sum(beside) / (ended - began))
    slower = disturbed / by_themselves
    return [(statistics.median(beside) / statistics.median(alone), 1 + (slower - 1) / max(share, 0.2))]


def _pace(
    dones: Sequence[Completion], windows: Sequence[tuple[float, float]], batch: int, decode: StepTime
) -> float | None:
    """Time of the steps in these windows / what the law says of them; None: there are too few."""
    took = expected = 0.0
    count = 0
    for done in dones:
        moments = [when for when, _ in done.arrivals]
        for number, (before, now) in enumerate(itertools.pairwise(moments), 1):
            if any(begin <= before and now <= end for begin, end in windows):
                took += now - before
                expected += decode.seconds((1.0, float(batch), batch * float(_SHORT + number)))
                count += 1
    return took / expected if count >= _LEAST * len(dones) else None
