"""Which fields of an OpenAI body say what the answer must be: response_format, vLLM's guided_* and structured_outputs,
and tools with tool_choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..proto.errors import InvalidRequest
from .constraint import Calls, Constraint, Kind

_ANY_OBJECT = {"type": "object"}
_GUIDED: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_STRUCTURED: dict[str, Kind] = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_VALUES: dict[Kind, tuple[type | tuple[type, ...], str]] = {
    "json": ((dict, str, bool), "a JSON schema"),
    "regex": (str, "a text"),
    "choice": (list, "a list of texts"),
    "grammar": (str, "a text"),
}
_MAX_NAME = 64


def _refuse(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {message}", field=field.partition(".")[0].partition("[")[0])


def constraint_of(response_format: Any, structured: Any, guided: Mapping[str, Any]) -> Constraint | None:
    """The one constraint of a body. guided: its guided_* fields. Raises InvalidRequest, also for two of them."""
    found = [one for one in (_response_format(response_format), *_structured(structured)) if one is not None]
    for name, value in guided.items():
        if name == "guided_json_object":
            found += [Constraint("json", _ANY_OBJECT, name)] if value is True else []
        elif value is not None:
            found.append(_constraint(_GUIDED[name], value, name))
    if len(found) > 1:
        raise _refuse(found[1].field, f"the answer must follow {found[0].field} already")
    return found[0] if found else None


def _response_format(given: Any) -> Constraint | None:
    field = "response_format"
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json", _ANY_OBJECT, field)
    if kind != "json_schema":
        raise _refuse(field, "must be an object of type text, json_object or json_schema")
    described = given.get("json_schema")
    schema = described.get("schema", described.get("json_schema")) if isinstance(described, dict) else None
    if schema is None:
        raise _refuse(field, "json_schema needs a schema: {'name': ..., 'schema': {...}}")
    return _constraint("json", schema, field)


def _structured(given: Any) -> list[Constraint]:
    """vLLM's structured_outputs."""
    field = "structured_outputs"
    if given is None:
        return []
    if not isinstance(given, dict):
        raise _refuse(field, "must be an object")
    found = []
    for name, value in given.items():
        if name == "json_object" and value is True:
            found.append(Constraint("json", _ANY_OBJECT, field))
        elif name in _STRUCTURED and value is not None:
            found.append(_constraint(_STRUCTURED[name], value, field))
        elif value not in (None, False):
            raise _refuse(field, f"{name:.100} is not supported; one of {', '.join(_STRUCTURED)}, json_object")
    return found


def _constraint(kind: Kind, value: Any, field: str) -> Constraint:
    types, what = _VALUES[kind]
    texts = value if isinstance(value, list) else []
    if not isinstance(value, types) or not all(isinstance(one, str) for one in texts):
        raise _refuse(field, f"must be {what}")
    return Constraint(kind, value, field)


def tools_of(tools: Any, choice: Any, *, several: bool) -> tuple[list[dict[str, Any]], Constraint | None]:
    """(the tools that the model may use, what tool_choice makes of the answer). Raises InvalidRequest."""
    known = [_tool(index, tool) for index, tool in enumerate(tools or ())]
    if choice in (None, "auto", "none") or not known:
        if choice not in (None, "auto", "none"):
            raise _refuse("tool_choice", "there are no tools")
        return (known if choice != "none" else []), None
    functions = [tool["function"] for tool in known]
    if choice == "required":
        return known, Constraint("calls", Calls(functions, several), "tool_choice")
    return known, Constraint("calls", Calls([_named(choice, functions)], False), "tool_choice")


def _named(choice: Any, functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _refuse("tool_choice", "must be none, auto, required or {'type': 'function', 'function': {'name': ...}}")
    found = next((one for one in functions if one["name"] == name), None)
    if found is None:
        raise _refuse("tool_choice", f"no tool has the name {name!r:.100}")
    return found


def _tool(index: int, tool: Any) -> dict[str, Any]:
    where = f"tools[{index}]"
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise _refuse(where, "must be {'type': 'function', 'function': {...}}")
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME:
        raise _refuse(f"{where}.function.name", f"must be a text of 1 to {_MAX_NAME} characters")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise _refuse(f"{where}.function.parameters", "must be a JSON schema, an object")
    if not isinstance(function.get("description", ""), str | None):
        raise _refuse(f"{where}.function.description", "must be a text")
    return {"type": "function", "function": {key: value for key, value in function.items() if key != "strict"}}
