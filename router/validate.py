"""Checks a request field by field and resolves its parameters, before anything is allocated for it.

Every error is an InvalidRequest that names the field and the bound that it breaks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..proto.errors import InvalidRequest
from ..proto.sampling import SamplingParams
from ..text.chat_messages import texts_of
from .life_messages import Peer
from .params import RequestLimits, TenantParams
from .requests import ClientRequest, Prepared
from .tenants import salted

MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01  # a smaller divisor takes logits out of range
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
MAX_SEED = (1 << 64) - 1
MAX_INT32 = (1 << 31) - 1
MAX_PRIORITY = 1000
MAX_STREAM_INTERVAL = 1024
MAX_LABEL_CHARS = 256  # of request_id, cache_salt and session_id


class ModelFacts(NamedTuple):
    """What the ready workers agree on."""

    context: int  # tokens of prompt and output together
    vocab_size: int


def _refuse(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {message}", field=field)


def _number(
    field: str, value: float | None, default: float, low: float, high: float, *, open_low: bool = False
) -> float:
    """`value` or the default; refuses NaN, infinities and what lies outside [low, high] (or (low, high])."""
    if value is None:
        return default
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise _refuse(field, f"must be a number in {bracket}{low:g}, {high:g}], got {value}")
    return float(value)


def _integer(field: str, value: int | None, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise _refuse(field, f"must be an integer from {low} to {high}, got {value}")
    return value


def _ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise _refuse(field, f"token id {bad} is outside the vocabulary (0 to {vocab_size - 1})")


def check_size(request: ClientRequest, limits: RequestLimits, context: int) -> None:
    """Bounds the input before it is tokenised or copied. Raises InvalidRequest."""
    field = request.input_field
    given = sum(value is not None for value in (request.prompt, request.token_ids, request.messages))
    if given != 1:
        raise _refuse(field, f"give exactly one of prompt, token ids or messages, got {given}")
    if request.token_ids is not None:
        _check_length(field, len(request.token_ids), context)
        return
    if request.prompt is not None:
        if not request.prompt:
            raise _refuse(field, "the prompt is empty")
        size = _bytes(field, request.prompt)
    else:
        messages = request.messages or ()
        if not messages:
            raise _refuse(field, "there are no messages")
        if len(messages) > limits.messages:
            raise _refuse(field, f"at most {limits.messages} messages, got {len(messages)}")
        size = sum(_content_bytes(field, message.get("content")) for message in messages)
        size += sum(len(text) for text in texts_of([list(request.tools), [m.get("tool_calls") for m in messages]]))
    if size > limits.prompt_bytes:
        raise _refuse(field, f"{size} bytes of text, at most {limits.prompt_bytes} are taken")


def _bytes(field: str, text: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise _refuse(field, f"not valid Unicode text: {error.reason} at character {error.start}") from None


def _content_bytes(field: str, content: object) -> int:
    if isinstance(content, str):
        return _bytes(field, content)
    if isinstance(content, Sequence):
        return sum(_content_bytes(field, part.get("text")) for part in content if isinstance(part, dict))
    return 0


def _check_length(field: str, tokens: int, context: int) -> None:
    if tokens == 0:
        raise _refuse(field, "the prompt has no tokens")
    if tokens >= context:
        raise _refuse(
            field, f"the prompt has {tokens} tokens; the context of {context} must also hold at least one output token"
        )


def _max_tokens(request: ClientRequest, prompt_tokens: int, context: int) -> int:
    left = context - prompt_tokens
    asked = _integer("max_tokens", request.max_tokens, left, 1, MAX_INT32)
    if asked > left:
        raise _refuse(
            "max_tokens",
            f"{prompt_tokens} prompt tokens + {asked} max_tokens = {prompt_tokens + asked}, "
            f"but the context holds {context}: at most {left}",
        )
    return asked


def _stops(request: ClientRequest, limits: RequestLimits) -> tuple[str, ...]:
    if len(request.stop) > limits.stops:
        raise _refuse("stop", f"at most {limits.stops} stop strings, got {len(request.stop)}")
    for stop in request.stop:
        if not 1 <= len(stop) <= limits.stop_chars:
            raise _refuse("stop", f"a stop string has 1 to {limits.stop_chars} characters, got {len(stop)}")
    return tuple(request.stop)


def _stop_ids(request: ClientRequest, limits: RequestLimits, facts: ModelFacts, eos: Collection[int]) -> frozenset[int]:
    if len(request.stop_token_ids) > limits.stop_token_ids:
        raise _refuse("stop_token_ids", f"at most {limits.stop_token_ids} ids, got {len(request.stop_token_ids)}")
    _ids("stop_token_ids", request.stop_token_ids, facts.vocab_size)
    ends = () if request.ignore_eos else (i for i in eos if i < facts.vocab_size)
    return frozenset(request.stop_token_ids).union(ends)


def _bias(request: ClientRequest, limits: RequestLimits, vocab_size: int) -> dict[int, float]:
    if len(request.logit_bias) > limits.logit_bias:
        raise _refuse("logit_bias", f"at most {limits.logit_bias} entries, got {len(request.logit_bias)}")
    _ids("logit_bias", list(request.logit_bias), vocab_size)
    return {i: _number("logit_bias", bias, 0.0, -MAX_BIAS, MAX_BIAS) for i, bias in request.logit_bias.items()}


def check_ids(field: str, ids: Sequence[int], facts: ModelFacts) -> None:
    """Raises InvalidRequest for an id outside the vocabulary."""
    _ids(field, ids, facts.vocab_size)


def _check_labels(request: ClientRequest) -> None:
    labels = (("request_id", request.label), ("cache_salt", request.cache_salt), ("session_id", request.session))
    for field, value in labels:
        if len(value) > MAX_LABEL_CHARS:
            raise _refuse(field, f"at most {MAX_LABEL_CHARS} characters, got {len(value)}")


def check_parameters(request: ClientRequest, limits: RequestLimits) -> None:
    """Checks what does not depend on the prompt's tokens, so that a bad field costs no tokenising."""
    _integer("max_tokens", request.max_tokens, 1, 1, MAX_INT32)
    _stops(request, limits)
    _check_labels(request)
    if request.constraint is not None:
        field = request.constraint.field
        if request.ignore_eos:
            raise _refuse("ignore_eos", f"not with {field}: an answer that follows it has an end")
        if request.min_tokens:
            raise _refuse("min_tokens", f"not with {field}: an answer that follows it may have to end before")


