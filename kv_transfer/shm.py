"""Payloads through memory that two processes of one host share: a ring of slots that the prefill rank fills.

The ring is an anonymous file (memfd), so nothing is left behind however a process ends. It is sealed against shrinking,
or a read of the decode rank could end that process; the decode rank checks the seal and the size before it maps the
file, and maps it read-only. A slot belongs to one payload from `lend` until that is acknowledged. The decode rank
verifies a payload where it lies and copies it from there into its pool: each side writes each byte once.

The file is handed over on a Unix socket whose random abstract name travels over the link; both ends check that the
other is a process of the same user. When a larger ring is needed, its file goes the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import secrets
import select
import socket
import struct
import time
from typing import Any

import numpy as np
import torch

from .carriers import Carrier, CarrierFailed
from .frames import MAX_PARCEL_BYTES
from .topology import SHM
from .wire import Wire, WireError, field

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_RING_BYTES = 2 << 30
_NAME = re.compile("[0-9a-f]{32}")
_CREDENTIALS = struct.Struct("3i")
_PLACE = struct.Struct("!Q")
_PAGE_BYTES = 4096
_LEAST_SLOT_BYTES = 1 << 18  # room for a canary
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE; mmap has no name for it


class Ring:
    """The sender's end: slots in a sealed memfd. Raises OSError when there is no memory for it."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self.size = slots * self.slot_bytes
        if self.size > MAX_RING_BYTES:
            raise OSError(f"a ring of {self.size} bytes is larger than {MAX_RING_BYTES}")
        self.descriptor = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.descriptor, 0, self.size)  # an error now, not a signal at the first write
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            mapped = mmap.mmap(self.descriptor, self.size)
        except OSError:
            os.close(self.descriptor)
            raise
        with contextlib.suppress(OSError):  # older kernels map each page when it is first touched
            mapped.madvise(_POPULATE_WRITE)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self.free = list(range(slots))

    def slot(self, index: int, size: int) -> torch.Tensor:
        """The first `size` bytes of a slot."""
        return self._bytes[index * self.slot_bytes : index * self.slot_bytes + size]

    def close(self) -> None:
        """Give up the file; the memory lives as long as views of it and the peer's mapping."""
        os.close(self.descriptor)


class _ShmEnd:
    """What both ends are."""

    name = SHM
    device = torch.device("cpu")
    largest = MAX_PARCEL_BYTES

    def send(self, payload: torch.Tensor) -> None:
        """The decode rank's end sends nothing. Raises CarrierFailed."""
        raise CarrierFailed(f"shm: this end cannot send {payload.numel()} bytes")

    def receive(self, buffer: torch.Tensor) -> None:
        """The prefill rank's end receives nothing. Raises CarrierFailed."""
        raise CarrierFailed(f"shm: this end cannot receive {buffer.numel()} bytes")


