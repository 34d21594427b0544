"""Messages on a link's socket: an eight-byte prefix, then a msgpack map (control) or raw bytes (payload).

Nothing is trusted: a prefix with a wrong magic, kind or length ends the link before anything is allocated. Every read
and write has a deadline. One thread uses a `Wire`; only `interrupt` may be called from another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import ssl
import struct
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack

from ..proto.failpoints import dial
from ..proto.worker_loop import let_others_run

VERSION = 1
MAX_CONTROL_BYTES = 256 << 10
MAX_PAYLOAD_BYTES = 128 << 20

_PREFIX = struct.Struct("!3sBI")  # magic, kind, length
_MAGIC = b"bKV"
_CONTROL, _PAYLOAD = 1, 2
_AHEAD_BYTES = 4096
_PROGRESS_BYTES = 1 << 18  # so much within the limit is progress
PREFIX_BYTES = _PREFIX.size


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
        self._held: list[bytes] | None = None  # messages that leave together
        self.limit_s = limit_s
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.last_sent = self.last_received = time.monotonic()

    @staticmethod
    def connect(address: str, limit_s: float, tls: ssl.SSLContext | None = None) -> Wire:
        """Dial host:port within `limit_s`, which also becomes the wire's limit. Raises WireError.

        With `tls` everything goes through it.
        """
        host, _, port = address.rpartition(":")
        try:
            connection = dial("kv.dial", (host.strip("[]"), int(port)), limit_s)
        except (OSError, ValueError, OverflowError) as error:
            raise WireError(f"no connection to {address}: {error}") from error
        return Wire(connection if tls is None else _secured(connection, tls, limit_s), limit_s)

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
        return self._start < self._stop or self._decrypted() or bool(self._poll.poll(max(0.0, wait_s) * 1000))

    def soon_readable(self, wait_s: float) -> bool:
        """`readable`, awake: for what is on its way. Whoever else wants the core has it first, and the GIL."""
        until = time.monotonic() + wait_s
        while not self.readable(0):
            if time.monotonic() >= until:
                return False
            let_others_run()
        return True

    def peer_gone(self) -> bool:
        """Whether the peer has closed its end. Never blocks; another thread may ask while the wire is open."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def unsent(self) -> int:
        """Bytes that were written and have not reached the peer's machine."""
        with contextlib.suppress(OSError):
            return int.from_bytes(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return 0

    def send(self, kind: str, **fields: Any) -> None:
        """Write one control message. Raises WireError."""
        data = packed(kind, **fields)
        if self._held is None:
            self._write(data)
        else:
            self._held.append(data)

    def send_at_once(self, kind: str, **fields: Any) -> bool:
        """Write one control message from another thread, while the wire's own is kept from writing and `together`.

        Never blocks. False: nothing was written, because that would have to wait, or the link broke. A message of which
        only a part could be written breaks it: not where messages are all that is written, a few hundred bytes a leg.
        """
        if isinstance(self._socket, ssl.SSLSocket):
            return False
        data = packed(kind, **fields)
        try:
            if os.write(self._socket.fileno(), data) < len(data):
                self.interrupt()
        except OSError:
            return False
        self.last_sent = time.monotonic()
        return True

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Control messages that are sent within leave in one write at its end. Raises WireError."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            if held:
                self._write(b"".join(held))

    def begin_payload(self, size: int) -> None:
        """Announce that the next `size` bytes are raw; `send_bytes` brings them. Raises WireError."""
        self._write(_PREFIX.pack(_MAGIC, _PAYLOAD, size))

    def send_bytes(self, data: memoryview) -> None:
        """Write a part of a payload (flat bytes), however long that takes while it goes on. Raises WireError."""
        self._write(data)

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
        return control_message(data)

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` (flat bytes), however long that takes while it goes on. Raises WireError."""
        deadline = time.monotonic() + self._limit_s
        got = counted = 0
        try:
            while got < len(view):
                if self._start == self._stop:
                    got += self._read(view[got:])
                    if got - counted >= _PROGRESS_BYTES:
                        counted, deadline = got, time.monotonic() + self._limit_s
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

    def _decrypted(self) -> bool:
        """Whether TLS holds bytes that polling the descriptor does not show."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

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
            # not SSLSocket's own: that would make a write in progress go on in plain
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.interrupt()
        self._socket.close()

    def _write(self, data: bytes | memoryview) -> None:
        try:
            if len(data) <= _PROGRESS_BYTES:
                self._socket.sendall(data)
            elif isinstance(self._socket, ssl.SSLSocket):
                for start in range(0, len(data), _PROGRESS_BYTES):  # the limit is for each call
                    self._socket.sendall(data[start : start + _PROGRESS_BYTES])
            else:
                sent = 0
                while sent < len(data):
                    sent += self._socket.send(data[sent:])
        except TimeoutError as error:
            raise WireError(f"the peer takes nothing for {self._limit_s:g} s") from error
        except OSError as error:
            raise WireError(f"the link broke: {error}") from error
        self.last_sent = time.monotonic()


def _secured(connection: socket.socket, tls: ssl.SSLContext, limit_s: float) -> ssl.SSLSocket:
    """The same connection after a handshake within the limit. Raises WireError, also where the peer has no TLS."""
    connection.settimeout(limit_s)
    try:
        return tls.wrap_socket(connection)
    except (OSError, ValueError) as error:
        connection.close()
        raise WireError(f"no TLS with the peer (has it kv.tls, from the same ca?): {error}") from error


def packed(kind: str, **fields: Any) -> bytes:
    """One control message as it travels. Raises WireError for one that is too large."""
    data = msgpack.packb({"kind": kind, **fields})
    if len(data) > MAX_CONTROL_BYTES:
        raise WireError(f"a {kind} message of {len(data)} bytes is larger than {MAX_CONTROL_BYTES}")
    return _PREFIX.pack(_MAGIC, _CONTROL, len(data)) + bytes(data)


def control_size(prefix: bytes) -> int:
    """How many bytes follow the prefix of a control message. Raises WireError for any other prefix."""
    magic, kind, size = _PREFIX.unpack(prefix)
    if magic != _MAGIC or kind != _CONTROL or size > MAX_CONTROL_BYTES:
        raise WireError("the peer does not speak this protocol")
    return int(size)


def control_message(data: bytearray) -> dict[str, Any]:
    """The body of a control message: a map with a text under "kind". Raises WireError."""
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
