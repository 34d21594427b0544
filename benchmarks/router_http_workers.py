"""Simulated HTTP workers for the peer of `router.py`: OpenAI's stream of one event per token, on the same beat.

python -m baton.benchmarks.router_http_workers      (Beat as one JSON line on stdin)
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from baton.benchmarks.router_workers import Clock

_JSON = b"Content-Type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class Beat:
    """As in router_workers.Simulation."""

    pairs: int
    step_s: float
    clock: str


class Worker:
    """One HTTP server. The text of a token is its id, see `Clock`."""

    def __init__(self, number: int, beat: Beat, clock: Clock) -> None:
        self._offset = beat.step_s * number / beat.pairs
        self._beat, self._clock = beat, clock
        self._streams: dict[asyncio.StreamWriter, int] = {}
        self._done: dict[asyncio.StreamWriter, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._task = asyncio.create_task(self._step())
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = next((int(v) for k, v in _headers(head) if k == b"content-length"), 0)
                body = await reader.readexactly(size)
                if head.startswith(b"POST"):
                    await self._stream(writer, json.loads(body))
                else:
                    _answer(writer, {"object": "list", "status": "ok", "data": [{"id": "model", "object": "model"}]})
        except (asyncio.IncompleteReadError, ConnectionError):
            self._leave(writer)
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._streams[writer] = int(body["max_tokens"])
        done = self._done[writer] = asyncio.Event()
        self._say(writer, self._clock.stamp())
        await done.wait()
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _say(self, writer: asyncio.StreamWriter, token_id: int) -> None:
        choice = {"index": 0, "text": f"{token_id} ", "logprobs": None, "finish_reason": None}
        event = {"id": "cmpl-1", "created": 1, "model": "model", "object": "text_completion", "choices": [choice]}
        writer.write(_chunk(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"))
        self._streams[writer] -= 1
        if not self._streams[writer] or writer.is_closing():
            self._leave(writer)

    def _leave(self, writer: asyncio.StreamWriter) -> None:
        self._streams.pop(writer, None)
        if done := self._done.pop(writer, None):
            done.set()

    async def _step(self) -> None:
        due = time.monotonic() + self._offset
        while True:
            due = max(due + self._beat.step_s, time.monotonic() - self._beat.step_s)
            await asyncio.sleep(due - time.monotonic())
            token_id = self._clock.stamp()
            for writer in list(self._streams):
                self._say(writer, token_id)


def _headers(head: bytes) -> list[tuple[bytes, bytes]]:
    lines = head.split(b"\r\n")[1:]
    return [(k.strip().lower(), v.strip()) for k, _, v in (line.partition(b":") for line in lines)]


def _answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 200 OK\r\n" + _JSON + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def _main() -> None:
    beat = Beat(**json.loads(sys.stdin.readline()))
    clock = Clock(beat.clock)
    workers = [Worker(i, beat, clock) for i in range(beat.pairs)]
    print(json.dumps({"urls": [await worker.start() for worker in workers]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())
