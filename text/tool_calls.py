"""Tool calls in a model's text: which way of writing them its chat template teaches, and a parser that streams. Pure.

hermes  <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>, several one after the other, text before them
json    {"name": "f", "parameters": {...}} and nothing else; several with ";" between them
mistral [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...], text before it; the mark is a special token
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import grammar

_BETWEEN = " \t\r\n;"  # calls without marks
_MOST_HEAD = 512  # characters of a call until its name and the beginning of its arguments are found


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """How calls are written: `begin` JSON `end`, with `between` them; the key of the arguments.

    Where there is a `mark`, it and `opening` come before the first call, and `closing` behind the last.
    """

    name: str
    begin: str
    end: str
    between: str
    arguments: str
    mark: str = ""
    opening: str = ""
    closing: str = ""
    id_characters: int | None = None  # letters and digits of a call's id, where the template insists; None: any id


HERMES = ToolStyle("hermes", "<tool_call>\n", "\n</tool_call>", "\n", "arguments")
JSON = ToolStyle("json", "", "", "; ", "parameters")
MISTRAL = ToolStyle("mistral", "", "", ", ", "arguments", "[TOOL_CALLS]", " [", "]", 9)
_BY_TEMPLATE = (  # the first whose mark the template contains
    ("<tool_call>", HERMES),
    ("[ARGS]", None),  # [TOOL_CALLS]f[ARGS]{...}: not known here
    (MISTRAL.mark, MISTRAL),
    ('"parameters"', JSON),
)


def style_of(template: str) -> ToolStyle | None:
    """The style that a chat template asks the model for; None: none that is known here."""
    return next((style for mark, style in _BY_TEMPLATE if mark in template), None)


def call_grammar(
    style: ToolStyle, tools: Sequence[Mapping[str, Any]], *, several: bool, mark_id: int | None = None
) -> str:
    """One call of one of these tools (`function` objects: name, parameters), or several. mark_id: of the style's mark,
    where that is one token."""
    definitions, calls = {}, []
    for number, tool in enumerate(tools):
        place = f"tool{number}"
        definitions[place] = _moved(tool.get("parameters") or {"type": "object"}, f"#/$defs/{place}")
        fields = {"name": {"const": tool["name"]}, style.arguments: {"$ref": f"#/$defs/{place}"}}
        calls.append({"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})
    schema = {"x-guidance": grammar.JSON_STYLE, "$defs": definitions, "anyOf": calls}
    more = f" ({json.dumps(style.between)} call)*" if several else ""
    begin, end = (json.dumps(mark) + " " if mark else "" for mark in (style.begin, style.end))
    around = "", ""
    if style.mark:
        mark = json.dumps(style.mark) if mark_id is None else f"<[{mark_id}]>"
        around = f"{mark} {json.dumps(style.opening)} ", f" {json.dumps(style.closing)}"
    return f"start: {around[0]}call{more}{around[1]}\ncall: {begin}body {end}\nbody: %json {json.dumps(schema)}\n"


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references into itself hold where it is a part, at `place`, of another one."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items() if key not in ("$schema", "$id")}
    target = moved.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the arguments of the call that began last."""

    text: str


Part = str | CallBegin | CallArguments  # str: text beside the calls


