"""Clients of the overload test, in a process of their own: first as many as are served, then many times more.

python -m baton.tests.harness.overload_clients      (an Offer as one JSON line on stdin; lines of JSON on stdout)
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import uvloop
from baton.cluster.http_client import Broken, HttpConnection, Origin

_TICK_S = 0.005


@dataclass(frozen=True, slots=True)
class Offer:
    """`clients`, one request after the other for `best_s`; then for `seconds` `times` what they were served a second,
    however it goes."""

    url: str
    clients: int
    tokens: int
    best_s: float
    seconds: float
    times: float


@dataclass
class Load:
    """What became of the requests of one load. Seconds."""

    served: int = 0
    refused: list[float] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)


class Clients:
    """Connections are kept for the next request: what is measured is the service, not how they are made."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._origin = Origin.parse(offer.url)
        self._idle: list[HttpConnection] = []
        fields = {"model": "tiny", "prompt": [5] * 16, "max_tokens": offer.tokens, "ignore_eos": True}
        self._body = json.dumps(fields).encode()

    async def run(self) -> None:
        """Says `best` per second, then `quarter` and `end` in time, then all figures."""
        offer = self._offer
        best, begun = Load(), time.monotonic()

        async def repeat() -> None:
            while time.monotonic() < begun + offer.best_s:
                await self._one(best)

        await asyncio.gather(*(repeat() for _ in range(offer.clients)))
        capacity = best.served / (time.monotonic() - begun)
        _say(best=capacity, best_others=best.others)
        over, tasks, sent = Load(), set[asyncio.Task[None]](), 0
        begun, marked = time.monotonic(), False
        while (passed := time.monotonic() - begun) < offer.seconds:
            while sent < passed * capacity * offer.times:
                task = asyncio.create_task(self._one(over))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                sent += 1
            if not marked and passed > offer.seconds / 4:
                marked = True
                _say(quarter=sent)
            await asyncio.sleep(_TICK_S)
        goodput = over.served / passed
        _say(end=sent)
        await asyncio.gather(*tasks)
        refused = sorted(over.refused)
        points = {f"p{part}": refused[math.ceil(part / 100 * len(refused)) - 1] for part in (50, 99)} if refused else {}
        _say(goodput=goodput, offered=sent / passed, refused=len(refused), others=over.others, **points)

    async def _one(self, load: Load) -> None:
        connection = self._idle.pop() if self._idle else HttpConnection(self._origin)
        begun = time.monotonic()
        try:
            reply = await connection.request("POST", "/v1/completions", self._body)
        except (Broken, OSError) as error:
            load.others[str(error)] = load.others.get(str(error), 0) + 1
            connection.close()
            return
        took = time.monotonic() - begun
        self._idle.append(connection)
        if reply.status == 200:
            load.served += 1
        elif reply.status == 429 and int(reply.headers.get("retry-after", "0")) >= 1:
            load.refused.append(took)
        else:
            load.others[str(reply.status)] = load.others.get(str(reply.status), 0) + 1


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    uvloop.run(Clients(Offer(**json.loads(sys.stdin.readline()))).run())
