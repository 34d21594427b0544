"""Settings of one rank's transfer side; built by the cluster's configuration, which alone has defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Codec = Literal["raw", "fp8", "int8"]


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """PEM files of one rank's end of a link; both ends prove themselves to the other against `ca`."""

    certificate: str
    key: str
    ca: str


@dataclass(frozen=True, slots=True)
class TransferParams:
    """Times in seconds, sizes in bytes."""

    host: str  # the only address on which this rank listens (port 0) and from which carriers connect
    connect_timeout_s: float  # TCP connection and handshake
    frame_timeout_s: float  # without any progress of frames on their way; also the longest silence of a link in use
    idle_close_s: float  # a link without legs is closed after this
    transport: Literal["auto", "inline", "shm", "gloo", "nccl", "cuda_ipc"]
    wire: Codec  # codec of payloads; both ends of a link must have the same
    tls: TLSFiles | None  # None: links are plain TCP
    max_links: int  # open at the same time, on the sending side
    checksum: bool  # a link uses checksums when either side wants them
    max_outstanding: int  # announcements (of frames that travel together) not yet acknowledged, per link
    frame_bytes: int  # what is queued is cut into frames of this size or a little more