class ToolCallParser:
    """Splits the text of one choice, as it comes. What is no call after all comes out as text."""

    def __init__(self, style: ToolStyle) -> None:
        self.calls = 0
        self._style = style
        self._mark = style.begin.strip() or "{"  # what a call begins with
        self._held = ""  # not given out: it may be, or is, the beginning of a call
        self._call: _Call | None = None
        self._said = False  # any text so far, since the calls were opened
        self._open = not style.mark  # calls may come
        self._unspent = ""  # the mark that opened them, until there is one
        self._between = _BETWEEN + ",[]" if style.mark else _BETWEEN

    def push(self, text: str) -> list[Part]:
        """What the text brings out."""
        self._held += text
        parts: list[Part] = []
        while self._held:
            before = len(self._held), self._call
            parts += self._outside() if self._call is None else self._inside(self._call)
            if (len(self._held), self._call) == before:
                break
        return parts

    def flush(self) -> list[Part]:
        """What is still held back when the text ends."""
        call, held = self._call, self._held
        self._call, self._held = None, ""
        if call is not None and call.named:
            return []  # the arguments were cut off, or what follows them was
        text = held if call is None else self._style.begin + call.head.lstrip()
        if self._style.mark and self.calls and not text.strip(self._between):
            return []  # the end of the list
        text = self._unspent + text
        return [text] if text.strip() else []

    def _outside(self) -> list[Part]:
        held, mark = self._held, self._mark if self._open else self._style.mark
        if mark == "{" and not held.strip(self._between):
            return []
        if mark == "{" and (self._said or held.lstrip(self._between)[:1] != "{"):
            return self._give(len(held))  # a text that does not begin with a call has none
        at = held.find(mark)
        if at < 0:
            keep = next((n for n in range(min(len(mark) - 1, len(held)), 0, -1) if held.endswith(mark[:n])), 0)
            return self._give(len(held[: len(held) - keep].rstrip()))
        before = held[:at].strip(self._between if mark == "{" else None)
        if not self._open:
            self._open, self._said, self._unspent, self._held = True, False, mark, held[at + len(mark) :]
            return [before] if before else []
        self._unspent += held[:at] if self._unspent else ""
        self._call = _Call(self._style.arguments)
        self._held = held[at:] if mark == "{" else held[at + len(mark) :].lstrip()
        return [before] if before else []

    def _give(self, count: int) -> list[Part]:
        text, self._held = self._unspent + self._held[:count], self._held[count:]
        self._unspent = ""
        self._said = self._said or bool(text.strip())
        return [text] if text else []

    def _inside(self, call: _Call) -> list[Part]:
        named, end = call.named, self._style.end.strip()
        parts: list[Part] = []
        if not call.over:
            parts += call.push(self._held)
            self._held = call.rest
            self.calls += call.named and not named
            self._unspent = "" if call.named else self._unspent
        if call.failed:
            text = self._unspent + self._style.begin + call.head.lstrip() + call.rest
            self._call, self._held, self._said, self._unspent = None, "", True, ""
            return [*parts, text]
        if call.over:
            after = self._held.lstrip()
            if after.startswith(end):
                self._call, self._held = None, after[len(end) :]
            elif not end.startswith(after):
                self._call, self._held = None, after  # without its end
        return parts


class _Call:
    """One JSON object {"name": ..., arguments: {...}}, character by character; `rest`: what is not taken in."""

    def __init__(self, key: str) -> None:
        self.named = self.over = self.failed = False
        self.head = ""  # until the arguments begin
        self.rest = ""
        keys = f'"(?:{key}|arguments|parameters)"'
        self._pattern = re.compile(rf'\s*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*{keys}\s*:\s*(?=\S)', re.DOTALL)
        self._scan = _ObjectEnd()  # of the arguments
        self._whole = _ObjectEnd()

    def push(self, text: str) -> Iterator[Part]:
        """Name and arguments as soon as they are known. A text that ends inside the head is kept."""
        self.rest = ""
        if not self.named:
            self.head += text
            found = self._pattern.match(self.head) if len(self.head) <= _MOST_HEAD + len(text) else None
            if found is None:
                yield from self._other_order(text)
                return
            self.named = True
            yield CallBegin(str(json.loads(found[1], strict=False)))
            text, self.head = self.head[found.end() :], ""
        if not self._scan.over:
            count = self._scan.push(text)
            if count:
                yield CallArguments(text[:count])
            text = text[count:]
        if self._scan.over and not self.over:
            at = text.find("}")
            self.over = at >= 0
            text = text[at + 1 :]
        self.rest = text

    def _other_order(self, text: str) -> Iterator[Part]:
        """Whatever else a call may look like: taken as a whole."""
        if not self.head.strip():
            return
        count = len(self.head) - len(text) + self._whole.push(text)
        if not self._whole.over:
            return
        self.head, self.rest = self.head[:count], self.head[count:]
        try:
            call = json.loads(self.head, strict=False)
        except ValueError:
            call = None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            self.failed = True
            return
        self.named = self.over = True
        arguments = call.get("arguments", call.get("parameters", {}))
        yield CallBegin(call["name"])
        yield CallArguments(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


class _ObjectEnd:
    """Finds the end of a JSON value that begins with the first character pushed."""

    def __init__(self) -> None:
        self.over = False
        self._depth = 0
        self._string = self._escape = False

    def push(self, text: str) -> int:
        """How many characters belong to the value."""
        for at, character in enumerate(text):
            if self._string:
                if self._escape:
                    self._escape = False
                elif character == "\\":
                    self._escape = True
                elif character == '"':
                    self._string = False
            elif character == '"':
                self._string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.over = True
                    return at + (self._depth == 0)
            elif character == "," and not self._depth:
                self.over = True
                return at
        return len(text)
