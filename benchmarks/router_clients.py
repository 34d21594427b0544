"""Clients for `router.py`: many streams with as little work per token as possible, in a process of their own.

python -m baton.benchmarks.router_clients      (a Load as one JSON line on stdin; the figures as JSON on stdout)
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import asdict, dataclass, field

import grpc
import numpy as np
from baton.benchmarks.router_workers import FIRST_ID, Clock
from baton.proto import baton_pb2 as api

_IDS = re.compile(rb'"token_ids":\[([0-9,]*)\]')


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` at the same time, each one answer of `max_tokens` after the other until `seconds` have passed."""

    address: str
    protocol: str  # http | grpc | text (HTTP without token ids: what is counted are events)
    streams: int
    prompt: int
    max_tokens: int
    warm_s: float
    seconds: float
    clock: str
    model: str


@dataclass
class Figures:
    """Of the window. Seconds."""

    tokens: int = 0
    messages: int = 0
    requests: int = 0
    concurrent: int = 0
    ttft: list[float] = field(default_factory=list)
    delay: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Clients:
    """All streams of a load."""

    def __init__(self, load: Load) -> None:
        self.load, self.figures = load, Figures()
        self._clock = Clock(load.clock)
        self._begin = time.monotonic() + load.warm_s
        self._end = self._begin + load.seconds
        self._open = 0

    async def run(self) -> Figures:
        """All streams, until the end of the window."""
        one = self._grpc if self.load.protocol == "grpc" else self._http
        tasks = [asyncio.create_task(self._repeat(one, i)) for i in range(self.load.streams)]
        await asyncio.sleep(self._begin - time.monotonic())
        print(json.dumps({"window": "begins"}), flush=True)
        await asyncio.sleep(self._end - time.monotonic())
        print(json.dumps({"window": "ends"}), flush=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.figures

    async def _repeat(self, one: object, number: int) -> None:
        await asyncio.sleep(number / self.load.streams * self.load.warm_s * 0.6)  # not all at once
        while True:
            try:
                await one(number)  # type: ignore[operator]
            except (OSError, asyncio.IncompleteReadError, RuntimeError, ValueError, grpc.aio.AioRpcError) as error:
                self.figures.errors.append(str(error)[:200])
                await asyncio.sleep(0.2)

    def _took(self, ids: list[int], started: float | None) -> None:
        now = time.monotonic()
        if not self._begin <= now < self._end:
            return
        figures = self.figures
        figures.tokens += len(ids)
        figures.messages += 1
        if started is not None:
            figures.ttft.append(now - started)
        if ids and ids[-1] >= FIRST_ID:
            figures.delay.append(now - self._clock.said(ids[-1]))

    def _entered(self, by: int) -> None:
        self._open += by
        self.figures.concurrent = max(self.figures.concurrent, self._open)

    async def _http(self, number: int) -> None:
        load = self.load
        fields: dict[str, object] = {"temperature": 0, "ignore_eos": True, "stream": True}
        if load.protocol == "http":
            fields |= {"return_token_ids": True}
        prompt: object = [FIRST_ID + (number * 31 + i) % 30000 for i in range(load.prompt)]
        if load.protocol == "text":
            prompt = " word" * load.prompt
        body = json.dumps({"model": load.model, "prompt": prompt, "max_tokens": load.max_tokens, **fields}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        host, _, port = load.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        try:
            while True:
                started: float | None = time.monotonic()
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                status = await reader.readuntil(b"\r\n\r\n")
                if b" 200 " not in status[:20]:
                    raise RuntimeError((await reader.read(300)).decode())
                self._entered(1)
                try:
                    while chunk := await self._chunk(reader):
                        started = self._events(chunk, started)
                finally:
                    self._entered(-1)
                self.figures.requests += self._begin <= time.monotonic() < self._end
        finally:
            writer.close()

    async def _chunk(self, reader: asyncio.StreamReader) -> bytes:
        size = int(await reader.readline(), 16)
        return (await reader.readexactly(size + 2))[:-2]

    def _events(self, chunk: bytes, started: float | None) -> float | None:
        if self.load.protocol == "text":
            for event in chunk.split(b"\n\n"):
                if event.startswith(b"data: {") and b'"text":""' not in event:
                    at = re.search(rb'"text":"(\d+) "', event)
                    self._took([int(at.group(1))] if at else [0], started)
                    started = None
            return started
        for found in _IDS.findall(chunk):
            if found:
                self._took([int(i) for i in found.split(b",")], started)
                started = None
        return started

    async def _grpc(self, number: int) -> None:
        load = self.load
        ids = [FIRST_ID + (number * 31 + i) % 30000 for i in range(load.prompt)]
        request = api.GenerateRequest(
            token_ids=api.TokenIds(ids=ids), max_tokens=load.max_tokens, temperature=0, ignore_eos=True
        )
        async with grpc.aio.insecure_channel(load.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_stream(
                "/baton.v1.Baton/Generate",
                request_serializer=api.GenerateRequest.SerializeToString,
                response_deserializer=api.GenerateResponse.FromString,
            )
            while True:
                started: float | None = time.monotonic()
                self._entered(1)
                try:
                    async for message in call(request, timeout=600):
                        if message.HasField("tokens") and message.tokens.token_ids:
                            self._took(list(message.tokens.token_ids), started)
                            started = None
                finally:
                    self._entered(-1)
                self.figures.requests += self._begin <= time.monotonic() < self._end


def _summary(figures: Figures) -> dict[str, object]:
    values = asdict(figures)
    for name in ("ttft", "delay"):
        points = np.percentile(values[name], [50, 90, 99]).tolist() if values[name] else [float("nan")] * 3
        values[name] = dict(zip(("p50", "p90", "p99"), points, strict=True))
    values["errors"] = [len(figures.errors), *figures.errors[:3]]
    return values


if __name__ == "__main__":
    wanted = Load(**json.loads(sys.stdin.readline()))
    print(json.dumps(_summary(asyncio.run(Clients(wanted).run()))), flush=True)
