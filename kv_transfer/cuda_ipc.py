"""The `cuda_ipc` carrier: payloads between two GPUs of one node, or within one, through a staging buffer of prefill's.

NOT RUN ON HARDWARE YET: what needs no GPU is tested, the calls that open a handle are written after torch's own
(torch/multiprocessing/reductions.py) and wait for a machine with CUDA. Opt-in: `kv.transport: cuda_ipc`.

The prefill rank exports one staging buffer for each link, once, as plain fields over the link; the decode rank opens
it, once. The buffer is two counters (int64) for each slot, then the slots. Frame n goes into slot n % slots, and then
n + 1 into its first counter, on one stream; the decode rank waits for that number, copies slot -> buffer on its own
stream, and writes n + 1 into the second counter, for which the prefill rank waits before it fills the slot again. The
decode rank reads nothing but the staging buffer, so a cancel frees blocks of either pool at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch

from .carriers import Carrier, CarrierFailed
from .topology import CUDA_IPC
from .wire import Wire, WireError, field

_ALIGN = 256
_LOOK_S = 0.00005
_MAX_HANDLE_BYTES = 4096
_MAX_SLOTS = 64
_COUNTER_NAME = re.compile(rb"/?[A-Za-z0-9_.-]{1,200}")  # of the shared memory in which torch counts references


@dataclass(frozen=True, slots=True)
class Handle:
    """What `UntypedStorage._share_cuda_` gives, but for the device, which has another number in another process."""

    gpu: str  # its UUID
    handle: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool
    slots: int
    slot_bytes: int

    def pack(self) -> list[Any]:
        """As plain fields."""
        return list(astuple(self))

    @staticmethod
    def unpack(data: Any) -> Handle:
        """The inverse of `pack`, every field checked. Raises ValueError."""
        kinds = [str, bytes, int, int, bytes, int, bytes, bool, int, int]
        if not isinstance(data, list) or [type(part) for part in data] != kinds:
            raise ValueError("not a handle of CUDA memory")
        found = Handle(*data)
        numbers = (found.size, found.offset, found.counter_offset)
        if not all(0 <= number < 1 << 48 for number in numbers) or len(found.gpu) > 100:
            raise ValueError("handle of CUDA memory: a number is out of range")
        if not 0 < len(found.handle) <= _MAX_HANDLE_BYTES or len(found.event) > _MAX_HANDLE_BYTES:
            raise ValueError("handle of CUDA memory: it has no believable length")
        if not _COUNTER_NAME.fullmatch(found.counter):
            raise ValueError("handle of CUDA memory: its counter has no plain name")
        if not 1 <= found.slots <= _MAX_SLOTS or found.slot_bytes < 1:
            raise ValueError("handle of CUDA memory: no slots")
        if found.size < staging_bytes(found.slots, found.slot_bytes):
            raise ValueError("handle of CUDA memory: smaller than its slots")
        return found


def staging_bytes(slots: int, slot_bytes: int) -> int:
    """Size of the staging buffer."""
    return _rounded(16 * slots) + slots * _rounded(slot_bytes)


def _rounded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class CudaIpcCarrier:
    """One end of a staging buffer (flat uint8). `peer_gone` tells that waiting is of no use."""

    name = CUDA_IPC

    def __init__(
        self, staging: torch.Tensor, slots: int, slot_bytes: int, limit_s: float, peer_gone: Callable[[], bool]
    ) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if staging.is_cuda else staging.device
        self._counters: torch.Tensor | None = staging[: 16 * slots].view(torch.int64).view(2, slots)
        self._slots = staging[_rounded(16 * slots) :][: slots * _rounded(slot_bytes)].view(slots, -1)
        self._slot_bytes = slot_bytes
        self._limit_s = limit_s
        self._peer_gone = peer_gone
        streams: Any = torch.cuda.Stream
        self._stream = streams(self.device) if staging.is_cuda else None
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._count = 0

    def begin(self, size: int) -> None:
        """Every frame has a slot of its own."""

    def buffer(self, size: int) -> torch.Tensor:
        """Memory that is copied into a slot by `send`."""
        if size > self._slot_bytes:
            raise CarrierFailed(f"{self.name}: a frame of {size} bytes, slots have {self._slot_bytes}")
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._memory[:size]

    def ahead(self, size: int, number: int) -> torch.Tensor | None:
        """There is one buffer."""
        return None

    def send(self, frame: torch.Tensor) -> None:
        """Returns when the frame is in its slot, having waited for the slot to be free."""
        counters, size = self._open(), frame.numel()
        if size > self._slot_bytes:
            raise CarrierFailed(f"{self.name}: a frame of {size} bytes, slots have {self._slot_bytes}")
        slots = len(self._slots)
        at = self._count % slots
        try:
            with torch.cuda.stream(self._stream):
                self._await_producer()
                self._await(counters[1, at], max(0, self._count + 1 - slots))
                self._slots[at, :size].copy_(frame, non_blocking=True)
                counters[0, at].fill_(self._count + 1)
            self._finish()
        except RuntimeError as error:
            raise CarrierFailed(f"{self.name}: {str(error).splitlines()[0][:200]}") from error
        self._count += 1

    def expect(self, size: int) -> None:
        """It must fit a slot."""
        self.buffer(size)

    def receive(self, size: int) -> torch.Tensor:
        """Returns when the frame is in memory of this end, and its slot may be used again."""
        counters, frame = self._open(), self.buffer(size)
        at = self._count % len(self._slots)
        try:
            with torch.cuda.stream(self._stream):
                self._await(counters[0, at], self._count + 1)
                frame.copy_(self._slots[at, :size], non_blocking=True)
                counters[1, at].fill_(self._count + 1)
            self._finish()
        except RuntimeError as error:
            raise CarrierFailed(f"{self.name}: {str(error).splitlines()[0][:200]}") from error
        self._count += 1
        return frame

    def release(self) -> None:
        """The slot is free already."""

    def _await(self, counter: torch.Tensor, number: int) -> None:
        deadline = time.monotonic() + self._limit_s
        while int(counter.item()) != number:
            if self._peer_gone() or time.monotonic() > deadline:
                raise CarrierFailed(f"{self.name}: no frame within {self._limit_s:g} s, or the peer is gone")
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Let the staging buffer go: torch frees it when both ends have."""
        self._counters = None
        self._slots = torch.empty(0, dtype=torch.uint8)

    def _open(self) -> torch.Tensor:
        if self._counters is None:
            raise CarrierFailed(f"{self.name}: closed")
        return self._counters

    def _await_producer(self) -> None:
        """The payload was made on the caller's stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self.device))

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def build_cuda_ipc(
    wire: Wire, sending: bool, slots: int, slot_bytes: int, limit_s: float
) -> tuple[Carrier | None, str]:
    """One end's carrier, or None and the reason where either end could not build it. Raises WireError.

    slots, slot_bytes: of the staging buffer, as the sending end wants them; the other end is told.
    """
    if sending:
        return _exported(wire, slots, slot_bytes, limit_s)
    return _opened(wire, limit_s)


def _exported(wire: Wire, slots: int, slot_bytes: int, limit_s: float) -> tuple[Carrier | None, str]:
    carrier, handle, reason = None, None, "no CUDA device here"
    if torch.cuda.is_available():
        try:
            device = torch.cuda.current_device()
            staging = torch.zeros(staging_bytes(slots, slot_bytes), dtype=torch.uint8, device=f"cuda:{device}")
            torch.cuda.synchronize(device)
            storage: Any = staging.untyped_storage()
            _, *fields = storage._share_cuda_()
            handle = Handle.unpack([_uuid(device), *fields, slots, slot_bytes])
            carrier, reason = CudaIpcCarrier(staging, slots, slot_bytes, limit_s, wire.peer_gone), ""
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0][:200]
    wire.send("cuda_ipc", handle=None if handle is None else handle.pack(), reason=reason)
    theirs = _heard(wire)
    if reason or field(theirs, "reason", str):
        return None, reason or f"the peer cannot open it: {theirs['reason']}"
    return carrier, ""


def _opened(wire: Wire, limit_s: float) -> tuple[Carrier | None, str]:
    theirs = _heard(wire)
    carrier: Carrier | None = None
    if theirs_reason := field(theirs, "reason", str):
        wire.send("cuda_ipc", reason="")
        return None, f"the peer has none: {theirs_reason}"
    try:
        carrier, reason = _attached(Handle.unpack(theirs.get("handle")), wire, limit_s), ""
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0][:200] or "unknown"
    wire.send("cuda_ipc", reason=reason)
    return carrier, reason


def _attached(handle: Handle, wire: Wire, limit_s: float) -> Carrier:
    """Raises ValueError when that GPU is not ours to see, RuntimeError from CUDA."""
    known = {_uuid(index): index for index in range(torch.cuda.device_count())} if torch.cuda.is_available() else {}
    if handle.gpu not in known:
        raise ValueError(f"GPU {handle.gpu} is not visible here")
    torch.zeros(1, device=f"cuda:{known[handle.gpu]}")  # a context on that GPU
    storage = torch.UntypedStorage._new_shared_cuda(
        known[handle.gpu],
        handle.handle,
        handle.size,
        handle.offset,
        handle.counter,
        handle.counter_offset,
        handle.event,
        handle.event_sync,
    )
    staging = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return CudaIpcCarrier(staging, handle.slots, handle.slot_bytes, limit_s, wire.peer_gone)


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _heard(wire: Wire) -> dict[str, Any]:
    message = wire.receive()
    if not isinstance(message, dict) or message["kind"] != "cuda_ipc":
        raise WireError("the peer did not speak of cuda_ipc when that was due")
    return message
