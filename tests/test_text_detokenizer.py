"""Incremental detokenizing: no half characters, special tokens without text, equal to the library's decoder."""

from __future__ import annotations

from baton.tests.harness.tiny_model import EOS, special_id
from baton.text.detokenizer import Detokenizer
from baton.text.source import ModelSource
from baton.text.tokenizer import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Raw


def test_characters_come_whole(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny_tokenizer)
    assert [detokenizer.push([byte]) for byte in "a日b".encode()] == ["a", "", "", "日", "b"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_flushed_as_a_replacement(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny_tokenizer)
    assert detokenizer.push(list("日".encode()[:2])) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_have_no_text(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny_tokenizer)
    assert detokenizer.push([*b"hi", special_id(EOS)]) == "hi"


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 319), max_size=40))
def test_equal_to_the_library_s_decoder(tiny_source: ModelSource, ids: list[int]) -> None:
    tokenizer = Tokenizer.load(tiny_source)
    detokenizer = Detokenizer(tokenizer)
    ours = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    assert ours == Raw.from_file(str(tiny_source.path / "tokenizer.json")).decode(ids, skip_special_tokens=True)
