"""Answers under a grammar: they always parse, and are the same with speculation, preemption and a state made anew."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from baton.engine.block_pool import BlockPool
from baton.engine.guide import Guide
from baton.engine.local import LocalEngine, Request
from baton.engine.prompt_lookup import PromptLookup
from baton.engine.proposal_length import Costs
from baton.engine.proposer import Wanted
from baton.engine.runner import Runner
from baton.engine.speculation import Speculator
from baton.engine.step import Draw, SequenceStep
from baton.proto.errors import InvalidRequest
from baton.tests.harness.monolithic import sampling
from baton.tests.harness.tiny_model import EOS, special_id
from baton.tests.test_engine_runner import build
from baton.text import grammar
from baton.text.tokenizer import Tokenizer

END = special_id(EOS)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
KINDS: dict[str, tuple[str, re.Pattern[str]]] = {
    "regex": (grammar.from_regex("[a-c]{2,5}-[0-9]+"), re.compile("[a-c]{2,5}-[0-9]+")),
    "choice": (grammar.from_choices(["yes", "no", 'per"haps'], "choice"), re.compile('yes|no|per"haps')),
    "grammar": (grammar.from_text('root ::= "x" | "(" root ")"', "grammar"), re.compile(r"(\(*)x(\)*)")),
}


@pytest.fixture(scope="module")
def runner(tiny_dir: Path) -> Runner:
    return build(tiny_dir, dtype="float32", kv_blocks=96, block_size=4)


def engine(runner: Runner, blocks: int = 96, speculator: Speculator | None = None) -> LocalEngine:
    return LocalEngine(runner, BlockPool(blocks, 4, False), runner.kv.copy_blocks, speculator)


def request(kind: str, seed: int, **changes: Any) -> Request:
    text = grammar.from_schema(SCHEMA, "schema") if kind == "schema" else KINDS[kind][0]
    ends = frozenset({END})
    params = sampling(grammar=text, temperature=1.0, seed=seed, max_tokens=90, stop_token_ids=ends, **changes)
    return [seed, *b"Say something"], params


def all_kinds() -> list[Request]:
    return [request(kind, seed, n=2) for seed in range(3) for kind in (*KINDS, "schema")]


def check(kind: str, text: str) -> None:
    if kind == "schema":
        value = json.loads(text)
        assert set(value) == {"name", "age", "ok"}
        assert isinstance(value["age"], int)
        assert len(value["name"]) <= 6
        assert isinstance(value["ok"], bool)
    else:
        match = KINDS[kind][1].fullmatch(text)
        assert match, text
        assert kind != "grammar" or len(match[1]) == len(match[2])


def test_answers_that_end_by_themselves_always_parse(runner: Runner, tiny_tokenizer: Tokenizer) -> None:
    kinds = (*KINDS, "schema")
    requests = [request(kind, seed, n=2) for seed in range(5) for kind in kinds]
    answers = engine(runner).generate(requests, chunk=64, max_sequences=8)
    ended = 0
    for index, choices in enumerate(answers):
        for choice in choices:
            if choice.finish_reason == "stop":
                ended += 1
                check(kinds[index % 4], tiny_tokenizer.decode(choice.token_ids[:-1], skip_special=False))
    assert ended > 25


class Wild:
    """Proposes what came before, and what nobody would say."""

    def propose(self, wanted: list[Wanted]) -> list[list[int]]:
        return [[*w.draw.generated[-1:], 300, 5][: w.count] for w in wanted]

    def unread(self, name: object, prompt: int) -> int:
        return 0

    def keep(self, names: object) -> None:
        pass


@pytest.mark.parametrize("proposer", [PromptLookup(), Wild()], ids=["lookup", "wild"])
def test_the_same_answers_with_speculation(runner: Runner, proposer: Any) -> None:
    requests = all_kinds()
    plain = engine(runner).generate(requests, chunk=64, max_sequences=8)
    speculator = Speculator(proposer, Costs(0.0, 0.0, 0.0), 4, 4, runner.guide.allowed)
    guessed = engine(runner, 96, speculator).generate(requests, chunk=64, max_sequences=8)
    assert [[c.token_ids for c in choices] for choices in guessed] == [[c.token_ids for c in one] for one in plain]
    if isinstance(proposer, PromptLookup):
        assert speculator.accepted_tokens > 0


def test_proposals_that_the_grammar_forbids_are_cut(runner: Runner) -> None:
    (prompt, params) = request("regex", 1)
    step = SequenceStep("cut", 0, 0, [97], 4, [0, 1], Draw(params, (0,), prompt, [97]))
    assert list(runner.guide.allowed(step, list(b"b-7x"))) == list(b"b-7")
    assert list(runner.guide.allowed(step, list(b"7"))) == []
    free = SequenceStep("cut", 0, 0, [97], 4, [0, 1], Draw(sampling(), (0,), prompt, [97]))
    assert list(runner.guide.allowed(free, [1, 2])) == [1, 2]


def test_the_same_answers_after_preemption(runner: Runner) -> None:
    requests = all_kinds()[:6]
    plain = engine(runner).generate(requests, chunk=64, max_sequences=8)
    small = engine(runner, blocks=34)
    again = small.generate(requests, chunk=64, max_sequences=8)
    assert small.preemptions > 0
    assert [[c.token_ids for c in choices] for choices in again] == [[c.token_ids for c in one] for one in plain]


def test_a_state_is_what_was_said(runner: Runner) -> None:
    """Forward, back, sideways and under another grammar: the mask is that of a state made anew."""
    (prompt, params), (_, other) = request("regex", 1), request("choice", 1)

    def mask(guide: Guide, said: bytes, how: Any = params) -> list[bool]:
        step = SequenceStep("one", 0, 0, [0], 4, [0, 1], Draw(how, (0,), prompt, list(said)))
        rows = guide.begin([step])
        assert rows is not None
        found = rows.result()[0]
        assert not isinstance(found, Exception)
        return list(found.tolist())

    for said in (b"", b"ab", b"abc-1", b"ab-", b"cc", b""):
        fresh = Guide(runner.guide._load)
        assert mask(runner.guide, said) == mask(fresh, said)
    assert mask(runner.guide, b"y", other) == mask(Guide(runner.guide._load), b"y", other)
    allowed = mask(runner.guide, b"ab-12")
    assert [i for i in range(256) if allowed[i]] == list(b"0123456789")
    assert allowed[END]


def test_what_cannot_be_followed_is_the_request_s_own_error(runner: Runner) -> None:
    """Ids that the grammar never allowed: an error for this row, and none beside it."""
    prompt, params = request("regex", 1)
    bad = SequenceStep("bad", 0, 0, [97], 0, [0], Draw(params, (0,), prompt, list(b"zz")))
    good = SequenceStep("good", 0, 0, [97], 0, [1], Draw(params, (0,), prompt, list(b"ab")))
    (failed,), (drawn,) = runner.decode([bad, good])
    assert isinstance(failed.error, InvalidRequest)
    assert drawn.error is None
    assert chr(drawn.token_id) in "abc-"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: grammar.from_schema("{", "x"), "no JSON"),
        (lambda: grammar.from_schema([1], "x"), "is an object"),
        (lambda: grammar.from_choices([], "x"), "1 to"),
        (lambda: grammar.from_choices(["a", ""], "x"), "not empty"),
        (lambda: grammar.from_schema(nested(100), "x"), "levels"),
        (lambda: grammar.from_schema({"type": "bogus"}, "x"), "bogus"),
        (lambda: grammar.from_schema({"not": {"type": "string"}}, "x"), "not"),
        (lambda: grammar.from_schema({"$ref": "http://example.com/x"}, "x"), "example"),
        (lambda: grammar.from_regex("("), "regex"),
        (lambda: grammar.from_regex("(?=a)b"), "look-around"),
        (lambda: grammar.from_text("root ::= nowhere", "x"), "nowhere"),
    ],
)
def test_what_is_no_grammar_is_refused_by_field(make: Any, reason: str, tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        grammar.Vocabulary(tiny_tokenizer).check(make(), "x")
    assert refused.value.field == "x"


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema
