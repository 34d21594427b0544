"""Settings of one rank's transfer side; built by the cluster's configuration, which alone has defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TransferParams:
    """Times in seconds, sizes in bytes."""

    host: str  # the only address on which this rank listens (port 0) and from which carriers connect
    connect_timeout_s: float  # TCP connection and handshake
    frame_timeout_s: float  # one frame, header to acknowledgement; also the longest silence of a link in use
    idle_close_s: float  # a link without legs is closed after this
    transport: Literal["auto", "inline", "gloo", "nccl"]
    checksum: bool  # a link uses checksums when either side wants them
    max_outstanding: int  # frames announced and not yet acknowledged, per link
    frame_bytes: int  # what is queued is cut into frames of this size or a little more
