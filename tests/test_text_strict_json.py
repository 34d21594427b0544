"""JSON from clients: what is refused before it is made, and by which field."""

from __future__ import annotations

import time

import pytest
from baton.text import strict_json


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ('{"a": "\\ud800"}', "a", "Unicode"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "a", "nested"),
        ("[" * 100_000, "", "lists and objects"),
        ('{"a": [' + "{}," * 70_000 + "{}]}", "", "lists and objects"),
        ("{", "", "not JSON"),
    ],
)
def test_refused(text: str, field: str, message: str) -> None:
    started = time.thread_time()  # of the processor: what else runs does not count
    with pytest.raises(strict_json.JsonError, match=message) as caught:
        strict_json.loads(text)
    assert caught.value.field == field
    assert time.thread_time() - started < 1


def test_brackets_in_text_are_text() -> None:
    text = '{"prompt": "' + '[{\\"' * 70_000 + '"}'
    assert strict_json.loads(text) == {"prompt": '[{"' * 70_000}


def test_the_bound_is_asked_before_the_value_is_walked() -> None:
    def bound(value: object) -> None:
        raise RuntimeError("too much")

    with pytest.raises(RuntimeError, match="too much"):
        strict_json.loads('{"a": "\\ud800"}', bound)


@pytest.mark.parametrize(("text", "value"), [('{"a": 1}', {"a": 1}), ("9" * 40, float("9" * 40)), ("12", 12)])
def test_taken(text: str, value: object) -> None:
    assert strict_json.loads(text) == value
