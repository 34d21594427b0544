"""Building the carrier that a handshake agreed on, at either end of a link."""

from __future__ import annotations

from .carriers import INLINE, Carrier, InlineCarrier, Rendezvous
from .cuda_ipc import build_cuda_ipc
from .frames import MAX_FRAME_TARGET
from .params import TransferParams
from .shm import build_shm
from .topology import CUDA_IPC, SHM
from .wire import Wire

_SLOT_FRAMES = 2  # a frame may have twice the size that it aims at


def build_carrier(name: str, wire: Wire, rank: int, params: TransferParams) -> tuple[Carrier, str]:
    """The carrier, and why it is inline although another was agreed on (empty when it is not).

    rank: 0 at the prefill end, 1 at the decode end. Raises WireError.
    """
    limit_s = params.frame_timeout_s / 2
    built: Carrier | None
    if name == INLINE:
        return InlineCarrier(wire), ""
    slots = (params.max_outstanding, _SLOT_FRAMES * min(params.frame_bytes, MAX_FRAME_TARGET))
    if name == CUDA_IPC:
        built, reason = build_cuda_ipc(wire, rank == 0, *slots, limit_s)
    elif name == SHM:
        built, reason = build_shm(wire, rank == 0, *slots, limit_s)
    else:
        built, reason = Rendezvous(wire, name, rank, params.host, limit_s).run()
    return (InlineCarrier(wire), reason) if built is None else (built, "")