def prepare(
    request: ClientRequest,
    prompt_ids: list[int],
    limits: RequestLimits,
    facts: ModelFacts,
    eos_token_ids: Collection[int],
    *,
    grammar: str = "",
    seed: int,
    deadline_s: float,
    stream_interval: int,
    tenant: TenantParams,
    prefer: Peer | None = None,
) -> Prepared:
    """The request with every parameter resolved.

    grammar: what request.constraint became. seed: used when the request has none. deadline_s: the service's own limit;
    the request's may be shorter. stream_interval: of a request that asks for none. prefer: the prefill worker that has
    the prompt's KV, when one is known.
    Raises InvalidRequest.
    """
    check_parameters(request, limits)
    _check_length(request.input_field, len(prompt_ids), facts.context)
    _ids(request.input_field, prompt_ids, facts.vocab_size)
    max_tokens = _max_tokens(request, len(prompt_ids), facts.context)
    top_k = _integer("top_k", request.top_k, 0, -1, MAX_INT32)
    logprobs = request.logprobs
    if logprobs is not None:
        logprobs = _integer(request.logprobs_field, logprobs, 0, 0, limits.logprobs)
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is not None:
        prompt_logprobs = _integer("prompt_logprobs", prompt_logprobs, 0, 0, limits.logprobs)
    sampling = SamplingParams(
        temperature=_number("temperature", request.temperature, 1.0, 0.0, MAX_TEMPERATURE),
        top_k=max(0, top_k),
        top_p=_number("top_p", request.top_p, 1.0, 0.0, 1.0, open_low=True),
        min_p=_number("min_p", request.min_p, 0.0, 0.0, 1.0),
        repetition_penalty=_number(
            "repetition_penalty", request.repetition_penalty, 1.0, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        ),
        presence_penalty=_number("presence_penalty", request.presence_penalty, 0.0, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=_number("frequency_penalty", request.frequency_penalty, 0.0, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_bias(request, limits, facts.vocab_size),
        seed=_integer("seed", request.seed, seed, 0, MAX_SEED),
        n=_integer("n", request.n, 1, 1, limits.n),
        max_tokens=max_tokens,
        min_tokens=_integer("min_tokens", request.min_tokens, 0, 0, max_tokens),
        stop_token_ids=_stop_ids(request, limits, facts, eos_token_ids),
        logprobs=logprobs,
        grammar=grammar,
        prompt_logprobs=prompt_logprobs,
    )
    given = deadline_s if request.deadline_s is None else min(deadline_s, request.deadline_s)
    stops = _stops(request, limits)
    return Prepared(
        prompt_ids=prompt_ids,
        sampling=sampling,
        stops=stops,
        include_stop=request.include_stop,
        label=request.label,
        cache_salt=salted(tenant, request.cache_salt),
        tenant=tenant.name,
        weight=tenant.weight,
        session=request.session,
        priority=_integer("priority", request.priority, 0, -MAX_PRIORITY, MAX_PRIORITY),
        deadline_s=given,
        prefer=prefer,
        stream_interval=_integer("stream_interval", request.stream_interval, stream_interval, 1, MAX_STREAM_INTERVAL),
    )
