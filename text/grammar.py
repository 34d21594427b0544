"""What a choice may say, as grammars of llguidance: from a JSON schema, a regular expression, a list or a grammar text.

A grammar travels as text. `Vocabulary` binds it to a model's tokens: it says before anything is allocated whether a
grammar can be used, and makes matchers, which say which tokens may come next. All limits on what a grammar may cost,
when it is compiled and at each token, are here. May be used from several threads at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance

from ..proto.errors import InvalidRequest
from .tokenizer import Tokenizer

MAX_CHOICES = 1024
_MAX_LEVELS = 64  # of a JSON schema

# JSON on one line, as json.dumps writes it: small models could otherwise fill any answer with white space.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def from_schema(schema: Any, field: str) -> str:
    """JSON that the schema (an object, true, or either as text) describes. Raises InvalidRequest."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field}: the schema is no JSON: {error}", field=field) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field}: a JSON schema is an object", field=field)
    _check_levels(schema, field)
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_STYLE)


def any_object() -> str:
    """Any JSON object."""
    return from_schema({"type": "object"}, "response_format")


def from_regex(pattern: str) -> str:
    """Text that the whole pattern matches, without look-around or references."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def from_choices(choices: Sequence[str], field: str) -> str:
    """One of these texts. Raises InvalidRequest."""
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise InvalidRequest(f"{field}: 1 to {MAX_CHOICES} texts that are not empty", field=field)
    return llguidance.grammar_from("choice", json.dumps(list(choices)))


def from_text(grammar: str, field: str) -> str:
    """A grammar in Lark's or GBNF's notation. Raises InvalidRequest."""
    try:
        return llguidance.grammar_from("grammar", grammar)
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", field=field) from None


class Vocabulary:
    """The tokens of one model as grammars see them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes a tenth of a second for 50,000 tokens, and some 100 bytes for each."""
        self.eos_token_ids = tokenizer.eos_token_ids
        self.special_ids = {special.text: special.token_id for special in tokenizer.specials}
        wrapper = llguidance.TokenizerWrapper(_Tokens(tokenizer))
        ends = sorted(tokenizer.eos_token_ids) or None
        self._tokens = llguidance.LLTokenizer(wrapper, n_vocab=tokenizer.vocab_size, eos_token=ends)

    def check(self, grammar: str, field: str) -> None:
        """Compiles. Raises InvalidRequest with the reason."""
        if not self.eos_token_ids:
            raise InvalidRequest(f"{field}: this model has no token to end an answer with", field=field)
        reason = llguidance.LLMatcher.validate_grammar(grammar, self._tokens, limits=_limits())
        if reason and not reason.startswith("WARNING"):
            raise InvalidRequest(f"{field}: {reason.strip():.500}", field=field)

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """At the beginning of an answer. Never raises: what cannot be used `is_error`."""
        return llguidance.LLMatcher(self._tokens, grammar, limits=_limits(), log_level=0)

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask with one bit a token."""
        return (int(self._tokens.vocab_size) + 31) // 32


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = min(tokenizer.eos_token_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, special=False, bos=False)


def _limits() -> llguidance.LLParserLimits:
    """Tens of milliseconds to compile and for one mask, tens of MB for one grammar."""
    return llguidance.LLParserLimits(max_lexer_states=20_000, max_grammar_size=100_000, verbose_errors=False)


def _check_levels(schema: Any, field: str) -> None:
    waiting = [(schema, 1)]
    while waiting:
        part, level = waiting.pop()
        if level > _MAX_LEVELS:
            raise InvalidRequest(f"{field}: a schema of more than {_MAX_LEVELS} levels", field=field)
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        waiting += [(one, level + 1) for one in inner]
