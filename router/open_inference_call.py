"""What both services of the Open Inference Protocol (KServe v2) share: the model's tensors, and a call in terms of
baton.v1. Tensors: `text_input` (BYTES, one prompt) and, if wished, `streaming` (BOOL) in; `text_output` and
`finish_reason` (BYTES) out. Parameters are the fields of a GenerateRequest by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, NoReturn

from ..proto import baton_pb2 as api
from ..proto.errors import InvalidRequest, UnknownModel
from .bounds import check_message
from .front_door import FrontDoor
from .grpc_messages import client_request
from .live import Answer
from .requests import Chunk

INPUTS = {"text_input": "BYTES", "streaming": "BOOL"}
OUTPUTS = ("text_output", "finish_reason")
PLATFORM, VERSION = "baton", "1"
_NOT_PARAMETERS = {"prompt", "token_ids", "messages", "logit_bias", "request_id", "n", "logprobs"}
_LENGTH_BYTES = 4  # in front of each element of a raw BYTES tensor


def check_model(door: FrontDoor, name: str, version: str) -> None:
    """Raises UnknownModel. version: "" stands for the one there is."""
    served = door.params.served_name
    if name != served:
        raise UnknownModel(f"model_name: {name[:100]!r} is not served here, {served!r} is", field="model_name")
    if version not in ("", VERSION):
        text = f"model_version: {version[:100]!r} is not served here, {VERSION!r} is"
        raise UnknownModel(text, field="model_version")


def check_inputs(names: Iterable[str]) -> None:
    """Raises InvalidRequest for a tensor that the model has not."""
    unknown = next((name for name in names if name not in INPUTS), None)
    if unknown is not None:
        raise InvalidRequest(f"inputs: there is no tensor {unknown[:100]!r}, only {', '.join(INPUTS)}", field="inputs")


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """The outputs that a request names; all where it names none. Raises InvalidRequest."""
    wanted = tuple(dict.fromkeys(names))
    unknown = next((name for name in wanted if name not in OUTPUTS), None)
    if unknown is not None:
        text = f"outputs: there is no tensor {unknown[:100]!r}, only {', '.join(OUTPUTS)}"
        raise InvalidRequest(text, field="outputs")
    return wanted or OUTPUTS


async def begin(
    door: FrontDoor,
    label: str,
    text: bytes | str | None,
    parameters: Mapping[str, Any],
    metadata: Mapping[str, str],
    left_s: float | None,
) -> Answer:
    """Takes a request. left_s: until the call's own deadline. Raises what refuses it, naming tensor or parameter."""
    if text is None:
        raise InvalidRequest("text_input: the tensor is missing", field="text_input")
    asked = api.GenerateRequest(request_id=label)
    try:
        asked.prompt = text if isinstance(text, str) else text.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("text_input: not valid UTF-8", field="text_input") from None
    for name, value in parameters.items():
        _set(asked, name, value)
    door.bounded(lambda limits, room: check_message(asked, limits, room))
    return await door.generate(client_request(asked, metadata, left_s))


async def pieces(answer: Answer) -> AsyncIterator[tuple[str, str]]:
    """(text, finish reason or ""), piece by piece; the reason comes once, last."""
    async for outputs in answer.outputs():
        for output in outputs:
            yield (output.text, "") if isinstance(output, Chunk) else ("", output.reason)


async def whole(answer: Answer) -> dict[str, str]:
    """All outputs, once the answer is over."""
    text, reason = "", ""
    async for piece, end in pieces(answer):
        text, reason = text + piece, end
    return {"text_output": text, "finish_reason": reason}


def raw_element(name: str, data: bytes) -> Any:
    """The one element of an input that came as bytes. Raises InvalidRequest."""
    if name == "streaming":
        return bool(data[0]) if len(data) == 1 else no_element(name)
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    return data[_LENGTH_BYTES:] if length == len(data) - _LENGTH_BYTES else no_element(name)


def raw_text(text: str) -> bytes:
    """A BYTES tensor of one element, as bytes."""
    data = text.encode()
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def no_element(name: str) -> NoReturn:
    """Raises InvalidRequest for a tensor whose contents are not what is wanted."""
    raise InvalidRequest(f"{name}: the tensor's contents are not one element", field=name)


def wrong_tensor(name: str) -> NoReturn:
    """Raises InvalidRequest for a tensor of another type or shape."""
    raise InvalidRequest(f"{name}: must be one {INPUTS[name]} tensor with one element", field=name)


def _set(asked: api.GenerateRequest, name: str, value: Any) -> None:
    known = api.GenerateRequest.DESCRIPTOR.fields_by_name
    if name not in known or name in _NOT_PARAMETERS:
        raise InvalidRequest(f"parameters: {name[:100]!r} is not known here", field="parameters")
    try:
        if known[name].is_repeated:
            getattr(asked, name).extend(value if isinstance(value, list) else [value])
        else:
            setattr(asked, name, value)
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{name}: {error}", field=name) from None
