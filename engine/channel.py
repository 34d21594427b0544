"""The line between the leader rank of a worker and its followers: step plans and commands down, reports up.

TCP with length-prefixed msgpack maps that have a "kind". Both ends prove that they know the worker's secret before
anything else is read; the length of a message is limited. The line also carries the rendezvous of the ranks' process
group: messages of the kind "store" are kept out of sight and replicated to every rank.

A broken line ends the worker: every rank is needed for every step. Idle lines need no traffic of ours, TCP keepalive
finds a dead machine, and a dead process closes its socket at once.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgpack

from ..kernels.process_group import ReplicatedStore
from ..proto.errors import Unavailable

Message = dict[str, Any]
OnMessage = Callable[[int, Message], None]

_log = logging.getLogger(__name__)
_MAX_MESSAGE = 32 << 20
_NONCE = 32
_MAC = 32
_HANDSHAKE_S = 2.0  # for one connection: a silent stranger must not use up the time of the others
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))


class RankLost(Unavailable):
    """A rank of this worker is gone or stalled; the worker cannot run another step."""


class _Line:
    """One end of one connection. `send` may come from any thread, `receive` from one."""

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._socket = connection
        self._lock = threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
        seconds, fraction = divmod(timeout_s, 1)
        limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, packed: bytes) -> None:
        """One packed message. Raises RankLost."""
        try:
            with self._lock:
                self._socket.sendall(struct.pack("!I", len(packed)) + packed)
        except OSError as error:
            self.close()
            raise RankLost(f"{self.peer}: {error or 'stalled'}") from error

    def receive(self) -> Message:
        """The next message. Raises RankLost when the line breaks or the peer sends something else."""
        try:
            (length,) = struct.unpack("!I", _read(self._socket, 4))
            if length > _MAX_MESSAGE:
                raise ValueError(f"a message of {length} bytes")
            message = msgpack.unpackb(_read(self._socket, length))
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                raise ValueError("a message without a kind")
            if message["kind"] == "store" and not (_is(message, "key", str) and _is(message, "value", bytes)):
                raise ValueError("a rendezvous message without key and value")
        except (OSError, ValueError, msgpack.UnpackException) as error:
            self.close()
            raise RankLost(f"{self.peer}: {error}") from error
        return message

    def close(self) -> None:
        """Also wakes whoever waits in `receive`."""
        with contextlib.suppress(OSError):  # closed by the peer already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class LeaderChannel:
    """The leader's end. `on_message(rank, message)` and `on_lost(error)` come from reader threads and must
    neither block nor raise.

    `on_lost` is called once, for the first rank that is lost, and never after `close`.
    """

    def __init__(
        self, host: str, secret: bytes, timeout_s: float, on_message: OnMessage, on_lost: Callable[[RankLost], None]
    ) -> None:
        self.store = ReplicatedStore(self._publish, timeout_s)
        self._secret = secret
        self._timeout_s = timeout_s
        self._on_message = on_message
        self._on_lost = on_lost
        self._lines: dict[int, _Line] = {}
        self._order = threading.Lock()  # every follower sees all messages in the same order
        self._lost: RankLost | None = None
        self._closed = False
        self._listener = socket.create_server((host, 0), family=_family(host))
        address = self._listener.getsockname()
        self.address = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"

    @staticmethod
    def bind(
        host: str, secret: bytes, timeout_s: float, on_message: OnMessage, on_lost: Callable[[RankLost], None]
    ) -> LeaderChannel:
        """Listen on a free port of `host`. `timeout_s` limits how long a stalled follower may hold up a message."""
        return LeaderChannel(host, secret, timeout_s, on_message, on_lost)

    def accept(self, ranks: int, timeout_s: float) -> None:
        """Wait until the followers 1 .. ranks - 1 are here, then stop listening. Raises RankLost naming the missing."""
        deadline = time.monotonic() + timeout_s
        wanted = set(range(1, ranks))
        accepted: dict[int, _Line] = {}
        with self._listener:
            while missing := wanted - accepted.keys():
                self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    connection, address = self._listener.accept()
                except OSError as error:
                    for line in accepted.values():
                        line.close()
                    raise RankLost(f"rank(s) {sorted(missing)} did not come within {timeout_s:g} s") from error
                rank = self._greet(connection, missing, str(address))
                if rank is not None:
                    accepted[rank] = _Line(connection, f"rank {rank}", self._timeout_s)
        self._lines = accepted
        for rank, line in sorted(accepted.items()):
            name = f"rank-{rank}-reader"
            threading.Thread(target=self._read_from, args=(rank, line), name=name, daemon=True).start()

    def broadcast(self, message: Message) -> None:
        """Send to every follower. Thread-safe. Raises RankLost when one is gone."""
        self._relay(message, None)

    def close(self) -> None:
        """End all lines; followers see RankLost."""
        self._closed = True
        self._listener.close()
        for line in self._lines.values():
            line.close()

    def _relay(self, message: Message, source: int | None) -> None:
        if self._lost is not None:
            raise self._lost
        packed = _pack(message)
        with self._order:
            for rank, line in self._lines.items():
                if rank != source:
                    line.send(packed)

    def _publish(self, key: str, value: bytes) -> None:
        self.broadcast({"kind": "store", "key": key, "value": value})

    def _greet(self, connection: socket.socket, wanted: set[int], peer: str) -> int | None:
        """The rank at the other end, or None (and the connection closed) when it is nobody of ours."""
        try:
            connection.settimeout(_HANDSHAKE_S)
            mine = os.urandom(_NONCE)
            connection.sendall(mine)
            hello = _read(connection, 4 + _NONCE + _MAC, time.monotonic() + _HANDSHAKE_S)
            named, theirs, proof = hello[:4], hello[4 : 4 + _NONCE], hello[4 + _NONCE :]
            if not hmac.compare_digest(proof, _prove(self._secret, b"follower", mine, theirs, named)):
                raise ValueError("the secret is wrong")
            rank = int.from_bytes(named, "big")
            if rank not in wanted:
                raise ValueError(f"rank {rank} is not expected, or here already")
            connection.sendall(_prove(self._secret, b"leader", mine, theirs, named))
        except (OSError, ValueError) as error:
            _log.warning("refused a rank connection from %s: %s", peer, error)
            connection.close()
            return None
        return rank

    def _read_from(self, rank: int, line: _Line) -> None:
        try:
            while True:
                message = line.receive()
                if message["kind"] == "store":
                    self.store.deliver(message["key"], message["value"])
                    self._relay(message, rank)
                else:
                    self._on_message(rank, message)
        except RankLost as error:
            with self._order:
                first = self._lost is None and not self._closed
                self._lost = self._lost or error
            self.store.fail(error.message)
            if first:
                self._on_lost(error)


class FollowerChannel:
    """A follower's end: a reader thread collects what the leader sends."""

    def __init__(self, line: _Line, timeout_s: float) -> None:
        self.store = ReplicatedStore(self._publish, timeout_s)
        self._line = line
        self._inbox: queue.SimpleQueue[Message | RankLost] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="leader-reader", daemon=True).start()

    @staticmethod
    def connect(address: str, rank: int, secret: bytes, timeout_s: float) -> FollowerChannel:
        """Join the leader at `address` (host:port) as `rank`. Raises RankLost when that fails within `timeout_s`."""
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + timeout_s
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
            try:
                _introduce(connection, rank, secret, deadline)
            except (OSError, ValueError):
                connection.close()
                raise
        except (OSError, ValueError) as error:
            raise RankLost(f"the leader at {address} did not take rank {rank}: {error}") from error
        return FollowerChannel(_Line(connection, "the leader", timeout_s), timeout_s)

    def receive(self) -> Message:
        """Wait for the leader's next message. Raises RankLost, also on later calls, once the line is broken."""
        message = self._inbox.get()
        if isinstance(message, RankLost):
            self._inbox.put(message)
            raise message
        return message

    def send(self, message: Message) -> None:
        """Send to the leader. Thread-safe. Raises RankLost."""
        self._line.send(_pack(message))

    def close(self) -> None:
        """End the line; `receive` raises RankLost."""
        self._line.close()

    def _publish(self, key: str, value: bytes) -> None:
        self.send({"kind": "store", "key": key, "value": value})

    def _read(self) -> None:
        try:
            while True:
                message = self._line.receive()
                if message["kind"] == "store":
                    self.store.deliver(message["key"], message["value"])
                else:
                    self._inbox.put(message)
        except RankLost as error:
            self.store.fail(error.message)
            self._inbox.put(error)


def _is(message: Message, name: str, kind: type) -> bool:
    return isinstance(message.get(name), kind)


def _introduce(connection: socket.socket, rank: int, secret: bytes, deadline: float) -> None:
    named, mine = rank.to_bytes(4, "big"), os.urandom(_NONCE)
    theirs = _read(connection, _NONCE, deadline)
    connection.sendall(named + mine + _prove(secret, b"follower", theirs, mine, named))
    if not hmac.compare_digest(_read(connection, _MAC, deadline), _prove(secret, b"leader", theirs, mine, named)):
        raise ValueError("the leader does not know the secret")


def _prove(secret: bytes, role: bytes, leader_nonce: bytes, follower_nonce: bytes, rank: bytes) -> bytes:
    return hmac.digest(secret, role + leader_nonce + follower_nonce + rank, "sha256")


def _pack(message: Message) -> bytes:
    packed = bytes(msgpack.packb(message))
    if len(packed) > _MAX_MESSAGE:
        raise ValueError(f"a message of {len(packed)} bytes; at most {_MAX_MESSAGE} are allowed")
    return packed


def _read(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    parts: list[bytes] = []
    while size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionError("the other end closed the line")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
