"""Chat messages to token ids through the model's own Jinja template.

The template belongs to the model and runs in a sandbox with bounded loops and output. What users write cannot make
special tokens: before rendering, every character of theirs that could begin one is replaced by a private marker, so
that the special tokens in the result are exactly those that the template wrote. Where users wrote none, the ids are
those of the rendered text as a whole, as in Transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as loop_controls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..proto.errors import ConfigError
from .chat_messages import checked_message, invalid, mapped, texts_of
from .tokenizer import Tokenizer
from .tool_calls import ToolStyle, style_of

MAX_LOOP_STEPS = 100_000  # over all ranges of one rendering
MAX_GROWTH = 8  # rendered characters per character of the messages, beyond MAX_OVERHEAD
MAX_OVERHEAD = 1 << 20  # characters
_FIRST_MARKER = 0xF0000  # supplementary private use area
_NOTHING = r"(?!)"
_TAG = r"</?[A-Za-z_][\w-]*>"  # <think> and the like, which templates look for in what users write


class ChatTemplate:
    """The chat template of one model. May be used from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, now: Callable[[], datetime] = datetime.now) -> None:
        """now: the clock of `strftime_now`. Raises ConfigError when the template cannot be compiled."""
        self._tokenizer = tokenizer
        self._now = now
        self._template: jinja2.Template | None = None
        self.tool_style: ToolStyle | None = None  # None: no tools, or calls of no kind known here
        self._guard = _Guard(tokenizer)
        source = tokenizer.chat_templates.get("default")
        if source is not None:
            try:
                environment = _environment()
                self._template = environment.from_string(source)
                if "tools" in meta.find_undeclared_variables(environment.parse(source)):
                    self.tool_style = style_of(source)
            except jinja2.TemplateError as error:
                raise ConfigError(f"the model's chat template cannot be compiled: {error}") from error

    def render_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of the prompt that asks for the next assistant message.

        Each message has a `role` and a `content`: text, or a list of {"type": "text", "text": ...} parts, which are
        joined by line breaks; an assistant's may have `tool_calls`, a tool's a `tool_call_id`. `tools`: as OpenAI has
        them. Raises InvalidRequest (field "messages"), with the template's own words where it refuses.
        """
        plain = [checked_message(i, message) for i, message in enumerate(messages)]
        if not plain:
            raise invalid("messages must not be empty")
        texts = list(texts_of([plain, list(tools)]))
        shield = self._guard.shield("".join(texts))
        size = sum(map(len, texts))
        text = self._render(mapped(plain, shield.hide), mapped(list(tools), shield.hide), size)
        return self._guard.encode(text, shield)

    def _render(self, messages: Any, tools: Any, size: int) -> str:
        if self._template is None:
            raise invalid("this model has no chat template; send a prompt instead of messages")
        limit = MAX_OVERHEAD + MAX_GROWTH * size
        variables = {
            **self._tokenizer.named_specials,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": True,
            "strftime_now": lambda form: self._now().strftime(form),
            "range": _BoundedRange(),
        }
        parts, length = [], 0
        try:
            for part in self._template.generate(variables):
                length += len(part)
                if length > limit:
                    raise SecurityError(f"more than {limit} characters of output")
                parts.append(part)
        except jinja2.TemplateError as error:
            raise invalid(f"the model's chat template refuses these messages: {error.message or error}") from error
        except Exception as error:  # a template can raise whatever Python's own types raise
            raise invalid(f"the model's chat template fails on these messages: {error}") from error
        return "".join(parts)


# ---- special tokens ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shield:
    """The markers of one rendering."""

    firsts: re.Pattern[str]  # any first character of a special token
    tags: re.Pattern[str]  # what begins like one but is left alone
    markers: Mapping[str, str]  # first character -> what stands for it

    def hide(self, text: str) -> str:
        def replace(found: re.Match[str]) -> str:
            return found[0] if self.tags.match(text, found.start()) else self.markers[found[0]]

        return self.firsts.sub(replace, text)

    def restore(self, text: str) -> str:
        for character, marker in self.markers.items():
            text = text.replace(marker, character)
        return text


class _Guard:
    """Tells the template's special tokens from those that users spell out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._specials = {special.text: special for special in tokenizer.specials}
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or _NOTHING)
        self._firsts = sorted({text[0] for text in self._specials})
        self._first = re.compile("|".join(map(re.escape, self._firsts)) or _NOTHING)
        no_special = "".join(f"(?!{re.escape(text)})" for text in longest_first)
        inside_tags = any(first.isalnum() or first in "_-/>" for first in self._firsts)
        self._tags = re.compile(_NOTHING if inside_tags else no_special + _TAG)

    def shield(self, texts: str) -> _Shield:
        """Markers that do not occur in `texts`."""
        free = (chr(code) for code in range(_FIRST_MARKER, 0x10FFFE) if chr(code) not in texts)
        return _Shield(self._first, self._tags, {first: next(free) for first in self._firsts})

    def encode(self, text: str, shield: _Shield) -> list[int]:
        """Ids of a rendered text whose markers are still in place."""
        restored = shield.restore(text)
        ours = [found.span() for found in self._any.finditer(text)]
        if ours == [found.span() for found in self._any.finditer(restored)]:
            return self._tokenizer.encode(restored, special=True, bos=False)
        return [i for piece in self._pieces(text, shield) for i in piece]

    def _pieces(self, text: str, shield: _Shield) -> Iterator[list[int]]:
        """The template's special tokens one by one, what lies between them as ordinary text."""
        at, strip_left = 0, False
        for found in [*self._any.finditer(text), None]:
            special = self._specials[found[0]] if found else None
            between = shield.restore(text[at : found.start() if found else len(text)])
            between = between.lstrip() if strip_left else between
            between = between.rstrip() if special and special.strips_left else between
            if between:
                yield self._tokenizer.encode(between, special=False, bos=False)
            if special and found:
                yield [special.token_id]
                at, strip_left = found.end(), special.strips_right


# ---- the sandbox ---------------------------------------------------------------------------------------------


class _BoundedRange:
    """`range` for one rendering; all its ranges together have at most MAX_LOOP_STEPS steps."""

    def __init__(self) -> None:
        self._left = MAX_LOOP_STEPS

    def __call__(self, *arguments: int) -> range:
        steps = range(*arguments)
        if len(steps) > self._left:
            raise SecurityError(f"ranges of more than {MAX_LOOP_STEPS} steps")
        self._left -= len(steps)
        return steps


class _Environment(ImmutableSandboxedEnvironment):
    """Multiplication makes no long strings or lists, powers no long numbers."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            repeated = operator == "*" and isinstance(one, Sequence) and isinstance(other, int)
            if repeated and len(one) * other > MAX_OVERHEAD:
                raise SecurityError(f"a product of more than {MAX_OVERHEAD} items")
        if operator == "**" and (abs(left) > MAX_LOOP_STEPS or abs(right) > 64):
            raise SecurityError("a power of more than 64 or of a large number")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> _Environment:
    """Jinja as Transformers sets it up."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loop_controls])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment
