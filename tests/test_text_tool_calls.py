"""Tool calls in text: the same parts however the text is split, and what is no call is text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from baton.proto.errors import InvalidRequest
from baton.text import grammar
from baton.text.chat_messages import checked_message
from baton.text.grammar import Vocabulary
from baton.text.tokenizer import Tokenizer
from baton.text.tool_calls import HERMES, JSON, MISTRAL, CallBegin, ToolCallParser, ToolStyle, call_grammar, style_of

TOOLS: list[dict[str, Any]] = [
    {"name": "f", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"],
     "additionalProperties": False, "$defs": {"x": {"enum": [1, 2]}}}},
    {"name": "g"},
]  # fmt: skip


def parsed(style: ToolStyle, text: str, step: int) -> list[tuple[str, str]]:
    """(name of the call, its arguments) in order; the text beside calls under the name ""."""
    parser = ToolCallParser(style)
    found: list[tuple[str, str]] = []
    parts = [part for at in range(0, len(text), step) for part in parser.push(text[at : at + step])]
    for part in [*parts, *parser.flush()]:
        if isinstance(part, CallBegin):
            found.append((part.name, ""))
        elif isinstance(part, str):
            before = found.pop()[1] if found and not found[-1][0] else ""
            found.append(("", before + part))
        else:
            found[-1] = (found[-1][0], found[-1][1] + part.text)
    assert parser.calls == sum(bool(name) for name, _ in found)
    return found


@pytest.mark.parametrize(
    ("style", "text", "parts"),
    [
        (HERMES, "no call < at <tool all", [("", "no call < at <tool all")]),
        (
            HERMES,
            '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"</tool_call>", "b": [{}]}}\n</tool_call>\n<tool_call>\n'
            '{"name": "g", "arguments": {}}\n</tool_call>',
            [("f", '{"a": "}\\"</tool_call>", "b": [{}]}'), ("g", "{}")],
        ),
        (
            HERMES,
            'I call.\n<tool_call>{"arguments": {"q": 1}, "name": "f"}</tool_call> done',
            [("", "I call."), ("f", '{"q": 1}'), ("", " done")],
        ),
        (HERMES, '<tool_call>\n{"nome": 3}\n</tool_call> x', [("", '<tool_call>\n{"nome": 3}\n</tool_call> x')]),
        (HERMES, "<tool_call>nonsense", [("", "<tool_call>\nnonsense")]),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "cut', [("f", '{"a": "cut')]),
        (HERMES, '<tool_call>\n{"na', [("", '<tool_call>\n{"na')]),
        (
            JSON,
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (JSON, 'Well, {"name": "f", "parameters": {}}', [("", 'Well, {"name": "f", "parameters": {}}')]),
        (JSON, '{"x": 1}', [("", '{"x": 1}')]),
        (MISTRAL, "[1, {}] no call [TOOL", [("", "[1, {}] no call [TOOL")]),
        (
            MISTRAL,
            'Two. [TOOL_CALLS] [{"name": "f", "arguments": {"a": ["]"]}}, {"name": "g", "arguments": {}, "id": "1"}]',
            [("", "Two."), ("f", '{"a": ["]"]}'), ("g", "{}")],
        ),
        (MISTRAL, '[TOOL_CALLS][{"arguments": {"q": 1}, "name": "f"}]', [("f", '{"q": 1}')]),
        (MISTRAL, "x[TOOL_CALLS] nothing", [("", "x[TOOL_CALLS] nothing")]),
        (MISTRAL, "[TOOL_CALLS] []", [("", "[TOOL_CALLS] []")]),
        (MISTRAL, '[TOOL_CALLS] [{"nome": 3}]', [("", '[TOOL_CALLS] [{"nome": 3}]')]),
    ],
)  # fmt: skip
def test_any_split_gives_the_same_parts(style: ToolStyle, text: str, parts: list[tuple[str, str]]) -> None:
    for step in (1, 2, 3, 7, len(text)):
        assert parsed(style, text, step) == parts


def test_long_arguments_in_the_other_order_are_read_once() -> None:
    """Not again for each token: 300,000 characters would take minutes."""
    text = '<tool_call>{"arguments": {"a": "' + "x" * 300_000 + '"}, "name": "f"}</tool_call>'
    assert parsed(HERMES, text, 4)[0][0] == "f"


@pytest.mark.parametrize("style", [HERMES, JSON, MISTRAL])
@pytest.mark.parametrize("several", [False, True])
def test_the_grammar_of_calls_is_what_the_parser_reads(
    style: ToolStyle, several: bool, tiny_tokenizer: Tokenizer
) -> None:
    vocabulary = Vocabulary(tiny_tokenizer)
    text = call_grammar(style, TOOLS, several=several)
    vocabulary.check(text, "tools")
    around = style.mark + style.opening, style.closing
    one = f'{style.begin}{{"name": "f", "{style.arguments}": {{"a": 2}}}}{style.end}'
    two = f'{style.begin}{{"name": "g", "{style.arguments}": {{"b": [true]}}}}{style.end}'
    for said, allowed in (
        (one, True),
        (two, True),
        (one + style.between + two, several),
        (one.replace("2", "3"), False),
    ):
        matcher = vocabulary.matcher(text)
        said = said.join(around)
        ids = tiny_tokenizer.encode(said, special=False, bos=False)
        assert (
            matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()
        ) is allowed
        if allowed:
            assert all(json.loads(arguments) for _, arguments in parsed(style, said, 5))


def test_styles_are_told_by_the_template() -> None:
    assert style_of("{{ '<tool_call>' }} tools") is HERMES
    assert style_of('{"name": ..., "parameters": ...}') is JSON
    assert style_of("{{ '[TOOL_CALLS] [' }} tools") is MISTRAL
    assert style_of("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}") is None
    assert style_of("{% for message in messages %}") is None


def test_calls_of_earlier_answers_are_objects_for_templates() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    checked = checked_message(0, {"role": "assistant", "content": None, "tool_calls": [call]})
    assert checked["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    for bad in ({"function": {"name": 1}}, {"function": {"name": "f", "arguments": "{"}}, "x"):
        with pytest.raises(InvalidRequest, match="tool_calls"):
            checked_message(0, {"role": "assistant", "content": None, "tool_calls": [bad]})


def test_a_choice_may_have_any_characters(tiny_tokenizer: Tokenizer) -> None:
    choices = ["a\nb", 'q"uote', "back\\slash", "é"]
    vocabulary, text = Vocabulary(tiny_tokenizer), grammar.from_choices(choices, "x")
    vocabulary.check(text, "x")
    for choice in choices:
        matcher = vocabulary.matcher(text)
        assert matcher.consume_tokens(tiny_tokenizer.encode(choice, special=False, bos=False))
        assert matcher.is_accepting()
