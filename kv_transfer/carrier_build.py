"""Building the carrier that a handshake agreed on, at either end of a link."""

from __future__ import annotations

from .carriers import INLINE, RING, Carrier, InlineCarrier
from .cuda_ipc import build_cuda_ipc
from .frames import MAX_FRAME_TARGET, TRAILER_BYTES
from .params import TransferParams
from .shm import build_shm
from .topology import CUDA_IPC, SHM
from .torch_carrier import Rendezvous
from .wire import Wire


def build_carrier(name: str, wire: Wire, rank: int, params: TransferParams) -> tuple[Carrier, str]:
    """The carrier, and why it is inline although another was agreed on (empty when it is not).

    rank: 0 at the prefill end, 1 at the decode end. Raises WireError.
    """
    limit_s = params.frame_timeout_s / 2
    built: Carrier | None
    if name == INLINE:
        return InlineCarrier(wire), ""
    slot_bytes = min(params.frame_bytes, MAX_FRAME_TARGET) * 5 // 4 + TRAILER_BYTES  # see `pieces`
    if name == CUDA_IPC:
        built, reason = build_cuda_ipc(wire, rank == 0, RING, slot_bytes, limit_s)
    elif name == SHM:
        built, reason = build_shm(wire, rank == 0, slot_bytes, limit_s)
    else:
        built, reason = Rendezvous(wire, name, rank, params.host, limit_s).run()
    return (InlineCarrier(wire), reason) if built is None else (built, "")
