"""From command line flags and JSON lines to requests: checked by name, every mistake at once."""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from ..proto import baton_pb2 as api
from ..proto.errors import ConfigError
from ..text import strict_json

_INPUTS = ("prompt", "prompt_token_ids", "messages")
_UNSIGNED_64 = 2**64 - 1
_SIGNED_32 = 2**31 - 1
_FLOAT_32 = 3.4e38
_STDIN = 0


def _token_key(key: str) -> str:
    if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) > _SIGNED_32:
        raise PydanticCustomError("token_id", "{key} is no token id", {"key": repr(key)[:100]})
    return key


TokenId = Annotated[int, Field(ge=0, le=_SIGNED_32)]
TokenKey = Annotated[str, AfterValidator(_token_key)]
Number = Annotated[float, Field(ge=-_FLOAT_32, le=_FLOAT_32, allow_inf_nan=False)]


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
    temperature: Number | None = None
    top_k: TokenId | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[TokenKey, Number] | None = None
    seed: Annotated[int, Field(ge=0, le=_UNSIGNED_64)] | None = None
    n: TokenId | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop: bool | None = None
    logprobs: TokenId | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    stream_interval: TokenId | None = None
    prompt_logprobs: TokenId | None = None
    json_schema: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    one_of: list[str] | None = None

    def to_wire(self) -> api.GenerateRequest:
        """The message."""
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
            request.logit_bias[int(token)] = bias
        if self.json_schema is not None:
            schema = self.json_schema
            request.json_schema = schema if isinstance(schema, str) else json.dumps(schema)
        if self.one_of is not None:
            request.one_of.texts.extend(self.one_of)
        for name in _OPTIONAL:
            value = getattr(self, name)
            if value is not None:
                setattr(request, name, value)
        return request


_CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar", "one_of")
_PLAIN = {"id", *_INPUTS, "json_schema", "one_of", "stop", "stop_token_ids", "logit_bias", "cache_salt"}
_OPTIONAL = tuple(name for name in RequestLine.model_fields if name not in _PLAIN)


def from_fields(fields: dict[str, Any], where: str) -> RequestLine:
    """One request. Raises ConfigError that begins with `where` and names every wrong field."""
    try:
        strict_json.check(fields)
        line = RequestLine.model_validate(fields)
    except strict_json.JsonError as error:
        raise ConfigError(f"{where}: {_named(error)}") from None
    except ValidationError as errors:
        found: dict[str, str] = {}
        for detail in errors.errors():
            name = str(detail["loc"][0])
            found.setdefault(name, _explain(name, detail["type"], detail["msg"]))
        raise ConfigError("\n".join(f"{where}: {name}: {text}" for name, text in found.items())) from None
    given = [name for name in _INPUTS if getattr(line, name) is not None]
    if len(given) != 1:
        raise ConfigError(f"{where}: give exactly one of {', '.join(_INPUTS)}, not {' and '.join(given) or 'none'}")
    limits = [name for name in _CONSTRAINTS if getattr(line, name) is not None]
    if len(limits) > 1:
        raise ConfigError(f"{where}: {limits[1]}: the answer must follow {limits[0]} already")
    return line


def _explain(name: str, kind: str, message: str) -> str:
    if kind != "extra_forbidden":
        return message
    near = difflib.get_close_matches(name, list(RequestLine.model_fields), n=1, cutoff=0.5)
    return f"unknown field; did you mean {near[0]}?" if near else "unknown field"


def _named(error: strict_json.JsonError) -> str:
    return f"{error.field}: {error}" if error.field else str(error)


def read_lines(path: Path, defaults: dict[str, Any]) -> list[RequestLine]:
    """The requests of a JSON lines file ("-": stdin), over `defaults`. Raises ConfigError with every mistake."""
    name = "stdin" if str(path) == "-" else str(path)
    try:
        text = (_stdin() if name == "stdin" else path.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--input: {name}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--input: {name}: not UTF-8 text") from None
    lines: list[RequestLine] = []
    mistakes: list[str] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        if not raw.strip():
            continue
        where = f"{name}:{number}"
        try:
            fields = strict_json.loads(raw)
            if not isinstance(fields, dict):
                raise ConfigError(f'{where}: expected an object such as {{"id": "a", "prompt": "..."}}')
            lines.append(from_fields({**defaults, **fields}, where))
        except strict_json.JsonError as error:
            mistakes.append(f"{where}: {_named(error)}")
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    if not lines:
        raise ConfigError(f"--input: {name} holds no request")
    return lines


def _stdin() -> bytes:
    """All of stdin; it can be read once more afterwards, by a process that is started with the same arguments."""
    with open(_STDIN, "rb", closefd=False) as stdin:
        text = stdin.read()
    with tempfile.TemporaryFile() as again:
        again.write(text)
        again.seek(0)
        os.dup2(again.fileno(), _STDIN)
    return text


def chat(prompt: str) -> Sequence[dict[str, str]]:
    """A prompt as a conversation of one turn."""
    return [{"role": "user", "content": prompt}]
