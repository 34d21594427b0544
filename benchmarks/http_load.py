"""Streams of tokens from an OpenAI completions endpoint, with as little work per token as possible: the client shares
the machine with what it measures. Used by benchmarks/interference.py and benchmarks/service.py."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_EVENT = b"data: "


@dataclass
class Stream:
    """One request as its client sees it; times of the monotonic clock."""

    prompt: int  # its tokens
    started: float = field(default_factory=time.monotonic)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens) of each event that had tokens
    tokens: int = 0  # that arrived

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0][0] - self.started

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(when it ended, seconds) between each token and the next; tokens of one event have none between them."""
        found = []
        for (before, _), (now, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            found += [(now, now - before)] + [(now, 0.0)] * (tokens - 1)
        return found


def random_prompt(tokens: int) -> list[int]:
    """Ids of words, drawn anew at each call: no prefix cache helps."""
    return [random.randrange(1000, 40000) for _ in range(tokens)]


async def run_stream(stream: Stream, address: str, model: str, max_tokens: int) -> None:
    """Send a prompt of `stream.prompt` random tokens to `address` (host:port) and note what arrives.

    Raises RuntimeError when the answer is not a stream of exactly `max_tokens` tokens.
    """
    fields = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    request = {"model": model, "prompt": random_prompt(stream.prompt), "max_tokens": max_tokens, **fields}
    body = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        stream.started = time.monotonic()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{address}: {status.decode().strip()}: {(await reader.read(2000)).decode()}")
        await reader.readuntil(b"\r\n\r\n")
        while chunk := await _chunk(reader):
            _take(stream, chunk.split(b"\n\n"))
    finally:
        writer.close()
    if stream.tokens != max_tokens:
        raise RuntimeError(f"{address}: {stream.tokens} tokens instead of {max_tokens}")


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """One chunk of a chunked body, b"" at its end. Servers write whole events into each."""
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size + 2)
    return data[:-2]


def _take(stream: Stream, events: Sequence[bytes]) -> None:
    now = time.monotonic()
    for event in events:
        if not event.startswith(_EVENT) or event.endswith(b"[DONE]"):
            continue
        message = json.loads(event[len(_EVENT) :])
        if "error" in message:
            raise RuntimeError(str(message["error"]))
        ids = message["choices"][0].get("token_ids") if message["choices"] else None
        if ids:
            stream.arrivals.append((now, len(ids)))
            stream.tokens += len(ids)
