"""Bodies of the Open Inference Protocol over HTTP: JSON, and behind it the tensors that are sent as bytes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from ..proto.errors import InvalidRequest
from . import open_inference_call as calls

HEADER_LENGTH = "inference-header-content-length"  # bytes of JSON, where binary tensors follow it
_FIELDS = frozenset({"id", "parameters", "inputs", "outputs"})
_TENSOR_FIELDS = frozenset({"name", "shape", "datatype", "parameters", "data"})
_OF_CLIENTS = frozenset({"binary_data_output"})
Json = dict[str, Any]


def split(raw: bytes, length: str | None) -> tuple[bytes, bytes]:
    """(the JSON, the binary tensors behind it). length: as HEADER_LENGTH says. Raises InvalidRequest."""
    size = len(raw)
    if length is not None:
        if not (length.isascii() and length.isdigit() and len(length) < 12 and int(length) <= size):
            raise InvalidRequest(f"{HEADER_LENGTH}: must be the bytes of JSON in the body", field=HEADER_LENGTH)
        size = int(length)
    return raw[:size], raw[size:]


def json_object(body: Any) -> Json:
    """The body. Raises InvalidRequest when it is no object."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def id_of(body: Json) -> Json:
    """The client's own id as a field of the answer, if there is one. Raises InvalidRequest."""
    given = body.get("id")
    if given is not None and not isinstance(given, str):
        raise InvalidRequest("id: must be a text", field="id")
    return {"id": given} if given else {}


def parameters_of(of: Json) -> Json:
    """Of a body or of a tensor. Raises InvalidRequest."""
    given = of.get("parameters")
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest("parameters: must be an object", field="parameters")
    return given or {}


def asked_of(body: Json) -> Json:
    """The parameters of a body, without those that say how to answer it."""
    return {name: value for name, value in parameters_of(body).items() if name not in _OF_CLIENTS}


def read_infer(body: Json, binary: bytes) -> tuple[dict[str, bool], bytes | str | None]:
    """(the wanted outputs, and whether each is to be binary; the prompt). Raises InvalidRequest."""
    unknown = next((name for name in body if name not in _FIELDS), None)
    if unknown is not None:
        raise InvalidRequest(f"{unknown:.100}: unknown field", field=unknown[:100])
    values: Json = {}
    for tensor in _listed(body, "inputs"):
        name = tensor["name"]
        calls.check_inputs([name])
        if name in values:
            calls.wrong_tensor(name)
        values[name], binary = _element(tensor, binary)
    if binary:
        raise InvalidRequest(f"inputs: {len(binary)} bytes behind the last binary tensor", field="inputs")
    if values.get("streaming"):
        raise InvalidRequest("streaming: infer does not stream; generate_stream does", field="streaming")
    raw = parameters_of(body).get("binary_data_output") is True
    asked = {output["name"]: parameters_of(output).get("binary_data", raw) for output in _listed(body, "outputs")}
    wanted = {name: asked.get(name, raw) is True for name in calls.chosen(asked)}
    return wanted, values.get("text_input")


def _listed(body: Json, field: str) -> list[Json]:
    tensors = body.get(field)
    if tensors is None:
        return []
    if not isinstance(tensors, list) or not all(isinstance(one, dict) for one in tensors):
        raise InvalidRequest(f"{field}: must be a list of tensors", field=field)
    for tensor in tensors:
        unknown = next((name for name in tensor if name not in _TENSOR_FIELDS), None)
        if unknown is not None or not isinstance(tensor.get("name"), str):
            what = f"unknown field {unknown:.100}" if unknown is not None else "a tensor needs a name, a text"
            raise InvalidRequest(f"{field}: {what}", field=field)
    return tensors


def _element(tensor: Json, binary: bytes) -> tuple[Any, bytes]:
    """(the one element, what is left of the binary tensors). Raises InvalidRequest."""
    name, shape = tensor["name"], tensor.get("shape")
    ones = isinstance(shape, list) and all(size == 1 and not isinstance(size, bool) for size in shape)
    if tensor.get("datatype") != calls.INPUTS[name] or not ones:
        calls.wrong_tensor(name)
    size = parameters_of(tensor).get("binary_data_size")
    if size is not None:
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(binary):
            raise InvalidRequest(f"{name}: binary_data_size: not so many bytes are there", field=name)
        return calls.raw_element(name, binary[:size]), binary[size:]
    data = tensor.get("data")
    while isinstance(data, list) and len(data) == 1:  # row-major, flat or nested
        data = data[0]
    wanted = str if name == "text_input" else bool
    return (data, binary) if isinstance(data, wanted) else (calls.no_element(name), binary)


def tensors(named: Json, said: Mapping[str, str], wanted: Mapping[str, bool]) -> Response:
    """An answer of infer. wanted: by name, whether as bytes behind the JSON."""
    outputs, behind = [], b""
    for name, raw in wanted.items():
        described: Json = {"name": name, "datatype": "BYTES", "shape": [1]}
        if raw:
            data = calls.raw_text(said[name])
            behind += data
            described["parameters"] = {"binary_data_size": len(data)}
        else:
            described["data"] = [said[name]]
        outputs.append(described)
    head = json.dumps({**named, "outputs": outputs}, ensure_ascii=False).encode()
    if not behind:
        return Response(head, media_type="application/json")
    return Response(head + behind, 200, {HEADER_LENGTH: str(len(head))}, "application/octet-stream")
