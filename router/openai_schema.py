"""OpenAI's request bodies and the extras that vLLM and SGLang clients send: each field is served or refused by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ..proto.errors import InvalidRequest, UnknownModel
from .constraint import Constraint
from .openai_constraint import constraint_of, tools_of
from .openai_neutral import LABELS, NEUTRAL
from .requests import ClientRequest
from .validate import MAX_STREAM_INTERVAL

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own, for /v1/completions only

# Fields of several types: what to say instead of one complaint per type.
_EXPECTED = {
    "prompt": "must be a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "must be a text or a list of texts",
    "logprobs": "must be an integer",
}
_SIGNED_64 = 1 << 63
_MAX_ID_DIGITS = 10
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False  # the counts so far in every event


class Named(BaseModel):
    """A body that may say which model it is for. Absent and null mean the same."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None


class _Request(Named):
    """What both endpoints share."""

    user: str | None = None  # a label
    session_id: str | None = None  # else prompt_cache_key, else user
    prompt_cache_key: str | None = None
    request_id: str | None = None  # a label
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    stream_interval: int | None = None
    timeout: float | None = None  # seconds until the whole answer must be there
    max_completion_tokens: int | None = None
    prompt_logprobs: int | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_each(self) -> bool:
        """Whether every event has the counts so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def token_limit(self) -> int | None:
        """max_tokens by either of its names. Raises InvalidRequest when they differ."""
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            message = f"max_tokens: {self.max_tokens} differs from max_completion_tokens {self.max_completion_tokens}"
            raise InvalidRequest(message, field="max_tokens")
        return limits.pop() if limits else None

    def constraint(self) -> Constraint | None:
        """What the answer must be. Raises InvalidRequest."""
        guided = {name: getattr(self, name) for name in type(self).model_fields if name.startswith("guided_")}
        return constraint_of(self.response_format, self.structured_outputs, guided)

    def common(self, label: str) -> dict[str, Any]:
        """The fields of ClientRequest that both endpoints fill alike. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only with stream", field="stream_options")
        return {
            "label": label or self.request_id or self.user or "",
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": _bias(self.logit_bias or {}),
            "seed": _seed(self.seed),
            "n": self.n,
            "min_tokens": self.min_tokens,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or [],
            "stop_token_ids": self.stop_token_ids or [],
            "ignore_eos": bool(self.ignore_eos),
            "include_stop": bool(self.include_stop_str_in_output),
            "cache_salt": self.cache_salt or "",
            "priority": self.priority,
            "session": self.session_id or self.prompt_cache_key or self.user or "",
            "prompt_logprobs": self.prompt_logprobs,
            "deadline_s": _timeout(self.timeout),
            # Whoever takes the answer whole is woken once.
            "stream_interval": MAX_STREAM_INTERVAL
            if self.stream_interval is None and not self.stream
            else self.stream_interval,
        }


class CompletionRequest(_Request):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def scores_only(self) -> bool:
        """Whether nothing but the prompt, with its logprobs, is wanted."""
        return bool(self.echo) and self.token_limit() == 0

    def clients(self, label: str, max_prompts: int) -> list[ClientRequest]:
        """One request per prompt. Raises InvalidRequest."""
        prompts = _prompts(self.prompt)
        if not 1 <= len(prompts) <= max_prompts:
            raise InvalidRequest(f"prompt: 1 to {max_prompts} prompts, got {len(prompts)}", field="prompt")
        if self.logprobs is True:
            raise InvalidRequest("logprobs: must be an integer", field="logprobs")
        common = self.common(label)
        common["logprobs"] = None if self.logprobs is None or self.logprobs is False else int(self.logprobs)
        limit = self.token_limit()
        common["max_tokens"] = DEFAULT_COMPLETION_TOKENS if limit is None else 1 if self.scores_only else limit
        common["constraint"] = self.constraint()
        if self.echo and common["logprobs"] is not None and self.prompt_logprobs is None:
            common["prompt_logprobs"] = common["logprobs"]
        if self.add_special_tokens is False:
            common["bos"] = False
        return [
            ClientRequest(prompt=prompt, **common)
            if isinstance(prompt, str)
            else ClientRequest(token_ids=prompt, **common)
            for prompt in prompts
        ]


