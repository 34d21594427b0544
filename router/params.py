"""The router's parameters: frozen and without defaults; cluster/config.py is the only place that chooses values."""

from __future__ import annotations

from dataclasses import dataclass

from ..proto.peer_tls import PeerTLS


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for; every bound is checked before anything is allocated."""

    n: int  # choices
    logprobs: int  # top alternatives per token
    stops: int  # stop strings
    stop_chars: int  # of one stop string
    stop_token_ids: int
    logit_bias: int  # entries
    prompts: int  # prompts of one HTTP completion call
    messages: int  # of one chat
    prompt_bytes: int  # UTF-8 bytes of the input text, before it is tokenised
    grammar_bytes: int  # of one schema, pattern or grammar
    tools: int  # of one chat
    body_bytes: int  # of one HTTP body or gRPC message
    batch: int  # requests of one GenerateBatch call
    parallelism: int  # of these, at the same time


@dataclass(frozen=True, slots=True)
class GrpcParams:
    """The public gRPC port; see GrpcSection of cluster/config.py."""

    keepalive_s: float
    keepalive_timeout_s: float
    min_ping_interval_s: float
    max_connection_age_s: float | None
    max_streams: int  # of one connection
    reflection: bool
    channelz: bool
    open_inference: bool


@dataclass(frozen=True, slots=True)
class BatchParams:
    """/v1/files and /v1/batches."""

    folder: str | None  # where they are kept; None: they are off
    files: int  # at the same time, and batches
    file_bytes: int  # of one that is uploaded
    parallelism: int  # requests of a batch at the same time


@dataclass(frozen=True, slots=True)
class TenantParams:
    """One tenant; see cluster/tenants.py."""

    name: str
    key_hashes: tuple[str, ...]  # hexadecimal SHA-256 of its API keys
    weight: float  # its share of the prompts that wait, relative to others'
    tokens_per_s: float | None  # None: no limit
    burst_tokens: float | None  # None: those of one second


@dataclass(frozen=True, slots=True)
class FrontTLS:
    """PEM files of both front doors. client_ca: whom clients' certificates must come from; "": clients show none."""

    certificate: str
    key: str
    client_ca: str


@dataclass(frozen=True, slots=True)
class RouterParams:
    """One router process. Addresses are host:port; port 0 takes a free one and is reported."""

    router_id: str
    model_path: str  # as text.source.resolve takes it
    served_name: str
    grpc_address: str
    grpc: GrpcParams
    http_address: str
    share_ports: bool  # with other routers on this machine (SO_REUSEPORT)
    joins: bool  # others serve on these ports already: listen there when requests can be served
    metrics_socket: str  # where other routers of this host ask for what this one counted; "": there are none
    membership_address: str  # of the controller's Membership service
    peer_tls: PeerTLS | None  # of the connections to it and to the workers
    prefill_placement: str  # a name in placement.choose.PREFILL
    decode_placement: str  # in DECODE
    disaggregation: str  # in placement.disaggregation.POLICIES
    prefix_events: bool  # workers say what their prefix caches hold, where placement asks for it; else it is guessed
    ttft_objective_s: float | None  # latency-aware placement refuses what it predicts to miss them; None: nothing
    tpot_objective_s: float | None
    heartbeat_s: float
    dead_after_s: float
    request_deadline_s: float
    stall_s: float  # requests in flight and no progress for so long: not ready
    attempts: int  # placements of one leg that may fail, the first included
    stream_interval: int  # tokens of a choice in one message to the client, where the request does not say
    max_inflight: int  # requests accepted at the same time
    lame_duck_s: float  # before it stops: not ready for balancers, but serving
    tenants: tuple[TenantParams, ...]  # none: no key is asked for
    tls: FrontTLS | None
    traces: str  # of an OTLP collector (gRPC) that spans are sent to; "": no spans
    stop_grace_s: float  # how long live streams may go on after stop
    limits: RequestLimits
    batches: BatchParams