class ShmSender(_ShmEnd):
    """The prefill rank's carrier: payloads are gathered into slots, and the frame's message says where."""

    def __init__(self, wire: Wire, door: socket.socket, ring: Ring, slots: int) -> None:
        self._wire = wire
        self._door = door
        self._ring = ring
        self._slots = slots
        self._lent: dict[int, tuple[Ring, int]] = {}  # by address
        self._closed = False

    def lend(self, size: int) -> torch.Tensor:
        """A free slot. Raises CarrierFailed when there is none, nor memory for a ring that is large enough."""
        if self._closed:
            raise CarrierFailed("shm: closed")
        if size > self._ring.slot_bytes:
            self._grow(size)
        if not self._ring.free:
            raise CarrierFailed("shm: no slot is free")
        index = self._ring.free.pop()
        slot = self._ring.slot(index, size)
        self._lent[slot.data_ptr()] = (self._ring, index)
        return slot

    def give(self, buffer: torch.Tensor) -> None:
        """The payload was acknowledged: its slot is free."""
        if (lent := self._lent.pop(buffer.data_ptr(), None)) is not None:
            ring, index = lent
            ring.free.append(index)

    def where(self, buffer: torch.Tensor) -> int:
        """Where the payload begins in the ring."""
        ring, index = self._lent[buffer.data_ptr()]
        return index * ring.slot_bytes

    def send(self, payload: torch.Tensor) -> None:
        """Bring over a payload that no frame announces (the canary): its place goes over the Unix socket."""
        if payload.numel() > self._ring.slot_bytes:
            raise CarrierFailed(f"shm: {payload.numel()} bytes that no frame announces")
        slot = self.lend(payload.numel())
        slot.copy_(payload)
        try:
            self._door.sendall(_PLACE.pack(self.where(slot)))
        except OSError as error:
            raise CarrierFailed(f"shm: {error}") from error
        finally:
            self.give(slot)

    def close(self) -> None:
        """Let the ring go; payloads that are in it stay readable here."""
        if not self._closed:
            self._closed = True
            self._door.close()
            self._ring.close()

    def _grow(self, size: int) -> None:
        """Go on with a larger ring; slots of the old one that are lent stay as they are."""
        try:
            ring = Ring(self._slots, 1 << (size - 1).bit_length())
        except OSError as error:
            raise CarrierFailed(f"shm: {error}") from error
        self._ring.close()
        self._ring = ring
        self._wire.send("ring", bytes=ring.size)
        try:
            _hand_over(self._door, ring)
        except OSError as error:
            raise CarrierFailed(f"shm: {error}") from error


class ShmReceiver(_ShmEnd):
    """The decode rank's carrier."""

    def __init__(self, door: socket.socket, ring: torch.Tensor) -> None:
        self._door = door
        self._ring: torch.Tensor | None = ring

    def view(self, at: int, size: int) -> torch.Tensor:
        """A payload where it lies; writing to it ends the process. Raises WireError for a place outside the ring."""
        if self._ring is None:
            raise CarrierFailed("shm: closed")
        if not 0 <= at <= at + size <= self._ring.numel():
            raise WireError(f"a payload of {size} bytes at {at} is outside a ring of {self._ring.numel()}")
        return self._ring[at : at + size]

    def renew(self, size: int) -> None:
        """The prefill rank has a larger ring. Views of the old one stay valid. Raises CarrierFailed."""
        try:
            self._ring = _take_over(self._door, size)
        except OSError as error:
            raise CarrierFailed(f"shm: {error}") from error

    def receive(self, buffer: torch.Tensor) -> None:
        """A payload that no frame announces (the canary). Raises CarrierFailed."""
        try:
            place = self._door.recv(_PLACE.size, socket.MSG_WAITALL)
        except OSError as error:
            raise CarrierFailed(f"shm: {error}") from error
        if len(place) != _PLACE.size:
            raise CarrierFailed("shm: the peer closed its socket")
        buffer.copy_(self.view(_PLACE.unpack(place)[0], buffer.numel()))

    def close(self) -> None:
        """Let the ring go; views of it stay valid."""
        self._ring = None
        self._door.close()


def build_shm(wire: Wire, sending: bool, slots: int, slot_bytes: int, limit_s: float) -> tuple[Carrier | None, str]:
    """One end's carrier, or None and the reason where either end could not build it. Raises WireError.

    slots, slot_bytes: of the first ring, as the sending end wants them; the other end is told.
    """
    return _offered(wire, slots, slot_bytes, limit_s) if sending else _taken(wire, limit_s)


