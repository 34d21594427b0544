"""Messages on a link's socket: an eight-byte prefix, then a msgpack map (control) or raw bytes (payload).

Nothing is trusted: a prefix with a wrong magic, kind or length ends the link before anything is allocated. Every read
and write has a deadline. One thread uses a `Wire`; only `interrupt` may be called from another.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import msgpack

VERSION = 1
MAX_CONTROL_BYTES = 256 << 10
MAX_PAYLOAD_BYTES = 64 << 20

_PREFIX = struct.Struct("!3sBI")  # magic, kind, length
_MAGIC = b"bKV"
_CONTROL, _PAYLOAD = 1, 2
_AHEAD_BYTES = 4096


class WireError(Exception):
    """The link is of no use any more: closed, silent, or it carried something that is not our protocol."""


class Payload:
    """The prefix of a payload was read; `size` raw bytes follow on the wire."""

    def __init__(self, size: int) -> None:
        self.size = size


class Wire:
    """A connected socket that speaks prefixed messages. `limit_s` bounds each read and write once it has begun."""

    def __init__(self, connection: socket.socket, limit_s: float) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))  # bytes read beyond what was asked for: [start, stop)
        self._start = self._stop = 0
        self.limit_s = limit_s
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.last_sent = self.last_received = time.monotonic()

    @staticmethod
    def connect(address: str, limit_s: float) -> Wire:
        """Dial host:port within `limit_s`, which also becomes the wire's limit. Raises WireError."""
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), limit_s)
        except (OSError, ValueError, OverflowError) as error:
            raise WireError(f"no connection to {address}: {error}") from error
        return Wire(connection, limit_s)

    @property
    def limit_s(self) -> float:
        """Seconds."""
        return self._limit_s

    @limit_s.setter
    def limit_s(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._socket.settimeout(limit_s)

    def fileno(self) -> int:
        """For polling, after `readable` said no."""
        return self._socket.fileno()

    def readable(self, wait_s: float) -> bool:
        """Whether a message (or the end) has begun to arrive within `wait_s`."""
        return self._start < self._stop or bool(self._poll.poll(max(0.0, wait_s) * 1000))

    def send(self, kind: str, **fields: Any) -> None:
        """Write one control message. Raises WireError."""
        data = msgpack.packb({"kind": kind, **fields})
        if len(data) > MAX_CONTROL_BYTES:
            raise WireError(f"a {kind} message of {len(data)} bytes is larger than {MAX_CONTROL_BYTES}")
        self._write(_PREFIX.pack(_MAGIC, _CONTROL, len(data)) + data)

    def send_payload(self, payload: memoryview) -> None:
        """Write a payload of flat bytes. Raises WireError."""
        self._write(_PREFIX.pack(_MAGIC, _PAYLOAD, len(payload)), payload)

    def receive(self) -> dict[str, Any] | Payload:
        """The next control message (a map with a text under "kind"), or the announcement of a payload.

        Raises WireError, also when nothing whole arrives within the limit.
        """
        prefix = bytearray(_PREFIX.size)
        self.receive_into(memoryview(prefix))
        magic, kind, size = _PREFIX.unpack(prefix)
        if magic != _MAGIC or kind not in (_CONTROL, _PAYLOAD):
            raise WireError("the peer does not speak this protocol")
        if size > (MAX_CONTROL_BYTES if kind == _CONTROL else MAX_PAYLOAD_BYTES):
            raise WireError(f"a message of {size} bytes is too large")
        if kind == _PAYLOAD:
            return Payload(size)
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return _parse(data)

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` (flat bytes). Raises WireError."""
        deadline = time.monotonic() + self._limit_s
        got = 0
        try:
            while got < len(view):
                if self._start == self._stop:
                    got += self._read(view[got:])
                    if time.monotonic() > deadline and got < len(view):
                        raise TimeoutError
                count = min(self._stop - self._start, len(view) - got)
                view[got : got + count] = self._ahead[self._start : self._start + count]
                self._start += count
                got += count
        except TimeoutError as error:
            raise WireError(f"nothing from the peer for {self._limit_s:g} s") from error
        except OSError as error:
            raise WireError(f"the link broke: {error}") from error
        self.last_received = time.monotonic()

    def _read(self, view: memoryview) -> int:
        """One read: straight into a large `view`, else into the read-ahead. Bytes that went into `view`."""
        large = len(view) >= _AHEAD_BYTES
        count = self._socket.recv_into(view if large else self._ahead)
        if count == 0:
            raise WireError("the peer closed the link")
        if large:
            return count
        self._start, self._stop = 0, count
        return 0

    def interrupt(self) -> None:
        """End the link from any thread: reads and writes in progress raise WireError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.interrupt()
        self._socket.close()

    def _write(self, head: bytes, body: memoryview | None = None) -> None:
        try:
            if body is None:
                self._socket.sendall(head)
            else:
                sent = self._socket.sendmsg([head, body]) - len(head)
                if sent < 0:
                    self._socket.sendall(head[sent:])
                self._socket.sendall(body[max(sent, 0) :])
        except TimeoutError as error:
            raise WireError(f"the peer takes nothing for {self._limit_s:g} s") from error
        except OSError as error:
            raise WireError(f"the link broke: {error}") from error
        self.last_sent = time.monotonic()


def _parse(data: bytearray) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(data)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"a control message cannot be read: {error}") from error
    if not isinstance(message, dict) or type(message.get("kind")) is not str:
        raise WireError("a control message is not a map with a kind")
    return message


def leg_of(message: Mapping[str, Any]) -> tuple[str, int, int]:
    """The leg key that a message carries under "leg". Raises WireError."""
    leg = message.get("leg")
    if not isinstance(leg, list) or [type(part) for part in leg] != [str, int, int]:
        raise WireError(f"a {message['kind']} message without a leg")
    return (leg[0], leg[1], leg[2])


def field(message: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field of a control message with exactly that type. Raises WireError."""
    value = message.get(name)
    if type(value) is not kind:
        raise WireError(f"a {message['kind']} message without a {kind.__name__} {name!r}")
    return value
