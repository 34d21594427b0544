"""Frames through memory that two processes of one host share: a ring of slots that the prefill rank fills.

The ring is an anonymous file (memfd), so nothing is left behind however a process ends. It is sealed against shrinking,
or a read of the decode rank could end that process; the decode rank checks the seal and the size before it maps the
file, and maps it read-only. Frame n lies in slot n % RING: the prefill rank gathers it there, the decode rank verifies
it there and copies it into its pool, so each side writes each byte once, and the few slots stay in the caches.

The file is handed over on a Unix socket whose random abstract name travels over the link; both ends check that the
other is a process of the same user. After that the same socket carries a byte for each slot that was filled, and one
the other way for each that is free again.
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

from .carriers import RING, Carrier, CarrierFailed
from .topology import SHM
from .wire import Wire, WireError, field

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_RING_BYTES = 2 << 30
_NAME = re.compile("[0-9a-f]{32}")
_CREDENTIALS = struct.Struct("3i")
_PAGE_BYTES = 4096
_LEAST_SLOT_BYTES = 1 << 18  # room for a canary
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE; mmap has no name for it


class Ring:
    """The sender's end: slots in a sealed memfd. Raises OSError when there is no memory for it."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = -(-max(slot_bytes, _LEAST_SLOT_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        self.size = RING * self.slot_bytes
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
        self.slots = _slots(torch.frombuffer(mapped, dtype=torch.uint8))

    def close(self) -> None:
        """Give up the file; the memory lives as long as views of it and the peer's mapping."""
        os.close(self.descriptor)


class _ShmEnd:
    """What both ends are: a socket on which bytes count slots, and how many frames went through."""

    name = SHM
    device = torch.device("cpu")

    def __init__(self, wire: Wire, door: socket.socket, limit_s: float) -> None:
        self._door = door
        self._limit_s = limit_s
        self._closed = False
        self._count = 0  # frames that were sent or received
        self._told = 0  # slots that the peer's bytes have counted
        self._frames: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * RING  # what each slot was last lent as
        self._poll = select.poll()
        self._poll.register(door, select.POLLIN)
        self._poll.register(wire, select.POLLRDHUP)
        door.setblocking(False)

    def begin(self, size: int) -> None:
        """Every frame has a slot of its own."""

    def _hear(self, count: int) -> None:
        """Wait until the peer has counted `count` slots."""
        deadline = time.monotonic() + self._limit_s
        while not self._heard(count):
            left = deadline - time.monotonic()
            ready = [descriptor for descriptor, _ in self._poll.poll(max(0.0, left * 1000))]
            if not ready:
                raise CarrierFailed(f"shm: nothing from the peer for {self._limit_s:g} s")
            if self._door.fileno() not in ready:
                raise CarrierFailed("shm: the peer closed the link")

    def _heard(self, count: int) -> bool:
        """Whether the peer has counted `count` slots by now."""
        while self._told < count:
            if self._closed:
                raise CarrierFailed("shm: closed")
            try:
                said = self._door.recv(RING)
            except BlockingIOError:
                return False
            except OSError as error:
                raise CarrierFailed(f"shm: {error}") from error
            if not said:
                raise CarrierFailed("shm: the peer closed its socket")
            self._told += len(said)
        return True

    def _lent(self, slots: list[torch.Tensor], size: int, number: int = 0) -> torch.Tensor:
        """The beginning of the current slot, or of one `number` slots on: the same tensor while sizes are the same."""
        if self._closed:
            raise CarrierFailed("shm: closed")
        slot = (self._count + number) % RING
        if self._frames[slot].numel() != size:
            self._frames[slot] = slots[slot][:size]
        return self._frames[slot]

    def _say(self) -> None:
        """Count one slot for the peer."""
        try:
            self._door.send(b"\0")
        except OSError as error:
            raise CarrierFailed(f"shm: {error}") from error


class ShmSender(_ShmEnd):
    """The prefill rank's carrier."""

    def __init__(self, wire: Wire, door: socket.socket, limit_s: float, ring: Ring) -> None:
        super().__init__(wire, door, limit_s)
        self._ring = ring

    def buffer(self, size: int) -> torch.Tensor:
        """The next slot, once the decode rank is done with what was in it."""
        if size > self._ring.slot_bytes:
            raise CarrierFailed(f"shm: {size} bytes, slots have {self._ring.slot_bytes}")
        self._hear(self._count + 1 - RING)
        return self._lent(self._ring.slots, size)

    def ahead(self, size: int, number: int) -> torch.Tensor | None:
        """The slot of that frame, if the decode rank is done with what was in it."""
        if size > self._ring.slot_bytes or not self._heard(self._count + number + 1 - RING):
            return None
        return self._lent(self._ring.slots, size, number)

    def send(self, frame: torch.Tensor) -> None:
        """Say that the slot is filled."""
        if (slot := self._lent(self._ring.slots, frame.numel())) is not frame:
            slot.copy_(frame)
        self._count += 1
        self._say()

    def expect(self, size: int) -> None:
        """This end receives nothing."""
        raise CarrierFailed("shm: this end cannot receive")

    def receive(self, size: int) -> torch.Tensor:
        """This end receives nothing."""
        raise CarrierFailed("shm: this end cannot receive")

    def release(self) -> None:
        """This end receives nothing."""

    def close(self) -> None:
        """Let the ring go."""
        if not self._closed:
            self._closed = True
            self._frames = []
            self._door.close()
            self._ring.close()


class ShmReceiver(_ShmEnd):
    """The decode rank's carrier."""

    def __init__(self, wire: Wire, door: socket.socket, limit_s: float, ring: torch.Tensor) -> None:
        super().__init__(wire, door, limit_s)
        self._slots = _slots(ring)
        self._held = False

    def buffer(self, size: int) -> torch.Tensor:
        """This end sends nothing."""
        raise CarrierFailed("shm: this end cannot send")

    def ahead(self, size: int, number: int) -> torch.Tensor | None:
        """This end sends nothing."""
        return None

    def send(self, frame: torch.Tensor) -> None:
        """This end sends nothing."""
        raise CarrierFailed("shm: this end cannot send")

    def expect(self, size: int) -> None:
        """It must fit a slot."""
        if self._closed or size > self._slots[0].numel():
            raise CarrierFailed(f"shm: closed, or a frame of {size} bytes")

    def receive(self, size: int) -> torch.Tensor:
        """The next frame where it lies; writing to it ends the process."""
        self._hear(self._count + 1)
        self._held = True
        frame = self._lent(self._slots, size)
        self._count += 1
        return frame

    def release(self) -> None:
        """The slot may be filled again."""
        if self._held:
            self._held = False
            self._say()

    def close(self) -> None:
        """Let the ring go; views of it stay valid."""
        if not self._closed:
            self._closed = True
            self._slots = self._frames = []
            self._door.close()


def build_shm(wire: Wire, sending: bool, slot_bytes: int, limit_s: float) -> tuple[Carrier | None, str]:
    """One end's carrier, or None and the reason where either end could not build it. Raises WireError.

    slot_bytes: as the sending end wants them; the other end is told.
    """
    return _offered(wire, slot_bytes, limit_s) if sending else _taken(wire, limit_s)


def _offered(wire: Wire, slot_bytes: int, limit_s: float) -> tuple[ShmSender | None, str]:
    name = secrets.token_hex(16)
    try:
        ring = Ring(slot_bytes)
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
        return ShmSender(wire, door, limit_s, ring), ""
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
        receiver = ShmReceiver(wire, door, limit_s, _take_over(door, size))
    except OSError as error:
        door.close()
        wire.send("carrier", ready=False, reason=str(error) or "unknown")
        return None, str(error)
    wire.send("carrier", ready=True, reason="")
    return receiver, ""


def _slots(ring: torch.Tensor) -> list[torch.Tensor]:
    size = ring.numel() // RING
    return [ring[at * size : (at + 1) * size] for at in range(RING)]


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
        if real != size or not 0 < size <= MAX_RING_BYTES or size % RING:
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
