"""A small HTTP/1.1 client on asyncio: one connection that is kept open, JSON bodies, whole answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

_CONNECT_S = 10.0
_ANSWER_S = 3600.0  # the service has deadlines of its own; this one is for a network that went silent
_MOST_BYTES = 1 << 30  # of one answer or chunk


class Unreachable(ConnectionError):
    """No connection can be made."""


class Broken(ConnectionError):
    """The connection ended before the whole answer was there, or what came is no HTTP."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a service is."""

    host: str
    port: int
    secure: bool
    prefix: str  # of every path

    @staticmethod
    def parse(url: str) -> Origin:
        """`http://host:port`, also https, with a path before /v1 or with the /v1. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("expected a URL such as http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Origin(parts.hostname, parts.port or (443 if secure else 80), secure, prefix)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.secure else ''}://{host}:{self.port}{self.prefix}"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. The names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpConnection:
    """One connection to `origin`, opened when it is needed. One request at a time, each with `headers`. context: of
    https; None: the system's authorities."""

    def __init__(
        self, origin: Origin, headers: Mapping[str, str] | None = None, context: ssl.SSLContext | None = None
    ) -> None:
        self._origin = origin
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._context = context
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        """Drop the connection; an answer that is still being made is cancelled by the service."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def request(self, method: str, path: str, body: bytes = b"") -> Reply:
        """Send and wait for the whole answer. Raises Unreachable, Broken."""
        if self._streams is not None:
            with contextlib.suppress(Broken):  # the service may have closed it while it was idle
                return await self._exchange(self._streams, method, path, body)
        return await self._exchange(await self._connect(), method, path, body)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        origin = self._origin
        context = (self._context or ssl.create_default_context()) if origin.secure else None
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(origin.host, origin.port, ssl=context)
        except TimeoutError:
            raise Unreachable(f"no connection within {_CONNECT_S:g} s") from None
        except OSError as error:
            raise Unreachable(error.strerror or str(error)) from None
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._streams = reader, writer
        return self._streams

    async def _exchange(
        self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], method: str, path: str, body: bytes
    ) -> Reply:
        reader, writer = streams
        origin = self._origin
        head = (
            f"{method} {origin.prefix}{path} HTTP/1.1\r\nHost: {origin.host}:{origin.port}\r\n"
            f"{self._headers}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        whole = False
        try:
            async with asyncio.timeout(_ANSWER_S):
                writer.write(head.encode() + body)
                await writer.drain()
                reply = await _read_reply(reader)
            whole = reply.headers.get("connection", "").lower() != "close"
            return reply
        except TimeoutError:
            raise Broken(f"no answer within {_ANSWER_S:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            raise Broken(f"the connection broke: {error}") from None
        finally:
            if not whole:  # cancelled included
                self.close()


async def _read_reply(reader: asyncio.StreamReader) -> Reply:
    """Raises EOFError, OSError, and ValueError for what is no HTTP."""
    status = 100
    while status // 100 == 1:  # interim answers
        version, _, rest = (await _line(reader)).partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"the answer is no HTTP/1.1 but {version!r:.50}")
        status = int(rest[:3])
        headers = await _headers(reader)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return Reply(status, headers, await _chunks(reader))
    if "content-length" in headers:
        return Reply(status, headers, await reader.readexactly(_size(headers["content-length"], 10)))
    return Reply(status, {**headers, "connection": "close"}, await reader.read())


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    while line := await _line(reader):
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return headers


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := _size((await _line(reader)).partition(";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await _headers(reader)  # trailers
    return bytes(body)


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("it ended inside the answer's head")
    return line.decode("latin-1").rstrip("\r\n")


def _size(digits: str, base: int) -> int:
    size = int(digits, base)
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    return size
