"""A TCP proxy that breaks connections on request, between a prefill and a decode rank or a router and a worker.

It speaks HTTP CONNECT, so that one proxy serves every target: a P rank dials through it with the failpoint
`kv.dial=via(HOST:PORT)`, everything that speaks gRPC with the environment variable `grpc_proxy`. A test finds the
tunnel that it means and changes it while it is in use.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import psutil

Direction = Literal["up", "down"]  # towards the target | towards the one who dialled
_CHUNK = 64 << 10
_POLL_S = 0.005
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


@dataclass
class Faults:
    """What one direction of a tunnel suffers; may be changed at any time."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: as fast as it goes
    swallow: bool = False  # half-open: what comes is read and lost, the connection stays
    stall: bool = False  # nothing is read: the sender's window closes
    corrupt_in: int | None = None  # flips a bit of the byte that comes after so many
    cut_in: int | None = None  # cuts both directions after so many bytes
    close_delay_s: float = 0.0  # slow close: the end of the stream is passed on so much later


class Tunnel:
    """One connection. `moved` counts bytes by direction."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source_port = source.getpeername()[1]
        self.target_port = target.getpeername()[1]
        self.faults: dict[Direction, Faults] = {"up": Faults(), "down": Faults()}
        self.moved: dict[Direction, int] = {"up": 0, "down": 0}
        self.on_bytes: Callable[[Direction, bytes], None] = lambda direction, data: None
        self._ends = (source, target)
        self._left = 2
        self._lock = threading.Lock()
        self._reset = False
        self._threads = [
            threading.Thread(target=self._pump, args=args, name="fault-proxy", daemon=True)
            for args in (("up", source, target), ("down", target, source))
        ]

    def start(self) -> None:
        """Begin to pass bytes on."""
        self._ends[0].sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for thread in self._threads:
            thread.start()

    def between(self, source_pid: int, target_pid: int) -> bool:
        """Whether these processes are its ends."""
        listens = self.target_port in _ports(target_pid, psutil.CONN_LISTEN)
        return listens and self.source_port in _ports(source_pid, psutil.CONN_ESTABLISHED)

    @property
    def open(self) -> bool:
        """Whether either direction still runs."""
        return self._left > 0

    def cut(self, reset: bool = True) -> None:
        """End both directions at once: with RST, or with FIN."""
        self._reset = self._reset or reset
        for end in self._ends:
            with contextlib.suppress(OSError):
                if reset:  # the RST goes out when the pumps have let go; a FIN must not come before it
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)

    def _pump(self, direction: Direction, source: socket.socket, target: socket.socket) -> None:
        faults = self.faults[direction]
        with contextlib.suppress(OSError):
            while True:
                while faults.stall:
                    time.sleep(_POLL_S)
                data = bytearray(source.recv(_CHUNK))
                if not data:
                    break
                self.moved[direction] += len(data)
                self.on_bytes(direction, bytes(data))
                if faults.latency_s or faults.bytes_per_s:
                    time.sleep(faults.latency_s + (len(data) / faults.bytes_per_s if faults.bytes_per_s else 0.0))
                if not faults.swallow:
                    target.sendall(self._damaged(faults, data))
                if faults.cut_in == 0:
                    self.cut()
        if not self._reset:
            time.sleep(faults.close_delay_s)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
        with self._lock:
            self._left -= 1
            last = not self._left
        for end in self._ends if last else ():
            end.close()

    @staticmethod
    def _damaged(faults: Faults, data: bytearray) -> bytearray:
        if faults.corrupt_in is not None:
            if faults.corrupt_in < len(data):
                data[faults.corrupt_in] ^= 1
                faults.corrupt_in = None
            else:
                faults.corrupt_in -= len(data)
        if faults.cut_in is not None:
            data = data[: faults.cut_in]
            faults.cut_in -= len(data)
        return data


class FaultProxy:
    """`address` takes CONNECT; `tunnels` are those that were made, oldest first. `blackhole`: new connections are
    accepted, and nothing ever comes back."""

    def __init__(self) -> None:
        self.tunnels: list[Tunnel] = []
        self.blackhole = False
        self.on_open: Callable[[Tunnel], None] = lambda tunnel: None  # before a byte has passed
        self._held: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="fault-proxy-accept", daemon=True)
        self._thread.start()

    def between(self, source_pid: int, target_pid: int) -> list[Tunnel]:
        """The open tunnels from one process to another."""
        return [tunnel for tunnel in self.tunnels if tunnel.open and tunnel.between(source_pid, target_pid)]

    def close(self) -> None:
        """Ends everything."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for tunnel in self.tunnels:
            for faults in tunnel.faults.values():
                faults.stall = False
            tunnel.cut()
        for end in self._held:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="fault-proxy-dial", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            host, port = _asked_for(connection)
            if self.blackhole:
                self._held.append(connection)
                return
            target = socket.create_connection((host, port), 5)
            target.settimeout(None)
            for end in (connection, target):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError):
            connection.close()
            return
        tunnel = Tunnel(connection, target)
        self.on_open(tunnel)
        self.tunnels.append(tunnel)
        with contextlib.suppress(OSError):
            tunnel.start()


@contextmanager
def fault_proxy() -> Iterator[FaultProxy]:
    """A proxy for the length of a block."""
    proxy = FaultProxy()
    try:
        yield proxy
    finally:
        proxy.close()


def _ports(pid: int, status: str) -> set[int]:
    """A process's own ports in this state."""
    return {c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == status}


def _asked_for(connection: socket.socket) -> tuple[str, int]:
    """The target that a CONNECT names. Raises ValueError."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte or len(head) > 4096:
            raise ValueError("no request")
        head += byte
    method, place, _ = head.split(b"\r\n")[0].decode().split(" ")
    host, _, port = place.rpartition(":")
    if method != "CONNECT":
        raise ValueError(method)
    return host.strip("[]"), int(port)
