"""What one prefill worker is started with; built by the cluster's configuration, which alone has defaults."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.params import EngineParams
from ..kv_transfer.params import TransferParams
from ..proto.peer_tls import PeerTLS


@dataclass(frozen=True, slots=True)
class PrefillParams:
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
    max_batch_tokens: int  # prompt tokens computed in one step
    lookahead: int  # batches that a router lets through ahead of the one that runs
    commit_timeout_s: float  # how long blocks that are not being sent are kept for the router
    fetch_min_tokens: int  # the least prefix worth taking over from a decode worker; 0: none
    fetch_timeout_s: float  # a prefix that did not come within this is computed here
