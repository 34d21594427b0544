"""Tokens to text: stop strings over token boundaries, flushing, counting (ST-08), and the reader's mailbox."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from baton.proto import worker_pb2 as pb
from baton.proto.errors import InternalError
from baton.router.ledger import Ledger
from baton.router.mailbox import Mailbox
from baton.router.output import RequestOutput
from baton.router.record import Record
from baton.router.requests import ChoiceEnd, Chunk, ClientRequest, Output
from baton.router.tenants import ANYBODY
from baton.router.validate import ModelFacts, prepare
from baton.tests.harness.router_rig import CONTEXT, EOS_ID, LIMITS, VOCAB, write_model
from baton.text.source import resolve
from baton.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(resolve(str(write_model(tmp_path_factory.mktemp("model")))))


def said(
    tokenizer: Tokenizer,
    data: bytes,
    *,
    stop: Sequence[str] = (),
    include: bool = False,
    min_tokens: int = 0,
    finish: str = "stop",
    per_call: int = 1,
) -> tuple[str, str, str, int]:
    """(text, reason, matched stop, tokens) of a choice whose tokens are bytes, then EOS when finish is "stop"."""
    request = ClientRequest(token_ids=[1], stop=stop, include_stop=include, min_tokens=min_tokens)
    output = RequestOutput(
        tokenizer,
        prepare(
            request,
            [1],
            LIMITS,
            ModelFacts(CONTEXT, VOCAB),
            {EOS_ID},
            seed=0,
            deadline_s=1,
            stream_interval=1,
            tenant=ANYBODY,
        ),
    )
    ids = [*data, EOS_ID] if finish == "stop" else list(data)
    tokens = [pb.Token(choice=0, index=index, token_id=i) for index, i in enumerate(ids)]
    tokens[-1].finish_reason = finish
    text = ""
    for start in range(0, len(tokens), per_call):
        chunks, _ = output.push(tokens[start : start + per_call])
        text += "".join(chunk.text for chunk in chunks)
    return text, *output.reason(0), output.completion_tokens


def test_end_of_sequence_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    assert said(tokenizer, b"hello") == ("hello", "stop", "", 6)
    assert said(tokenizer, b"hello", finish="length") == ("hello", "length", "", 5)


@pytest.mark.parametrize("per_call", [1, 2, 5, 50])
def test_st_08_stop_over_token_boundaries_cuts_exactly_and_counts_up_to_the_match(
    tokenizer: Tokenizer, per_call: int
) -> None:
    text = b"abcDEFGHIJklm"
    assert said(tokenizer, text, stop=["DEFGHIJ"], per_call=per_call) == ("abc", "stop", "DEFGHIJ", 10)
    assert said(tokenizer, text, stop=["DEFGHIJ"], include=True, per_call=per_call)[0] == "abcDEFGHIJ"
    assert said(tokenizer, text, stop=["DEFGHIJK"], per_call=per_call) == ("abcDEFGHIJklm", "stop", "", 14)
    assert said(tokenizer, text, stop=["FG", "FGHI"], per_call=per_call) == ("abcDE", "stop", "FG", 7)


def test_st_08_near_miss_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    assert said(tokenizer, b"abcDEF", stop=["DEFG"])[0] == "abcDEF"
    assert said(tokenizer, b"abcDEF", stop=["DEFG"], finish="length")[0] == "abcDEF"


def test_st_08_stop_inside_and_around_multi_byte_characters(tokenizer: Tokenizer) -> None:
    text = "naïve €5".encode()
    assert said(tokenizer, text, stop=["€"]) == ("naïve ", "stop", "€", 10)
    assert said(tokenizer, text[:-2], finish="length")[0] == "naïve \ufffd"
    assert said(tokenizer, text[:-3], stop=["\ufffd"], finish="length")[:2] == ("naïve \ufffd"[:6], "stop")


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    assert said(tokenizer, b"aXbXc", stop=["X"], min_tokens=3) == ("aXb", "stop", "X", 4)


def test_st_08_any_split_gives_the_same_text(tokenizer: Tokenizer) -> None:
    text = "aé€b§c".encode()
    results = {said(tokenizer, text, stop=["€b"], per_call=n) for n in range(1, 12)}
    assert results == {("aé", "stop", "€b", 7)}


def test_ledger_gives_each_index_once_whatever_the_order() -> None:
    tokens = [pb.Token(index=index, token_id=10 + index) for index in range(4)]
    for order in itertools.permutations([*tokens, *tokens[:2]]):
        ledger = Ledger()
        out = [token.index for token in order for token in ledger.accept(token)]
        assert out == [] or out == sorted(set(out))
        assert ledger.token_ids[: len(out)] == [10 + index for index in out]
        assert out == [0, 1, 2, 3]


async def test_mailbox_merges_what_a_slow_reader_left_and_never_drops() -> None:
    mailbox = Mailbox()
    for index in range(5):
        mailbox.put(Chunk(0, index, [index], str(index), []))
        mailbox.put(Chunk(1, index, [index], "b", []))
    mailbox.put(ChoiceEnd(0, "stop", "", None, None))
    mailbox.close(None)
    batches: list[list[Output]] = [items async for items in mailbox.read()]
    assert batches == [
        [
            Chunk(0, 0, [0, 1, 2, 3, 4], "01234", []),
            Chunk(1, 0, [0, 1, 2, 3, 4], "bbbbb", []),
            ChoiceEnd(0, "stop", "", None, None),
        ]
    ]


async def test_mailbox_gives_what_is_there_before_the_error() -> None:
    mailbox = Mailbox()
    mailbox.put(Chunk(0, 0, [1], "a", []))
    mailbox.close(InternalError("later"))
    answer = mailbox.read()
    assert await anext(answer) == [Chunk(0, 0, [1], "a", [])]
    with pytest.raises(InternalError):
        await anext(answer)


def test_tokens_of_one_step_share_its_time() -> None:
    record = Record(0.0, prompt_tokens=3, choices=1)
    assert record.emitted(Chunk(0, 0, [5], "a", []), 1.0) is None
    gap = record.emitted(Chunk(0, 1, [6, 7, 8, 9], "b", []), 1.2)
    assert gap == pytest.approx(0.05)
    assert [record.second_gap, record.decode_s] == [pytest.approx(0.2)] * 2
