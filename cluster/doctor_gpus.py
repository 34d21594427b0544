"""What `baton doctor` tries on a machine with GPUs: the carriers of KV, with bytes, between two processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..kv_transfer.loopback import LoopbackFailed, measure, nccl_alone
from .findings import Finding

_LIMIT_S = 20.0
_FRAMES, _FRAME_BYTES = 64, 16 << 20
_FIX = "NCCL_DEBUG=INFO says more; another kv.transport may do"

Link = tuple[str, str, str | None]  # carrier, between what, CUDA_VISIBLE_DEVICES of the other process


def gpu_links(host: str, gpus: int) -> Iterator[Finding]:
    """NCCL alone; `cuda_ipc` within the first GPU; NCCL between the first two, where there are two."""
    try:
        nccl_alone(host, _LIMIT_S)
        yield Finding("ok", "transport", "NCCL starts, and sums over one rank")
    except (RuntimeError, ValueError) as error:
        yield Finding("fail", "transport", f"NCCL does not start: {_line(error)}", _FIX)
        return
    links: list[Link] = [("cuda_ipc", "within a GPU", None)]
    if gpus > 1:
        links.append(("nccl", "between two GPUs", "1"))
    yield from tried(host, links, _FRAMES, _FRAME_BYTES)


def tried(host: str, links: Sequence[Link], frames: int, frame_bytes: int) -> Iterator[Finding]:
    """Each link, with `frames` frames."""
    for name, where, device in links:
        try:
            rate = measure(name, host, _LIMIT_S, frames, frame_bytes, device)
            yield Finding("ok", "transport", f"{name} moves {rate / 1e9:.2f} GB/s {where}, every byte right")
        except LoopbackFailed as error:
            yield Finding("fail", "transport", f"{name} {where}: {_line(error)}", _FIX)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