def _offered(wire: Wire, slots: int, slot_bytes: int, limit_s: float) -> tuple[ShmSender | None, str]:
    name = secrets.token_hex(16)
    try:
        ring = Ring(slots, max(slot_bytes, _LEAST_SLOT_BYTES))
        try:
            listener = _listen(name)
        except OSError:
            ring.close()
            raise
    except (OSError, AttributeError) as error:  # AttributeError: a system without memfd
        wire.send("shm", name="", bytes=0, reason=str(error))
        return None, str(error)
    wire.send("shm", name=name, bytes=ring.size, reason="")
    door: socket.socket | None = None
    reason = ""
    try:
        with listener:
            door = _answered(listener, wire, limit_s)
        if door is not None:
            _hand_over(door, ring)
    except OSError as error:
        reason = str(error)
        if door is not None:
            door.close()
    theirs = _report(wire)
    if door is not None and not (reason or theirs):
        return ShmSender(wire, door, ring, slots), ""
    if door is not None:
        door.close()
    ring.close()
    return None, reason or theirs


def _taken(wire: Wire, limit_s: float) -> tuple[ShmReceiver | None, str]:
    message = wire.receive()
    if not isinstance(message, dict) or message["kind"] != "shm":
        raise WireError("the peer offered no ring")
    if not (name := field(message, "name", str)):
        return None, field(message, "reason", str)
    size = field(message, "bytes", int)
    if _NAME.fullmatch(name) is None:
        raise WireError("the name of a ring's socket is not one of ours")
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.settimeout(limit_s)
    try:
        door.connect(_address(name))
        _check_user(door)
        receiver = ShmReceiver(door, _take_over(door, size))
    except OSError as error:
        door.close()
        wire.send("carrier", ready=False, reason=str(error) or "unknown")
        return None, str(error)
    wire.send("carrier", ready=True, reason="")
    return receiver, ""


def _address(name: str) -> str:
    return f"\0baton-kv-{name}"  # abstract: in no folder, gone with its socket


def _listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(name))
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def _answered(listener: socket.socket, wire: Wire, limit_s: float) -> socket.socket | None:
    """The decode rank's connection; None when it said over the link that it cannot connect. Raises OSError."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(wire, select.POLLIN)
    deadline = time.monotonic() + limit_s
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
        if listener.fileno() in ready:
            door, _ = listener.accept()
            door.settimeout(limit_s)
            try:
                _check_user(door)
            except OSError:
                door.close()
                raise
            return door
        if ready:
            return None
        raise TimeoutError("the decode rank did not fetch the ring")


def _report(wire: Wire) -> str:
    """Why the decode rank has no ring; empty when it has. Raises WireError."""
    message = wire.receive()
    if not isinstance(message, dict) or message["kind"] != "carrier":
        raise WireError("the peer did not say whether it has the ring")
    if field(message, "ready", bool):
        return ""
    return f"the peer has no shm: {field(message, 'reason', str)}"


def _check_user(door: socket.socket) -> None:
    """Raises OSError when the process at the other end belongs to somebody else."""
    data = door.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    if user != os.geteuid():
        raise PermissionError(f"the peer's process belongs to user {user}")


def _hand_over(door: socket.socket, ring: Ring) -> None:
    socket.send_fds(door, [b"\0"], [ring.descriptor])


def _take_over(door: socket.socket, size: int) -> torch.Tensor:
    """The memory of the file that comes over a Unix socket, if it can be read safely. Raises OSError."""
    _, descriptors, _, _ = socket.recv_fds(door, 1, 4)
    try:
        if len(descriptors) != 1:
            raise OSError("the peer sent no ring")
        if not fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("the ring is not sealed against shrinking")
        real = os.fstat(descriptors[0]).st_size
        if real != size or not 0 < size <= MAX_RING_BYTES:
            raise OSError(f"a ring of {real} bytes came, {size} were announced")
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return _readable(mmap.mmap(descriptors[0], size, flags=flags, prot=mmap.PROT_READ))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _readable(mapped: mmap.mmap) -> torch.Tensor:
    """Its bytes as a tensor. torch knows no read-only tensors and warns of them, hence the way over an address."""
    view = np.frombuffer(mapped, dtype=np.uint8)
    memory: Any = (ctypes.c_uint8 * view.nbytes).from_address(view.ctypes.data)
    memory.keeps = view  # the mapping lives as long as the tensor
    return torch.frombuffer(memory, dtype=torch.uint8)
