"""Process groups (gloo, NCCL) that rendezvous over a channel the caller already has, and listen on one address only.

torch's own TCPStore listens on all interfaces, so it is not used. Instead every participant holds a full replica of
the rendezvous keys: `ReplicatedStore.set` keeps the value and publishes it, the caller's channel carries it to all
other participants, and they call `deliver`. Both groups are built by hand, without `init_process_group`, so a process
may hold any number of them, each with its own limit.

How to use it (the same on every rank):

1. Build `ReplicatedStore(publish)`; `publish(key, value)` sends to ALL other ranks and may be called from any thread.
   A channel reader thread (never the thread that builds the group, which blocks) calls `store.deliver(key, value)`.
2. Call `make_group(...)` on all ranks at about the same time. It returns once all pairs are connected (gloo), or at
   once (NCCL connects at its first operation, and reads the store then: warm it up before declaring readiness).
3. One store serves one group. After any timeout or peer death throw both away; a new group needs a new store, and
   the channel must not mix up the keys of the two (put a generation number beside each published key).
4. When the channel breaks, call `store.fail(reason)`: a rendezvous in progress ends at once instead of at the limit.

gloo facts that callers rely on: an operation that times out closes that group for good; a receive buffer must have
exactly the sender's size (a longer message aborts the process); move bytes (uint8) and keep the dtype elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import ipaddress
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, Work

LINK_CHANNELS = 4  # each channel costs GPU memory and SMs; a link is the bottleneck long before
_ENVIRONMENT = threading.Lock()
_NEVER_S = 86_400.0
_SO_ATTACH_FILTER = 26  # Linux; the socket module has no name for it
_BPF_RETURN = 6


class ReplicatedStore(Store):
    """A rendezvous store without sockets: all replicas are kept equal by `publish` and `deliver`.

    `publish(key, value)` must bring the pair to every other participant's `deliver`. `timeout_s` limits every read.
    """

    def __init__(self, publish: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._publish = publish
        self._limit_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._published = bytearray()
        self._failure = ""
        self._changed = threading.Condition()

    @property
    def published(self) -> bytes:
        """All values that were set here, one after the other."""
        with self._changed:
            return bytes(self._published)

    def deliver(self, key: str, value: bytes) -> None:
        """A pair published by another participant. Thread-safe, never blocks."""
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """The channel is gone: present and future reads of missing keys raise ConnectionError with `reason`."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        """Keep and publish a pair."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._published += data
        self.deliver(key, data)
        self._publish(key, data)

    def get(self, key: str) -> bytes:
        """The value of `key`, waiting for it. Raises TimeoutError, or ConnectionError after `fail`."""
        self._await([key], self._limit_s)
        return self._values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, waiting for all of them."""
        self._await(keys, self._limit_s)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Keep and publish several pairs."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Return when all keys are there. Raises TimeoutError, or ConnectionError after `fail`."""
        self._await(keys, self._limit_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there now."""
        with self._changed:
            return all(key in self._values for key in keys)

    def has_extended_api(self) -> bool:
        """Whether multi_get and multi_set exist."""
        return True

    def num_keys(self) -> int:
        """How many pairs this replica holds."""
        with self._changed:
            return len(self._values)

    def delete_key(self, key: str) -> bool:
        """Forget a pair in this replica only."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def add(self, key: str, amount: int) -> int:
        """Counters would need one owner; no group of ours uses them. Raises NotImplementedError."""
        raise NotImplementedError(f"a replicated store has no counters (key {key!r}, amount {amount})")

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Change the limit of reads."""
        self._limit_s = timeout.total_seconds()

    def clone(self) -> ReplicatedStore:
        """The same replica: it is thread-safe, so a second handle needs no copy."""
        return self

    def _await(self, keys: Sequence[str], limit_s: float) -> None:
        deadline = time.monotonic() + min(limit_s, _NEVER_S)
        with self._changed:
            while not all(key in self._values for key in keys):
                missing = [key for key in keys if key not in self._values]
                if self._failure:
                    raise ConnectionError(f"rendezvous of {missing}: {self._failure}")
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(f"rendezvous: no {missing} within {limit_s:g} s")
                self._changed.wait(left)


def interface_of(host: str) -> str:
    """The network interface that owns `host` (an address or a name). Raises ValueError when none of ours does."""
    address = str(ipaddress.ip_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))
    for interface, owned in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in owned):
            return interface
    if ipaddress.ip_address(address).is_loopback:
        return interface_of("127.0.0.1")
    raise ValueError(f"{host} ({address}) is not an address of this machine")


def _refuse_connections(published: bytes) -> None:
    """Lets nobody connect any more: all pairs of the group are connected, and gloo keeps every stranger's socket.

    The listener itself is gloo's and must stay: it gets a packet filter that drops everything. It is the listening
    socket whose address the group has `published` for its peers; other threads open and close sockets meanwhile, so
    no descriptor is believed to be what it was a moment ago.
    """
    for name in os.listdir("/proc/self/fd"):
        if (held := _held(int(name))) is not None:
            with held:
                if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and _raw_address(held) in published:
                    _drop_all(held)


def _held(descriptor: int) -> socket.socket | None:
    """A handle of our own on an internet socket; None for anything else, and when it was closed meanwhile."""
    try:
        own = os.dup(descriptor)
    except OSError:
        return None
    try:
        held = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        return None
    if held.family in (socket.AF_INET, socket.AF_INET6):
        return held
    held.close()
    return None


def _raw_address(listener: socket.socket) -> bytes:
    """The beginning of its `sockaddr_in` or `sockaddr_in6`, as the kernel and gloo write it."""
    host, port = listener.getsockname()[:2]
    family = struct.pack("=HH", listener.family, socket.htons(port))
    if listener.family == socket.AF_INET6:
        return family + bytes(4) + socket.inet_pton(socket.AF_INET6, host)
    return family + socket.inet_aton(host)


def _drop_all(held: socket.socket) -> None:
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    held.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(instruction)))


class Group(Protocol):
    """What a group can do, as torch spells it: lists of tensors in, a `Work` out whose `wait(limit)` finishes it.

    `wait()` raises RuntimeError when a peer died or the limit passed; the group is of no use after that.
    """

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def allreduce(self, tensors: list[Tensor], /) -> Work: ...
    def broadcast(self, tensors: list[Tensor], /) -> Work: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work: ...
    def send(self, tensors: list[Tensor], to_rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], from_rank: int, tag: int, /) -> Work: ...
    def abort(self) -> None: ...


def link_environment(timeout_s: float) -> dict[str, str]:
    """What torch reads when the group of a link is made, unless it is set already.

    A failed or late operation must not end the process: whoever waits for it finds out, and aborts. With the ranks of a
    model it must (torch's default): a sum that was cut off would pass for a result.
    """
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # abort the communicator, and leave the process alone
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, round(timeout_s))),
    }


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """With these set, where they are not."""
    with _ENVIRONMENT:
        added = {name: value for name, value in values.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


def make_group(
    backend: str,
    store: ReplicatedStore,
    rank: int,
    size: int,
    timeout_s: float,
    host: str,
    channels: int | None = LINK_CHANNELS,
) -> Group:
    """A process group of `size` ranks that uses the network only through `host`, an address of this machine.

    backend: "gloo" (CPU tensors) or "nccl" (CUDA tensors; the current device is the rank's device). `timeout_s` limits
    the rendezvous and every operation. `channels`: CTAs that NCCL may take while others compute, and then it connects
    without blocking, within the limit; None: as many as it likes.

    Raises ValueError for another backend, a host that is not ours, or NCCL in a
    torch without it; TimeoutError when the peers do not come in time, ConnectionError when the channel failed, and
    RuntimeError from torch when a pair cannot connect.
    """
    limit = datetime.timedelta(seconds=timeout_s)
    if backend == "gloo":
        interface_of(host)
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        # Eager connection: lazily connected groups ignored the limit in some builds, and read the store at any time.
        options._devices = [kind.create_device(hostname=host, lazy_init=False)]
    elif backend == "nccl":
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise ValueError("this torch has no NCCL, or there is no CUDA device")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(host)}")
        kind = dist.ProcessGroupNCCL
        options = kind.Options()
        if channels is not None:
            options.config.blocking = 0
            options.config.min_ctas, options.config.max_ctas = 1, channels
    else:
        raise ValueError(f"unknown process group backend {backend!r}: gloo or nccl")
    options._timeout = limit
    is_link = backend == "nccl" and channels is not None
    # gloo's constructor waits for the peer, which may be a thread of this process: it holds no lock meanwhile
    with _environment(link_environment(timeout_s)) if is_link else contextlib.nullcontext():
        group: Group = kind(store, rank, size, options)
    if backend == "gloo":
        _refuse_connections(store.published)
    # C++ keeps only its half of the store alive: tie the Python half to the group's life.
    weakref.finalize(group, store.fail, "its group is gone")
    return group
