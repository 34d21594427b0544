"""Who may come in: one thread that accepts connections, hears their hello, and hands over those that showed a ticket.

A connection is a stranger until its hello was accepted. Strangers cost a descriptor each and no thread; there are few
at a time, each has a short while, and when one too many comes the oldest goes, so silent ones keep nobody out. With
TLS the hello comes through it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from ..proto.errors import BatonError, Incompatible, TransferFailed, Unavailable
from .wire import PREFIX_BYTES, WireError, control_message, control_size, packed

_log = logging.getLogger(__name__)
MAX_STRANGERS = 32
_MAX_HELLO_BYTES = 64 << 10
_ACCEPTED_AT_ONCE = 8
_READS_AT_ONCE = 16
_TLS_RECORD = 0x16
_PAUSE_S = 0.1

Greet = Callable[[socket.socket, dict[str, Any]], None]


class Stranger:
    """One connection that has not been let in, read without blocking."""

    def __init__(self, connection: socket.socket, tls: ssl.SSLContext | None, deadline: float) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = deadline
        self.events = select.POLLIN
        self.parting = False  # it was refused
        self._tls = tls
        self._known = False  # whether it speaks TLS, if it must and only then
        self._secure = tls is None
        self._data = bytearray()
        self._size = PREFIX_BYTES

    def step(self) -> dict[str, Any] | None:
        """Read what is there; its first control message, when that is whole.

        Raises WireError for what is not our protocol, Incompatible for plain where TLS is due or the other way round,
        and OSError (ssl.SSLError is one) from the connection.
        """
        try:
            if not self._known:
                self._look()
            if not self._secure:
                self._handshake()
            return self._read()
        except (BlockingIOError, ssl.SSLWantReadError):
            self.events = select.POLLIN
        except ssl.SSLWantWriteError:
            self.events = select.POLLOUT
        return None

    def refuse(self, error: BatonError) -> None:
        """Tell it why, if it listens. What it still sends is thrown away: closing before that would lose the reason."""
        self.parting = True
        self.events = select.POLLIN
        with contextlib.suppress(OSError, ValueError):
            self.connection.send(packed("refused", code=error.code, message=error.message))
            socket.socket.shutdown(self.connection, socket.SHUT_WR)

    def left(self) -> bool:
        """Whether a refused peer has gone."""
        try:
            for _ in range(_READS_AT_ONCE):
                # beneath TLS, which has no more to say after a failed handshake
                if not socket.socket.recv(self.connection, _MAX_HELLO_BYTES):
                    return True
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            return True
        return False

    def _look(self) -> None:
        first = self.connection.recv(1, socket.MSG_PEEK)
        if not first:
            raise WireError("the peer closed the link")
        if (first[0] == _TLS_RECORD) != (self._tls is not None):
            plain, secure = ("prefill", "decode") if self._tls is not None else ("decode", "prefill")
            raise Incompatible(f"{secure} speaks TLS (kv.tls), {plain} does not")
        self._known = True

    def _handshake(self) -> None:
        if self._tls is not None and not isinstance(self.connection, ssl.SSLSocket):
            self.connection = self._tls.wrap_socket(self.connection, server_side=True, do_handshake_on_connect=False)
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.do_handshake()
        self._secure = True

    def _read(self) -> dict[str, Any]:
        while True:
            if len(self._data) == PREFIX_BYTES and self._size == PREFIX_BYTES:
                size = control_size(bytes(self._data))
                if size > _MAX_HELLO_BYTES:
                    raise WireError(f"a hello of {size} bytes is too large")
                self._size += size
            if len(self._data) == self._size:
                return control_message(self._data[PREFIX_BYTES:])
            data = self.connection.recv(self._size - len(self._data))
            if not data:
                raise WireError("the peer closed the link")
            self._data += data


class Doorman:
    """Listens on `host` at a free port, see `address`. Strangers have `limit_s` each.

    `greet(connection, hello)` gets every first message, in the doorman's thread, and takes the connection over; where
    it raises a BatonError or WireError the connection is refused with that reason instead. Raises OSError when the
    host cannot be listened on.
    """

    def __init__(self, host: str, tls: ssl.SSLContext | None, limit_s: float, greet: Greet) -> None:
        self._tls = tls
        self._limit_s = limit_s
        self._greet = greet
        self._listener = listen(host)
        name, port = self._listener.getsockname()[:2]
        self.address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        self._strangers: dict[int, Stranger] = {}  # by descriptor, oldest first
        self._ended = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="kv-accept", daemon=True)
        self._thread.start()

    def close(self, limit_s: float) -> None:
        """Stop listening and drop all strangers; waits for the thread."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(BrokenPipeError):  # it has looked at `_ended` just now
            os.write(self._wake_write, b"\0")
        self._thread.join(limit_s)
        os.close(self._wake_write)

    def _run(self) -> None:
        try:
            while not self._ended:
                self._turn()
        finally:
            self._listener.close()
            for stranger in self._strangers.values():
                stranger.connection.close()
            self._strangers.clear()
            os.close(self._wake_read)

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        for descriptor, stranger in self._strangers.items():
            poll.register(descriptor, stranger.events)
        oldest = next(iter(self._strangers.values()), None)
        wait_s = None if oldest is None else max(0.0, oldest.deadline - time.monotonic()) * 1000 + 1
        ready = [descriptor for descriptor, _ in poll.poll(wait_s)]
        for descriptor in ready:
            if descriptor in self._strangers:
                self._hear(descriptor)
        self._drop_late()
        if self._listener.fileno() in ready:
            self._accept()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                _log.exception("accepting a KV link failed")
                self._drop_oldest()
                time.sleep(_PAUSE_S)
                return
            if len(self._strangers) >= MAX_STRANGERS:
                self._drop_oldest()
            descriptor = connection.fileno()
            self._strangers[descriptor] = Stranger(connection, self._tls, time.monotonic() + self._limit_s)
            self._hear(descriptor)

    def _hear(self, descriptor: int) -> None:
        stranger = self._strangers[descriptor]
        try:
            if stranger.parting:
                if stranger.left():
                    self._drop(descriptor)
                return
            if (hello := stranger.step()) is not None:
                self._greet(stranger.connection, hello)
                del self._strangers[descriptor]
            return
        except BatonError as error:
            reason = error
        except (WireError, OSError) as error:
            reason = TransferFailed(f"the hello was not understood: {error}")
        except Exception as error:  # the door stays open for others
            _log.exception("a KV link failed at its hello")
            reason = Unavailable(f"the hello could not be served: {error}")
        _log.info("a KV link was refused: %s", reason)
        stranger.refuse(reason)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for descriptor in [d for d, stranger in self._strangers.items() if stranger.deadline <= now]:
            self._drop(descriptor, TransferFailed(f"no hello within {self._limit_s:g} s"))

    def _drop_oldest(self) -> None:
        for descriptor in list(self._strangers)[:1]:
            self._drop(descriptor, Unavailable(f"{MAX_STRANGERS} connections came without a hello after this one"))

    def _drop(self, descriptor: int, reason: BatonError | None = None) -> None:
        stranger = self._strangers.pop(descriptor)
        if reason is not None and not stranger.parting:
            stranger.refuse(reason)
            stranger.left()
        stranger.connection.close()


def listen(host: str) -> socket.socket:
    """A listener on that address only, at a free port. Raises OSError."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