class ChatRequest(_Request):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None  # the template writes them
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def client(self, label: str) -> ClientRequest:
        """The request. Raises InvalidRequest."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: only with logprobs: true", field="top_logprobs")
        tools, forced = tools_of(self.tools, self.tool_choice, several=self.parallel_tool_calls is not False)
        constraint = self.constraint()
        if forced is not None and constraint is not None:
            raise InvalidRequest(
                f"{constraint.field}: not with a tool_choice that asks for calls", field=constraint.field
            )
        return ClientRequest(
            messages=[chat_message(index, message) for index, message in enumerate(self.messages)],
            input_field="messages",
            tools=tools,
            constraint=forced or constraint,
            max_tokens=self.token_limit(),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            logprobs_field="top_logprobs",
            **self.common(label),
        )


Body = TypeVar("Body", bound=Named)


def parse(kind: type[Body], data: Any, served: str) -> Body:
    """The body as `kind`. Raises InvalidRequest, naming the field, and UnknownModel."""
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    kept = {}
    for name, value in data.items():
        if name in LABELS:
            continue
        if name not in NEUTRAL:
            kept[name] = value
        elif value is not None and value not in NEUTRAL[name]:
            raise InvalidRequest(f"{name}: {value!r:.100} is not supported", field=name)
    try:
        body = kind.model_validate(kept)
    except ValidationError as error:
        raise _refusal(kind, error) from None
    if body.model is not None and body.model != served:
        raise UnknownModel(f"model: {body.model!r:.100} is not served here, only {served!r}", field="model")
    return body


def _refusal(kind: type[Body], error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    path, what = [str(part) for part in first["loc"]], str(first["msg"])
    if first["type"] == "extra_forbidden":
        known = StreamOptions.model_fields if len(path) > 1 else {**kind.model_fields, **NEUTRAL}
        near = difflib.get_close_matches(path[-1], list(known), n=1, cutoff=0.5)
        what = f"unknown field; did you mean {near[0]}?" if near else "unknown field"
    elif len(path) > 1 and path[0] in _EXPECTED:
        path, what = path[:1], _EXPECTED[path[0]]
    return InvalidRequest(f"{'.'.join(path):.200}: {what}", field=path[0][:200])


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """A text or one list of ids is one prompt, a list of either is several."""
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]


def _bias(entries: Mapping[str, float]) -> dict[int, float]:
    for key in entries:
        if not key.isascii() or not key.isdigit() or len(key) > _MAX_ID_DIGITS:
            raise InvalidRequest(f"logit_bias: {key!r:.100} is no token id", field="logit_bias")
    return {int(key): value for key, value in entries.items()}


def _timeout(given: float | None) -> float | None:
    if given is not None and not 0 < given < math.inf:
        raise InvalidRequest(f"timeout: must be a number of seconds above 0, got {given}", field="timeout")
    return given


def _seed(given: int | None) -> int | None:
    """OpenAI's seeds are signed: a negative one stands for its bits."""
    return given % (1 << 64) if given is not None and -_SIGNED_64 <= given < 0 else given


def chat_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """One message with what templates take. Raises InvalidRequest for anything else."""
    only = {"tool_calls": "assistant", "tool_call_id": "tool"}  # in messages of this role
    for name, value in message.items():
        known = name in _MESSAGE_FIELDS and only.get(name) in (None, message.get("role"))
        if not known and value not in (None, [], ""):
            raise InvalidRequest(f"messages[{index}].{name}: not supported", field="messages")
    return {name: value for name, value in message.items() if name in _MESSAGE_FIELDS}
