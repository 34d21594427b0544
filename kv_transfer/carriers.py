"""What moves the frames of a parcel, once the receiver has accepted it: one at a time, in the announced order.

The sender fills the buffer that its carrier lends and has it sent; the receiver is lent the next frame until it asks
for another. Buffers are few and used in turn, so that what was just written is still in the processor's cache when it
is read. `inline` uses the link's own socket; torch_carrier.py, shm.py and cuda_ipc.py have the others. A link stays
inline unless both ends could build what they agreed on.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..kernels.memory import prefer_huge_pages
from ..proto.failpoints import armed, reach
from .wire import Wire

INLINE = "inline"
RING = 4  # buffers of a carrier that both ends work on at the same time
_SLOWEST = 16 << 20  # bytes a second


class CarrierFailed(Exception):
    """The carrier is of no use any more; the link itself may be."""


class Carrier(Protocol):
    """Moves frames (uint8, one dimension). Every call raises CarrierFailed, or WireError where the link itself broke.

    One end of a link sends and the other receives.
    """

    name: str
    device: torch.device  # where frames are

    def begin(self, size: int) -> None:
        """The frames of a parcel follow, `size` bytes in all."""
        ...

    def buffer(self, size: int) -> torch.Tensor:
        """Room for the next frame, of any content; waits until a buffer is free."""
        ...

    def ahead(self, size: int, number: int) -> torch.Tensor | None:
        """Room for the frame that comes `number` frames after the next, for which `buffer` need not be called then.

        None: the carrier has none now, or never. Until the frame before it was sent, the same room may be lent again.
        """
        ...

    def send(self, frame: torch.Tensor) -> None:
        """Bring over what was lent. Returns when the caller may go on; the bytes may still be on their way."""
        ...

    def expect(self, size: int) -> None:
        """A frame of so many bytes comes behind those that were expected before."""
        ...

    def receive(self, size: int) -> torch.Tensor:
        """Wait for the next expected frame, of this size. It stays as it is until `release`."""
        ...

    def release(self) -> None:
        """The frame that was received last is not needed any more."""
        ...

    def close(self) -> None:
        """Free what it holds. The peer's calls fail soon."""
        ...


class InlineCarrier:
    """Frames on the link's own socket, through one buffer."""

    name = INLINE
    device = torch.device("cpu")

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._frame = self._memory  # what was lent last, and its bytes: most frames have the same size
        self._view = bytes_of(self._memory)
        self._left = 0  # bytes of the payload before the place of a failpoint

    def begin(self, size: int) -> None:
        """Write the prefix of a payload."""
        self._wire.begin_payload(size)
        self._left = size // 2

    def buffer(self, size: int) -> torch.Tensor:
        """Always free: what was sent before is in the socket."""
        if self._memory.numel() < size:
            self._memory = prefer_huge_pages(torch.empty(size, dtype=torch.uint8))
        if len(self._view) != size:
            self._frame = self._memory[:size]
            self._view = bytes_of(self._frame)
        return self._frame

    def ahead(self, size: int, number: int) -> torch.Tensor | None:
        """The one buffer is that of the frame which is being sent."""
        return None

    def send(self, frame: torch.Tensor) -> None:
        """Write the bytes of one frame."""
        view = self._view if frame is self._frame else bytes_of(frame)
        if armed("prefill.half_payload") and 0 <= self._left < len(view):
            self._wire.send_bytes(view[: self._left])
            reach("prefill.half_payload")
            view = view[self._left :]
            self._left = -1
        self._left -= len(view)
        self._wire.send_bytes(view)

    def expect(self, size: int) -> None:
        """The wire says when they come."""

    def receive(self, size: int) -> torch.Tensor:
        """Read the bytes of one frame of a payload whose prefix was read."""
        frame = self.buffer(size)
        self._wire.receive_into(self._view)
        return frame

    def release(self) -> None:
        """The one buffer is used again anyway."""

    def close(self) -> None:
        """The socket belongs to the link."""


def patience_s(name: str, size: int) -> float:
    """How many seconds more than usual `size` bytes may take on a carrier that does not show how far it is."""
    return 0.0 if name == INLINE else size / _SLOWEST


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, without a copy."""
    flat = tensor if tensor.dtype is torch.uint8 and tensor.dim() == 1 else tensor.reshape(-1).view(torch.uint8)
    array: Any = flat.numpy()
    return memoryview(array)
