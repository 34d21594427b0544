"""The OpenAPI document of the HTTP service, made from the same models that read the bodies."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import BaseModel

from .. import __version__
from .open_inference_call import OUTPUTS
from .openai_neutral import NEUTRAL
from .openai_schema import ChatRequest, CompletionRequest
from .openai_text import DetokenizeRequest, TokenizeRequest
from .validate import (
    MAX_BIAS,
    MAX_INT32,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STREAM_INTERVAL,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)

Json = dict[str, Any]
_REF = "#/components/schemas/"
_PATH_IDS = {"model": "/v1/models/{model}", "file_id": "/v1/files/{file_id}", "batch_id": "/v1/batches/{batch_id}"}


@functools.cache
def document(served: str) -> Json:
    """OpenAPI 3.1. served: the model's name."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "baton", "version": __version__, "description": "An OpenAI-compatible server."},
        "paths": _paths(served),
        "components": {"schemas": _schemas()},
    }


def _paths(served: str) -> Json:
    named = {"enum": [served]}
    generated: Json = {"application/json": {}, "text/event-stream": {}}
    form = {"type": "object", "required": ["file", "purpose"], "properties": {
        "file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}}  # fmt: skip
    return {
        "/v1/completions": {"post": _post("Continue a prompt", "CompletionRequest", generated)},
        "/v1/chat/completions": {"post": _post("Answer a chat", "ChatRequest", generated)},
        "/v1/models": {"get": _get("The model that is served", 503)},
        _PATH_IDS["model"]: {"get": _get("The same by its name", 404, 503, path="model", of=named)},
        "/tokenize": {"post": _post("Token ids of a prompt or a chat", "TokenizeRequest")},
        "/detokenize": {"post": _post("The text of token ids", "DetokenizeRequest")},
        "/health": {"get": _get("Whether a request can be served", 503)},
        "/ready": {"get": _get("The same", 503)},
        "/live": {"get": _get("Whether the process answers")},
        "/version": {"get": _get("Of the server")},
        "/metrics": {"get": _get("In Prometheus' text format", media="text/plain")},
        "/v1/files": {
            "get": _get("Files", 400, 404, query=("limit", "after")),
            "post": {
                "summary": "Upload a file of requests",
                "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}},
                "responses": _responses({"application/json": {}}, 400, 404, 413, 429, 503),
            },
        },
        _PATH_IDS["file_id"]: {
            "get": _get("A file's description", 404, path="file_id"),
            "delete": _get("Delete a file", 400, 404, path="file_id"),
        },
        _PATH_IDS["file_id"] + "/content": {
            "get": _get("A file's content", 404, path="file_id", media="application/octet-stream")
        },
        "/v1/batches": {
            "get": _get("Batches", 400, 404, query=("limit", "after")),
            "post": _post("Answer the requests of a file", "BatchRequest"),
        },
        _PATH_IDS["batch_id"]: {"get": _get("A batch", 404, path="batch_id")},
        _PATH_IDS["batch_id"] + "/cancel": {"post": _get("End a batch", 400, 404, path="batch_id")},
        **_open_inference(named),
    }


def _open_inference(named: Json) -> Json:
    """Of the Open Inference Protocol."""
    model = "/v2/models/{model}"
    events: Json = {"text/event-stream": {}}

    def post(summary: str, body: str, content: Json | None = None) -> Json:
        return {"post": {**_post(summary, body, content), "parameters": [_parameter("model", "path", named)]}}

    return {
        "/v2": {"get": _get("What the server is")},
        "/v2/health/live": {"get": _get("Whether the process answers")},
        "/v2/health/ready": {"get": _get("Whether a request can be served", 503)},
        model: {"get": _get("The tensors of the model", 404, path="model", of=named)},
        model + "/ready": {"get": _get("Whether it can be used", 404, 503, path="model", of=named)},
        model + "/infer": post("One prompt, as tensors", "InferRequest"),
        model + "/generate": post("One prompt", "TextRequest"),
        model + "/generate_stream": post("One prompt, in pieces", "TextRequest", events),
    }


def _get(
    summary: str,
    *errors: int,
    path: str = "",
    of: Json | None = None,
    query: tuple[str, ...] = (),
    media: str = "application/json",
) -> Json:
    """of: the schema of the path's parameter, where it is not any text."""
    parameters = [_parameter(path, "path", of)] if path else []
    parameters += [_parameter(name, "query") for name in query]
    return {"summary": summary, "parameters": parameters, "responses": _responses({media: {}}, *errors)}


def _parameter(name: str, where: str, schema: Json | None = None) -> Json:
    return {"name": name, "in": where, "required": where == "path", "schema": schema or {"type": "string"}}


def _post(summary: str, body: str, content: Json | None = None) -> Json:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": _REF + body}}}},
        "responses": _responses(content or {"application/json": {}}, 400, 404, 408, 413, 429, 499, 503, 504),
    }


def _responses(content: Json, *errors: int) -> Json:
    error = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
    answers: Json = {"200": {"description": "The answer", "content": content}}
    return answers | {str(status): {"description": "An error", "content": error} for status in errors}


def _schemas() -> Json:
    schemas: Json = {"Error": _error(), "BatchRequest": _batch(), "InferRequest": _infer(), "TextRequest": _text()}
    kinds: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
    for kind in kinds:
        schema = kind.model_json_schema(ref_template=_REF + "{model}")
        schemas |= schema.pop("$defs", {})
        schemas[kind.__name__] = schema
    for kind in (CompletionRequest, ChatRequest):
        neutral = {name: {"enum": [None, *values]} for name, values in NEUTRAL.items()}
        schemas[kind.__name__]["properties"] |= neutral | _refined()
    schemas["ChatRequest"]["properties"]["messages"] = _messages()
    schemas["CompletionRequest"]["properties"] |= {"prompt": _prompt(), "logprobs": _optional("integer", 0, 5)}
    return schemas


def _optional(kind: str, low: float, high: float) -> Json:
    return {"anyOf": [{"type": kind, "minimum": low, "maximum": high}, {"type": "null"}]}


def _refined() -> Json:
    """The ranges of the fields that both endpoints have; those that depend on the model or the configuration aside."""
    penalty = _optional("number", -MAX_PENALTY, MAX_PENALTY)
    text = {"type": "string", "minLength": 1, "maxLength": 64}
    return {
        "temperature": _optional("number", 0, MAX_TEMPERATURE),
        "top_p": {"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {"type": "null"}]},
        "top_k": _optional("integer", -1, MAX_INT32),
        "min_p": _optional("number", 0, 1),
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "repetition_penalty": _optional("number", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        "seed": _optional("integer", -(1 << 63), MAX_SEED),
        "n": _optional("integer", 1, 16),
        "max_tokens": _optional("integer", 1, MAX_INT32),
        "priority": _optional("integer", -MAX_PRIORITY, MAX_PRIORITY),
        "stream_interval": _optional("integer", 1, MAX_STREAM_INTERVAL),
        "stop": {"anyOf": [text, {"type": "array", "items": text, "maxItems": 4}, {"type": "null"}]},
        "logit_bias": {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
                },
                {"type": "null"},
            ]
        },
        "response_format": {
            "anyOf": [
                {"type": "null"},
                {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}},
                {
                    "type": "object",
                    "required": ["type", "json_schema"],
                    "properties": {"type": {"const": "json_schema"}, "json_schema": {"type": "object"}},
                },
            ]
        },
    }


