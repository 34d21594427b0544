"""What a client wants the answer to be (JSON, a pattern, a choice, a grammar, calls of tools), as a grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..proto.errors import InvalidRequest
from ..text import grammar
from ..text.tool_calls import ToolStyle, call_grammar

Kind = Literal["json", "regex", "choice", "grammar", "calls"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """`value`: a JSON schema; a regular expression; a list of texts; a grammar; Calls. `field`: whose fault it is."""

    kind: Kind
    value: Any
    field: str


@dataclass(frozen=True, slots=True)
class Calls:
    """One call, or several, of one of these tools (name, description, parameters)."""

    tools: Sequence[Mapping[str, Any]]
    several: bool


def compiled(wanted: Constraint, vocabulary: grammar.Vocabulary, style: ToolStyle | None, most_bytes: int) -> str:
    """The grammar, checked against the model's tokens: tens of milliseconds. Raises InvalidRequest with the field."""
    mark_id = vocabulary.special_ids.get(style.mark) if style is not None else None
    text = _grammar(wanted, style, mark_id)
    size = len(text.encode())
    if size > most_bytes:
        raise InvalidRequest(
            f"{wanted.field}: a grammar of {size} bytes, at most {most_bytes} are taken", field=wanted.field
        )
    vocabulary.check(text, wanted.field)
    return text


def _grammar(wanted: Constraint, style: ToolStyle | None, mark_id: int | None) -> str:
    match wanted.kind:
        case "json":
            return grammar.from_schema(wanted.value, wanted.field)
        case "regex":
            return grammar.from_regex(wanted.value)
        case "choice":
            return grammar.from_choices(wanted.value, wanted.field)
        case "grammar":
            return grammar.from_text(wanted.value, wanted.field)
        case "calls":
            if style is None:
                raise InvalidRequest(f"{wanted.field}: this model's chat template takes no tools", field=wanted.field)
            return call_grammar(style, wanted.value.tools, several=wanted.value.several, mark_id=mark_id)
