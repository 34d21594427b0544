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

    def fileno(self) -> int:
        """For polling."""
        return self._socket.fileno()

    def readable(self, wait_s: float) -> bool:
        """Whether a message (or the end) has begun to arrive within `wait_s`."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, wait_s) * 1000))

    def send(self, kind: str, **fields: Any) -> None:
        """Write one control message. Raises WireError."""
        data = msgpack.packb({"kind": kind, **fields})
        if len(data) > MAX_CONTROL_BYTES:
            raise WireError(f"a {kind} message of {len(data)} bytes is larger than {MAX_CONTROL_BYTES}")
        self._write(_PREFIX.pack(_MAGIC, _CONTROL, len(data)) + data)

    def send_payload(self, payload: memoryview) -> None:
        """Write a payload of flat bytes. Raises WireError."""
        self._write(_PREFIX.pack(_MAGIC, _PAYLOAD, len(payload)), more=True)
        self._write(payload)

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
        deadline = time.monotonic() + self.limit_s
        got = 0
        try:
            while got < len(view):
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                count = self._socket.recv_into(view[got:])
                if count == 0:
                    raise WireError("the peer closed the link")
                got += count
        except TimeoutError as error:
            raise WireError(f"nothing from the peer for {self.limit_s:g} s") from error
        except OSError as error:
            raise WireError(f"the link broke: {error}") from error
        self.last_received = time.monotonic()

    def interrupt(self) -> None:
        """End the link from any thread: reads and writes in progress raise WireError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.interrupt()
        self._socket.close()

    def _write(self, data: bytes | memoryview, more: bool = False) -> None:
        flags = getattr(socket, "MSG_MORE", 0) if more else 0
        try:
            self._socket.settimeout(self.limit_s)
            self._socket.sendall(data, flags)
        except TimeoutError as error:
            raise WireError(f"the peer takes nothing for {self.limit_s:g} s") from error
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
