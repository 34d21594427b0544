"""How much a request may hold, checked by counting before anything walks, copies or validates it.

A few megabytes can hold millions of empty lists or messages; going through them all would hold up every stream of the
router. Counting stops at the limit. What the fields mean is checked afterwards (openai_schema.py, validate.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..proto import baton_pb2 as api
from ..proto.errors import InvalidRequest
from .params import RequestLimits

_MOST_FIELDS = 64  # of one body
_MOST_ITEMS = 1 << 16  # values in one body, the prompt's token ids not counted


def check_body(data: Any, limits: RequestLimits, context: int) -> None:
    """A parsed JSON body; `context`: tokens of prompt and output. Raises InvalidRequest."""
    if not isinstance(data, dict):
        return  # refused by whoever reads it
    if len(data) > _MOST_FIELDS:
        raise InvalidRequest(f"the body has {len(data)} fields, at most {_MOST_FIELDS} are taken")
    for field, value in data.items():
        if field == "prompt":
            _check_prompt(value, max(limits.prompts, context), context)
        elif _more_than(_MOST_ITEMS, value):
            raise InvalidRequest(f"{field:.100}: more than {_MOST_ITEMS} values", field=field[:100])
    for field, most in _counted(limits).items():
        value = data.get(field)
        if isinstance(value, list | dict):
            _check_count(field, len(value), most)


def check_message(request: api.GenerateRequest, limits: RequestLimits, context: int) -> None:
    """A Generate call; `context`: tokens of prompt and output. Raises InvalidRequest."""
    _check_count("token_ids", len(request.token_ids.ids), context)
    _check_count("messages", len(request.messages.messages), limits.messages)
    for field, most in _counted(limits).items():
        if field not in ("messages", "tools"):
            _check_count(field, len(getattr(request, field)), most)


def check_messages(messages: Sequence[api.Message], limits: RequestLimits) -> None:
    """The messages of a Chat or Tokenize call. Raises InvalidRequest."""
    _check_count("messages", len(messages), limits.messages)


def check_ids_count(field: str, count: int, context: int) -> None:
    """A prompt of token ids; `context`: tokens of prompt and output. Raises InvalidRequest."""
    _check_count(field, count, context)


def check_detokenize(request: api.DetokenizeRequest, limits: RequestLimits) -> None:
    """A Detokenize call: as many ids as a text that may be tokenised can have. Raises InvalidRequest."""
    _check_count("token_ids", len(request.token_ids), limits.prompt_bytes)


def check_batch(request: api.GenerateBatchRequest, limits: RequestLimits, context: int) -> None:
    """A GenerateBatch call. Raises InvalidRequest, whose field says which request is to blame."""
    _check_count("requests", len(request.requests), limits.batch)
    if request.HasField("parallelism") and not 1 <= request.parallelism <= limits.parallelism:
        raise InvalidRequest(
            f"parallelism: must be an integer from 1 to {limits.parallelism}, got {request.parallelism}",
            field="parallelism",
        )
    for index, one in enumerate(request.requests):
        try:
            check_message(one, limits, context)
        except InvalidRequest as error:
            where = f"requests[{index}].{error.field}"
            raise InvalidRequest(f"requests[{index}]: {error.message}", field=where) from None


def _counted(limits: RequestLimits) -> dict[str, int]:
    return {
        "messages": limits.messages,
        "stop": limits.stops,
        "stop_token_ids": limits.stop_token_ids,
        "logit_bias": limits.logit_bias,
        "tools": limits.tools,
    }


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{field}: at most {most} entries, got {count}", field=field)


def _check_prompt(value: Any, most: int, context: int) -> None:
    if not isinstance(value, list):
        return
    _check_count("prompt", len(value), most)
    longest = max((len(part) for part in value if isinstance(part, list)), default=0)
    _check_count("prompt", longest, context)


def _more_than(most: int, value: Any) -> bool:
    """Whether a JSON value holds more than `most` values, itself included."""
    waiting, count = [value], 0
    while waiting:
        part = waiting.pop()
        count += 1
        if isinstance(part, list | dict):
            if count + len(part) > most:
                return True
            waiting += part.values() if isinstance(part, dict) else part
    return False
