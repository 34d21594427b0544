"""The messages of a chat as templates take them: checked, the parts of a content joined, tool calls as objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..proto.errors import InvalidRequest


def invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="messages")


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a JSON value, the names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, content in value.items():
            yield name
            yield from texts_of(content)
    elif isinstance(value, list):
        for part in value:
            yield from texts_of(part)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text changed, the names of fields included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            name if name.isidentifier() else change(name): mapped(content, change) for name, content in value.items()
        }
    return [mapped(part, change) for part in value] if isinstance(value, list) else value


def checked_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """The texts of one message, its parts joined."""
    if not isinstance(message, Mapping):
        raise invalid(f"messages[{index}] must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"messages[{index}].role must be a non-empty string")
    calls = message.get("tool_calls")
    content = message.get("content")
    checked: dict[str, Any] = {"role": role, "content": "" if calls and content is None else _content(index, content)}
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            checked[key] = message[key]
    if calls:
        checked["tool_calls"] = [_call(f"messages[{index}].tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return checked


def _call(where: str, call: Any) -> dict[str, Any]:
    """A tool call of an earlier answer; its arguments as an object, as templates want them."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(f"{where} must have a function with a name")
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise invalid(f"{where}.function.arguments must be JSON") from None
    if not isinstance(parsed, Mapping):
        raise invalid(f"{where}.function.arguments must be a JSON object")
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": parsed},
    }


def _content(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise invalid(f"messages[{index}].content must be text or a list of text parts, not {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"messages[{index}].content[{i}]: only text parts are supported, not {kind!r}")
        texts.append(part["text"])
    return "\n".join(texts)
