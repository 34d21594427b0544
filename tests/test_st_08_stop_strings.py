"""ST-08 and around it: stop strings across token boundaries, and streams that equal whole answers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from baton.text.detokenizer import Detokenizer
from baton.text.stopping import StopMatcher
from baton.text.tokenizer import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

ALPHABET = "abAé日🎉"


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """(what came out at each call, the flush last; the stop string that matched)."""
    matcher = StopMatcher(stops, include)
    out = []
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        out.append(emitted)
        if matched is not None:
            return out, matched
    return [*out, matcher.flush()], None


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the first prefix of the text that ends with a stop string; the longest one where several fit."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def test_st_08_stop_over_four_tokens() -> None:
    assert run(["abcD", "EF", "GHI", "Jxyz"], ["DEFGHIJ"]) == (["abc", "", "", ""], "DEFGHIJ")
    assert run(["abcD", "EF", "GHI", "Jxyz"], ["DEFGHIJ"], include=True) == (["abc", "", "", "DEFGHIJ"], "DEFGHIJ")


def test_st_08_one_stop_is_a_prefix_of_the_other() -> None:
    assert run(["xA", "B", "C"], ["AB", "ABC"]) == (["x", ""], "AB")
    assert run(["xABC"], ["ABC", "AB"]) == (["x"], "AB")
    assert run(["xABC"], ["BC", "ABC"]) == (["x"], "ABC")  # both end here: the longest counts


def test_st_08_near_miss_then_end_flushes_what_was_held() -> None:
    assert run(["abc", "DEF", "GHI"], ["DEFGHIJ"]) == (["abc", "", "", "DEFGHI"], None)
    assert run(["aab"], ["aaab"]) == (["aab", ""], None)  # "aab" begins no "aaab" any more
    assert run(["aa", "ab"], ["aab"]) == (["", "a"], "aab")


def test_st_08_text_after_the_match_never_comes_out() -> None:
    matcher = StopMatcher(["."], include=False)
    assert matcher.push("One. Two.") == ("One", ".")
    assert matcher.push("Three") == ("", ".")
    assert matcher.flush() == ""


def test_st_08_stop_inside_a_multi_byte_character(tiny_tokenizer: Tokenizer) -> None:
    """The bytes of the stop string come one token each; neither half of a character ever comes out."""
    matcher, detokenizer = StopMatcher(["é日"], include=False), Detokenizer(tiny_tokenizer)
    out, matched = "", None
    for token_id in b"caf" + "é日!".encode():
        emitted, matched = matcher.push(detokenizer.push([token_id]))
        out += emitted
        assert "\ufffd" not in out
        if matched:
            break
    assert (out, matched) == ("caf", "é日")


def test_no_stops_passes_everything_at_once() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""], include=False)


@settings(max_examples=500)
@given(
    pieces=st.lists(st.text(ALPHABET, max_size=5), max_size=8),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
)
def test_stream_equals_the_definition_on_the_whole_text(pieces: list[str], stops: list[str], include: bool) -> None:
    out, matched = run(pieces, stops, include)
    assert ("".join(out), matched) == naive("".join(pieces), stops, include)


@settings(max_examples=300)
@given(
    data=st.binary(max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    stops=st.lists(st.text("abé\ufffd", min_size=1, max_size=3), max_size=3),
)
def test_tokens_in_any_grouping_give_the_same_text(
    tiny_tokenizer: Tokenizer, data: bytes, cuts: list[int], stops: list[str]
) -> None:
    """Any bytes at all, valid UTF-8 or not, grouped anyhow: detokenizer and matcher together."""
    ids = list(data)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    detokenizer = Detokenizer(tiny_tokenizer)
    texts = [detokenizer.push(ids[start:stop]) for start, stop in pairwise(edges)]
    texts.append(detokenizer.flush())
    assert "".join(texts) == tiny_tokenizer.decode(ids, skip_special=True) == data.decode("utf-8", "replace")
    out, matched = run(texts, stops)
    assert ("".join(out), matched) == naive("".join(texts), stops, False)