def _messages() -> Json:
    fields = {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}}
    return {"type": "array", "minItems": 1, "items": {"type": "object", "required": list(fields), "properties": fields}}


def _prompt() -> Json:
    text, ids = {"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    return {"anyOf": [text, ids, *({"type": "array", "items": one, "minItems": 1} for one in (text, ids))]}


def _error() -> Json:
    text = {"type": "string"}
    fields = {"message": text, "type": text, "param": {"type": ["string", "null"]}, "code": text}
    inner = {"type": "object", "required": list(fields), "properties": fields}
    state = {"type": "object", "required": ["status", "reason"], "properties": {"status": text, "reason": text}}
    found = [{"type": "object", "required": ["error"], "properties": {"error": one}} for one in (inner, text)]
    return {"anyOf": [*found, state, {"type": "object", "required": ["ready"]}]}


def _batch() -> Json:
    fields = {
        "input_file_id": {"type": "string"},
        "endpoint": {"enum": ["/v1/completions", "/v1/chat/completions"]},
        "completion_window": {"type": "string", "pattern": "^[1-9][0-9]{0,2}h$"},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 16},
    }
    required = ["input_file_id", "endpoint"]
    return {"type": "object", "required": required, "properties": fields, "additionalProperties": False}


def _options() -> Json:
    """Parameters of a call of the Open Inference Protocol: fields of a GenerateRequest."""
    whole = {"type": "integer", "minimum": 1, "maximum": MAX_INT32}
    number = {"type": "number", "minimum": 0, "maximum": MAX_TEMPERATURE}
    fields = {"max_tokens": whole, "temperature": number, "seed": {"type": "integer"}, "stop": {"type": "string"}}
    return {"type": "object", "properties": {**fields, "ignore_eos": {"type": "boolean"}}}


def _infer() -> Json:
    outputs = {"type": "array", "items": {"type": "object", "properties": {"name": {"enum": list(OUTPUTS)}}}}
    tensor = {
        "type": "object",
        "required": ["name", "shape", "datatype", "data"],
        "properties": {
            "name": {"const": "text_input"},
            "shape": {"const": [1]},
            "datatype": {"const": "BYTES"},
            "data": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1},
        },
    }
    inputs = {"type": "array", "items": tensor, "minItems": 1, "maxItems": 1}
    fields = {"id": {"type": "string"}, "parameters": _options(), "inputs": inputs, "outputs": outputs}
    return {"type": "object", "required": ["inputs"], "properties": fields, "additionalProperties": False}


def _text() -> Json:
    fields = {"id": {"type": "string"}, "text_input": {"type": "string", "minLength": 1}, "parameters": _options()}
    return {"type": "object", "required": ["text_input"], "properties": fields}
