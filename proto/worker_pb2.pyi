from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterMessage(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[RouterCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[RouterCommand, _Mapping]]] = ...) -> None: ...

class RouterCommand(_message.Message):
    __slots__ = ("hello", "reserve", "prefill", "cancel", "release", "handover", "hold", "give", "watch_prefixes", "withdraw")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    GIVE_FIELD_NUMBER: _ClassVar[int]
    WATCH_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    reserve: Reserve
    prefill: Prefill
    cancel: Cancel
    release: Release
    handover: Handover
    hold: Hold
    give: Give
    watch_prefixes: WatchPrefixes
    withdraw: Withdraw
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., handover: _Optional[_Union[Handover, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ..., give: _Optional[_Union[Give, _Mapping]] = ..., watch_prefixes: _Optional[_Union[WatchPrefixes, _Mapping]] = ..., withdraw: _Optional[_Union[Withdraw, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "worker_id", "worker_incarnation")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    worker_id: str
    worker_incarnation: str
    def __init__(self, router_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., worker_incarnation: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "n", "max_tokens", "min_tokens", "stop_token_ids", "logprobs", "grammar", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    n: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    grammar: str
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Leg(_message.Message):
    __slots__ = ("request_id", "attempt", "choices", "prompt_token_ids", "generated_token_ids", "sampling", "deadline_s", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    deadline_s: float
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., generated_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., deadline_s: _Optional[float] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("leg", "compute")
    LEG_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    leg: Leg
    compute: bool
    def __init__(self, leg: _Optional[_Union[Leg, _Mapping]] = ..., compute: _Optional[bool] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("leg", "ticket")
    LEG_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    leg: Leg
    ticket: bytes
    def __init__(self, leg: _Optional[_Union[Leg, _Mapping]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class LegRef(_message.Message):
    __slots__ = ("request_id", "attempt", "first_choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    first_choice: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_choice: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("leg", "choices")
    LEG_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("leg",)
    LEG_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ...) -> None: ...

class Handover(_message.Message):
    __slots__ = ("leg", "ticket", "held")
    LEG_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    leg: Leg
    ticket: bytes
    held: LegRef
    def __init__(self, leg: _Optional[_Union[Leg, _Mapping]] = ..., ticket: _Optional[bytes] = ..., held: _Optional[_Union[LegRef, _Mapping]] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("leg", "choice")
    LEG_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    choice: int
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., choice: _Optional[int] = ...) -> None: ...

class Give(_message.Message):
    __slots__ = ("leg", "ticket")
    LEG_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    ticket: bytes
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Withdraw(_message.Message):
    __slots__ = ("leg", "code", "message")
    LEG_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    code: str
    message: str
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class WatchPrefixes(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("events", "load")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[WorkerEvent]
    load: Load
    def __init__(self, events: _Optional[_Iterable[_Union[WorkerEvent, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("welcome", "ticket", "first", "sent", "committed", "tokens", "preempted", "failed", "unsent", "held", "want", "prefixes", "prompt_scores")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    UNSENT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    ticket: Ticket
    first: FirstTokens
    sent: Sent
    committed: Committed
    tokens: Tokens
    preempted: Preempted
    failed: Failed
    unsent: Unsent
    held: Held
    want: Want
    prefixes: PrefixChanges
    prompt_scores: PromptScores
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., first: _Optional[_Union[FirstTokens, _Mapping]] = ..., sent: _Optional[_Union[Sent, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., preempted: _Optional[_Union[Preempted, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., unsent: _Optional[_Union[Unsent, _Mapping]] = ..., held: _Optional[_Union[Held, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., prefixes: _Optional[_Union[PrefixChanges, _Mapping]] = ..., prompt_scores: _Optional[_Union[PromptScores, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "model_fingerprint", "max_model_len", "vocab_size", "block_size", "total_blocks", "max_batch_tokens", "max_sequences", "lookahead", "clock")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: str
    model_fingerprint: str
    max_model_len: int
    vocab_size: int
    block_size: int
    total_blocks: int
    max_batch_tokens: int
    max_sequences: int
    lookahead: int
    clock: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., lookahead: _Optional[int] = ..., clock: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "waiting_tokens", "used_blocks", "cached_blocks", "total_blocks", "steps", "preemptions", "prefix_hit_tokens", "prefix_query_tokens", "computed_prompt_tokens", "held_legs", "fetched_prompt_tokens", "spec_drafts", "spec_draft_tokens", "spec_accepted_tokens", "step_time", "prefill_time")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_LEGS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPEC_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SPEC_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPEC_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIME_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_tokens: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    steps: int
    preemptions: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    computed_prompt_tokens: int
    held_legs: int
    fetched_prompt_tokens: int
    spec_drafts: int
    spec_draft_tokens: int
    spec_accepted_tokens: int
    step_time: StepTime
    prefill_time: StepTime
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., computed_prompt_tokens: _Optional[int] = ..., held_legs: _Optional[int] = ..., fetched_prompt_tokens: _Optional[int] = ..., spec_drafts: _Optional[int] = ..., spec_draft_tokens: _Optional[int] = ..., spec_accepted_tokens: _Optional[int] = ..., step_time: _Optional[_Union[StepTime, _Mapping]] = ..., prefill_time: _Optional[_Union[StepTime, _Mapping]] = ...) -> None: ...

class StepTime(_message.Message):
    __slots__ = ("a", "b", "c")
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    C_FIELD_NUMBER: _ClassVar[int]
    a: float
    b: float
    c: float
    def __init__(self, a: _Optional[float] = ..., b: _Optional[float] = ..., c: _Optional[float] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("leg", "ticket", "cached_tokens", "waited_s")
    LEG_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    ticket: bytes
    cached_tokens: int
    waited_s: float
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., ticket: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ..., waited_s: _Optional[float] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("choice", "index", "token_id", "logprob", "top_logprobs", "finish_reason")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    choice: int
    index: int
    token_id: int
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    finish_reason: str
    def __init__(self, choice: _Optional[int] = ..., index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., finish_reason: _Optional[str] = ...) -> None: ...

class PromptScores(_message.Message):
    __slots__ = ("leg", "start", "scores")
    LEG_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    start: int
    scores: _containers.RepeatedCompositeFieldContainer[PromptScore]
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., start: _Optional[int] = ..., scores: _Optional[_Iterable[_Union[PromptScore, _Mapping]]] = ...) -> None: ...

class PromptScore(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("leg", "tokens", "cached_tokens", "queue_s", "prefill_s", "chunks", "fetched_tokens", "drawn_at")
    LEG_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAWN_AT_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    cached_tokens: int
    queue_s: float
    prefill_s: float
    chunks: int
    fetched_tokens: int
    drawn_at: float
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., chunks: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., drawn_at: _Optional[float] = ...) -> None: ...

class Sent(_message.Message):
    __slots__ = ("leg", "bytes", "frames", "transfer_s", "exposed_s")
    LEG_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    bytes: int
    frames: int
    transfer_s: float
    exposed_s: float
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., bytes: _Optional[int] = ..., frames: _Optional[int] = ..., transfer_s: _Optional[float] = ..., exposed_s: _Optional[float] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("leg", "bytes", "frames", "reserved_s", "at")
    LEG_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_S_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    bytes: int
    frames: int
    reserved_s: float
    at: float
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., bytes: _Optional[int] = ..., frames: _Optional[int] = ..., reserved_s: _Optional[float] = ..., at: _Optional[float] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens", "at")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[StepToken]
    at: float
    def __init__(self, tokens: _Optional[_Iterable[_Union[StepToken, _Mapping]]] = ..., at: _Optional[float] = ...) -> None: ...

class StepToken(_message.Message):
    __slots__ = ("request_id", "attempt", "token")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token: Token
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token: _Optional[_Union[Token, _Mapping]] = ...) -> None: ...

class Preempted(_message.Message):
    __slots__ = ("leg", "choice")
    LEG_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    choice: int
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., choice: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("leg", "code", "message", "field", "retry_after_s")
    LEG_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    code: str
    message: str
    field: str
    retry_after_s: float
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Unsent(_message.Message):
    __slots__ = ("leg", "code", "message")
    LEG_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    code: str
    message: str
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("leg", "choice")
    LEG_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    choice: int
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., choice: _Optional[int] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("leg", "ticket", "start", "stop")
    LEG_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    leg: LegRef
    ticket: bytes
    start: int
    stop: int
    def __init__(self, leg: _Optional[_Union[LegRef, _Mapping]] = ..., ticket: _Optional[bytes] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class PrefixChanges(_message.Message):
    __slots__ = ("sequence", "snapshot", "added", "removed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    snapshot: bool
    added: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., added: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...
