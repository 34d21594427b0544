"""The router's parameters: frozen and without defaults; cluster/config.py is the only place that chooses values."""

from __future__ import annotations

from dataclasses import dataclass


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
    body_bytes: int  # of one HTTP body or gRPC message


@dataclass(frozen=True, slots=True)
class RouterParams:
    """One router process. Addresses are host:port; port 0 takes a free one and is reported."""

    router_id: str
    model_path: str  # as text.source.resolve takes it
    served_name: str
    grpc_address: str
    http_address: str
    membership_address: str  # of the controller's Membership service
    prefill_placement: str  # a name in placement.choose.PREFILL
    decode_placement: str  # in DECODE
    disaggregation: str  # in placement.disaggregation.POLICIES
    prefix_events: bool  # workers say what their prefix caches hold, where placement asks for it; else it is guessed
    ttft_objective_s: float | None  # latency-aware placement refuses what it predicts to miss them; None: nothing
    tpot_objective_s: float | None
    heartbeat_s: float
    dead_after_s: float
    request_deadline_s: float
    attempts: int  # placements of one leg that may fail, the first included
    max_inflight: int  # requests accepted at the same time
    stop_grace_s: float  # how long live streams may go on after stop
    limits: RequestLimits
