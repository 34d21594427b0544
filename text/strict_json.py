"""JSON from clients: what later stages could not carry (text that is no Unicode, abysses) is refused here, by field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64
_MOST_CONTAINERS = 1 << 16  # lists and objects; to make millions of them takes a second
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_EXACT_DIGITS = 32  # longer integers are far outside every range of ours, and slow to make
_LONG_INTEGER = re.compile(rf"\d{{{_EXACT_DIGITS + 1}}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """The text or value cannot be taken; `field`: the top-level name it is under, "" for the whole."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


def loads(raw: bytes | str, bound: Callable[[Any], None] = lambda value: None) -> Any:
    """The value. NaN and infinities pass; an integer of more than 32 digits becomes a float. Raises JsonError.

    `bound` may refuse the value, by raising, before anything goes through all of it.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8-sig")
        _count_containers(text)
        value = json.loads(text, parse_int=_integer if _LONG_INTEGER.search(text) else None)
    except UnicodeDecodeError as error:
        raise JsonError(f"not JSON: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise JsonError(f"not JSON: nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise JsonError(f"not JSON: {error}") from None
    bound(value)
    if _SURROGATE.search(text) or text.count("[") + text.count("{") > MAX_DEPTH:
        check(value)
    return value


def _count_containers(text: str) -> None:
    if text.count("[") + text.count("{") > _MOST_CONTAINERS:
        bare = _STRING.sub("", text)
        if bare.count("[") + bare.count("{") > _MOST_CONTAINERS:
            raise ValueError(f"more than {_MOST_CONTAINERS} lists and objects")


def check(value: Any) -> None:
    """Refuses text with lone surrogates, and nesting deeper than MAX_DEPTH. Raises JsonError that names the field."""
    if not isinstance(value, dict):
        _check("", value)
        return
    for name, content in value.items():
        _check("", name)
        _check(name, content)


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _EXACT_DIGITS else float(digits)


def _check(field: str, value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _check_text(field, item)
            elif isinstance(item, dict):
                deeper += item
                deeper += item.values()
            elif isinstance(item, list):
                deeper += (part for part in item if isinstance(part, str | list | dict))
        if not deeper:
            return
        level = deeper
    raise JsonError(f"nested deeper than {MAX_DEPTH}", field)


def _check_text(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = "" if field else f" in the field name {text!a:.100}"
        raise JsonError(f"not valid Unicode text: a lone surrogate at character {error.start}{where}", field) from None
