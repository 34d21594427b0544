"""A request as the frontends hand it over, before and after validation, and the parts of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..proto.sampling import SamplingParams
from .constraint import Constraint
from .life_messages import Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """What a client asked for, protocol-neutral; None = not given. Exactly one of the three inputs is set."""

    prompt: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] = ()  # for the template of messages
    bos: bool | None = None  # whether a text prompt begins with BOS; None: as the tokenizer says
    input_field: str = "prompt"  # what the client's protocol calls the input
    logprobs_field: str = "logprobs"  # likewise
    label: str = ""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    cache_salt: str = ""
    session: str = ""
    priority: int | None = None
    stream_interval: int | None = None
    deadline_s: float | None = None  # time that the client gives it


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed validation: token ids only from here on."""

    prompt_ids: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]
    include_stop: bool
    label: str
    cache_salt: str  # the tenant's, where there is one, and the request's own
    tenant: str  # "": nobody in particular
    weight: float  # of its tenant, among prompts that wait
    priority: int  # lower goes first
    session: str  # requests of one conversation or user, for placement; "": of none
    deadline_s: float
    stream_interval: int = 1  # tokens of a choice that are handed on together, its first one aside
    prefer: Peer | None = None  # the prefill worker that has the prompt's KV, when one is known
    shown_ids: frozenset[int] = frozenset()  # special tokens that are a part of the text


@dataclass(frozen=True, slots=True)
class TopToken:
    """One alternative at one position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log probability of a token, chosen or the prompt's, and the most likely ones."""

    logprob: float
    top: tuple[TopToken, ...]


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one choice; `offset` is the output index of the first. `scores`: one per token, if asked
    for. The text may lag behind the tokens while a character or a possible stop string is incomplete."""

    choice: int
    offset: int
    token_ids: list[int]
    text: str
    scores: list[TokenScore]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, bytes and counts of a request's phases; see Timing in baton.proto."""

    total_s: float
    ttft_s: float
    reserve_s: float
    prefill_queue_s: float
    prefill_s: float
    transfer_s: float
    transfer_exposed_s: float
    commit_s: float
    first_gap_s: float
    worker_gap_s: float
    decode_s: float
    kv_bytes: int
    kv_frames: int
    prefill_worker: str
    decode_worker: str
    prefill_cached_tokens: int
    decode_cached_tokens: int
    attempts: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """A choice is over: stop | length. The last one of a request carries the summary of the whole request."""

    choice: int
    reason: str
    matched_stop: str
    usage: Usage | None
    timing: Timing | None


Output = Chunk | ChoiceEnd
