"""From command line flags and JSON lines to requests: checked by name, every mistake at once."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..proto import baton_pb2 as api
from ..proto.errors import ConfigError

_INPUTS = ("prompt", "prompt_token_ids", "messages")
_UNSIGNED_64 = 2**64 - 1
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: str
    content: str


class RequestLine(BaseModel):
    """One request as users write it; what is None is left to the server. See GenerateRequest in baton.proto."""

    model_config = ConfigDict(extra="forbid", strict=True)
    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: list[TokenId] | None = None
    messages: list[ChatMessage] | None = None
    max_tokens: TokenId | None = None
    min_tokens: TokenId | None = None
    temperature: float | None = None
    top_k: TokenId | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=0, le=_UNSIGNED_64)] | None = None
    n: TokenId | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop: bool | None = None
    logprobs: TokenId | None = None
    cache_salt: str | None = None

    def to_wire(self) -> api.GenerateRequest:
        """The message. Raises ConfigError for logit_bias keys that are no token ids."""
        request = api.GenerateRequest(
            request_id="" if self.id is None else str(self.id),
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            stop_token_ids=self.stop_token_ids or [],
            cache_salt=self.cache_salt or "",
        )
        if self.prompt is not None:
            request.prompt = self.prompt
        elif self.prompt_token_ids is not None:
            request.token_ids.CopyFrom(api.TokenIds(ids=self.prompt_token_ids))
        else:
            turns = [api.Message(role=turn.role, content=turn.content) for turn in self.messages or []]
            request.messages.CopyFrom(api.Messages(messages=turns))
        for token, bias in (self.logit_bias or {}).items():
            if not token.isascii() or not token.isdigit():
                raise ConfigError(f"logit_bias: {token!r} is no token id")
            request.logit_bias[int(token)] = bias
        for name in _OPTIONAL:
            value = getattr(self, name)
            if value is not None:
                setattr(request, name, value)
        return request


_PLAIN = {"id", *_INPUTS, "stop", "stop_token_ids", "logit_bias", "cache_salt"}
_OPTIONAL = tuple(name for name in RequestLine.model_fields if name not in _PLAIN)


def from_fields(fields: dict[str, Any], where: str) -> RequestLine:
    """One request. Raises ConfigError that begins with `where` and names every wrong field."""
    try:
        line = RequestLine.model_validate(fields)
    except ValidationError as errors:
        found: dict[str, str] = {}
        for detail in errors.errors():
            name = str(detail["loc"][0])
            found.setdefault(name, _explain(name, detail["type"], detail["msg"]))
        raise ConfigError("\n".join(f"{where}: {name}: {text}" for name, text in found.items())) from None
    given = [name for name in _INPUTS if getattr(line, name) is not None]
    if len(given) != 1:
        raise ConfigError(f"{where}: give exactly one of {', '.join(_INPUTS)}, not {' and '.join(given) or 'none'}")
    return line


def _explain(name: str, kind: str, message: str) -> str:
    if kind != "extra_forbidden":
        return message
    near = difflib.get_close_matches(name, list(RequestLine.model_fields), n=1, cutoff=0.5)
    return f"unknown field; did you mean {near[0]}?" if near else "unknown field"


def read_lines(path: Path, defaults: dict[str, Any]) -> list[RequestLine]:
    """The requests of a JSON lines file, over `defaults`. Raises ConfigError with every mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--input: {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--input: {path}: not UTF-8 text") from None
    lines: list[RequestLine] = []
    mistakes: list[str] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        if not raw.strip():
            continue
        where = f"{path}:{number}"
        try:
            fields = json.loads(raw)
            if not isinstance(fields, dict):
                raise ConfigError(f'{where}: expected an object such as {{"id": "a", "prompt": "..."}}')
            lines.append(from_fields({**defaults, **fields}, where))
        except ValueError as error:
            mistakes.append(f"{where}: not JSON: {error}")
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    if not lines:
        raise ConfigError(f"--input: {path} holds no request")
    return lines


def chat(prompt: str) -> Sequence[dict[str, str]]:
    """A prompt as a conversation of one turn."""
    return [{"role": "user", "content": prompt}]
