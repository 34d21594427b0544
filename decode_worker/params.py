"""What one decode worker is started with; built by the cluster's configuration, which alone has defaults."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.params import EngineParams, SpeculationParams
from ..kv_transfer.params import TransferParams
from ..proto.peer_tls import PeerTLS


@dataclass(frozen=True, slots=True)
class DecodeParams:
    """The same for all ranks of the worker. Times in seconds."""

    worker_id: str
    incarnation: str
    engine: EngineParams
    transfer: TransferParams
    host: str  # on which the Worker service and the rank channel listen
    port: int  # of the Worker service; 0: any free one
    secret: bytes  # shared by the ranks of this worker: rank channel and tickets
    start_timeout_s: float  # for all ranks to find each other and load
    rank_timeout_s: float  # of one collective
    heartbeat_s: float
    dead_after_s: float  # a router silent for so long has lost its session
    peer_tls: PeerTLS | None  # of the Worker service
    max_sequences: int  # choices that run, or hold a reservation, at the same time
    max_batch_tokens: int  # of prompts that it computes itself: in one step, beside the batch
    reserve_wait_s: float  # longest wait for blocks before a reservation is refused
    commit_timeout_s: float  # from ticket to commit, or from one sign of progress to the next; also of held blocks
    speculation: SpeculationParams
