"""Speculation piece by piece: what is looked up, how many tokens are proposed, which of them stand. Pure."""

from __future__ import annotations

import random

import pytest
from baton.engine.prompt_lookup import History, PromptLookup
from baton.engine.proposal_length import Costs, Record, learn, next_length, reading_pays
from baton.engine.proposer import Wanted
from baton.engine.speculation import Speculator
from baton.engine.step import Draw, SampledToken, SequenceStep
from baton.engine.verify import accept, draws_of
from baton.tests.harness.monolithic import sampling
from hypothesis import given
from hypothesis import strategies as st

CHEAP = Costs(row=0.08, draft=0.0, draft_row=0.0)  # a row of SmolLM2-135M on one core
FREE = Costs(0.0, 0.0, 0.0)
NAME = (("q", 1, 0), 0)


def matched(tokens: list[int]) -> int:
    """Where the continuation must begin, found without an index; -1: nowhere."""
    places = [p for p in range(2, len(tokens)) if tokens[p - 2 : p] == tokens[-2:]][-16:]

    def length(place: int) -> int:
        return next((n for n in range(min(place, 16)) if tokens[place - 1 - n] != tokens[-1 - n]), min(place, 16))

    return max(reversed(places), key=length, default=-1)


@given(tokens=st.lists(st.integers(0, 3), max_size=60), count=st.integers(1, 6), cut=st.integers(0, 60))
def test_a_look_up_finds_the_longest_recent_match(tokens: list[int], count: int, cut: int) -> None:
    """Whether the history came at once or in parts; what reaches beyond its end goes on as it began."""
    history = History()
    history.extend(tokens[:cut])
    history.extend(tokens[cut:])
    place, wanted = matched(tokens), list(tokens)
    for step in range(count if place >= 0 else 0):
        wanted.append(wanted[place + step])
    assert history.continuation(count) == wanted[len(tokens) :]


def test_a_look_up_follows_its_sequences_and_forgets_the_others() -> None:
    lookup = PromptLookup()

    def ask(generated: list[int], name: str = "q") -> list[list[int]]:
        draw = Draw(sampling(), (0,), [1, 2, 3, 4, 9], generated)
        return lookup.propose([Wanted(((name, 1, 0), 0), draw, 3)])

    assert (ask([]), ask([2, 3])) == ([[]], [[4, 9, 2]])
    assert ask([2, 3, 4, 9, 2]) == [[3, 4, 9]]
    lookup.keep([(("other", 1, 0), 0)])
    assert ask([2, 3]) == [[4, 9, 2]]  # met anew, with another history


def test_a_sequence_that_is_guessed_right_gets_the_longest_proposals() -> None:
    record = Record()
    for _ in range(10):
        record = next_length(record, 1, CHEAP, 8)
        record = learn(record, record.length, record.length)
    assert next_length(record, 1, CHEAP, 8).length == 8


def test_a_sequence_that_is_guessed_wrong_is_left_alone_and_tried_again() -> None:
    record, lengths = Record(), []
    for _ in range(200):
        record = next_length(record, 1, CHEAP, 8)
        lengths.append(record.length)
        record = learn(record, record.length, 0)
    assert lengths[0] > 0
    tried = [step for step, length in enumerate(lengths[40:]) if length]
    assert 2 <= len(tried) <= 10  # once in 32 steps, and then not much longer
    for _ in range(20):  # the text begins to repeat itself
        record = next_length(record, 1, CHEAP, 8)
        record = learn(record, record.length, record.length)
    for _ in range(32):
        record = next_length(record, 1, CHEAP, 8)
        record = learn(record, record.length, record.length)
    assert record.length == 8


@given(rate=st.floats(0.0, 1.0), row=st.floats(0.001, 1.0), draft=st.floats(0.0, 1.0))
def test_larger_batches_and_dearer_drafts_never_propose_more(rate: float, row: float, draft: float) -> None:
    def length(batch: int, costs: Costs) -> int:
        known = Record(accepted=1e6 * rate, tested=1e6, idle=0)
        return max(range(9), key=lambda n: costs.per_token(known.rate, n, batch))

    lengths = [length(batch, Costs(row, draft, 0.0)) for batch in (1, 2, 4, 8, 16, 64, 256)]
    assert lengths == sorted(lengths, reverse=True)
    assert length(4, Costs(row, 2 * draft, 0.0)) <= length(4, Costs(row, draft, 0.0))


def test_a_large_batch_proposes_nothing_that_is_not_nearly_sure() -> None:
    known = Record(accepted=80.0, tested=100.0, idle=0)
    assert next_length(known, 1, CHEAP, 8).length >= 4
    assert next_length(known, 128, CHEAP, 8).length == 0


def test_a_length_grows_only_for_a_gain_and_shrinks_at_once() -> None:
    costs = Costs(0.3, 0.0, 0.0)
    kept = 0
    for rate in (number / 1000 for number in range(300, 990)):
        worth = [costs.per_token(rate, n, 1) for n in range(9)]
        best = worth.index(max(worth))
        for length in range(9):
            known = Record(accepted=1e9 * rate, tested=1e9, length=length, idle=0)
            stays = length < best and worth[best] <= 1.05 * worth[length]
            assert next_length(known, 1, costs, 8).length == (length if stays else best)
            kept += stays
    assert kept > 100


DRAFT = Costs(row=0.08, draft=0.1, draft_row=0.01)  # a tenth of the model


def test_a_draft_model_reads_a_prompt_only_for_what_may_be_said_after_it() -> None:
    """Its own reading is part of the law."""
    sure = Record(accepted=90.0, tested=100.0, length=4, idle=0)

    def pays(unread: int, said: int, left: int, batch: int = 1, record: Record = sure) -> bool:
        return reading_pays(record, batch, DRAFT, unread, said, left)

    assert pays(500, 1, 400)
    assert not pays(500, 1, 8)
    assert not pays(8000, 1, 4000)
    assert pays(8000, 600, 4000)  # it has turned out to say a lot
    assert not pays(1500, 1, 4000, batch=8)
    assert not pays(1, 1, 4000, record=Record(accepted=0.0, tested=100.0, length=4, idle=0))
    costs = [DRAFT.reading(tokens) for tokens in (0, 1, 256, 257)]
    assert costs == pytest.approx([0.0, 0.11, 2.66, 2.77])


def step(generated: list[int], guesses: list[int], blocks: int = 4, **changes: int) -> SequenceStep:
    draw = Draw(sampling(**changes), (0,), [1, 2, 3], generated)
    start = 2 + len(generated)
    return SequenceStep("q", 1, 0, [generated[-1], *guesses], start, list(range(blocks)), draw, len(guesses))


def test_each_row_sees_the_proposals_before_it() -> None:
    assert [draw.generated for draw in draws_of(step([4, 5], [6, 7]))] == [[4, 5], [4, 5, 6], [4, 5, 6, 7]]
    assert draws_of(SequenceStep("q", 1, 0, [1, 2], 0, [0], None)) == []


@pytest.mark.parametrize(
    ("drawn", "kept"),
    [([6, 7, 8], [6, 7, 8]), ([6, 9, 8], [6, 9]), ([9, 7, 8], [9]), ([9, 9, 9], [9])],
)
def test_draws_stand_up_to_the_first_that_was_not_proposed(drawn: list[int], kept: list[int]) -> None:
    rows = [[SampledToken(0, token, None, ())] for token in drawn]
    first = [SampledToken(0, 1, None, ()), SampledToken(1, 2, None, ())]  # two choices from one row
    prompt = SequenceStep("p", 1, 0, [1, 2], 0, [0], Draw(sampling(n=2), (0, 1), [1, 2], []))
    chunk = SequenceStep("c", 1, 0, [1, 2], 0, [0], None)
    found = accept([prompt, chunk, step([4], [6, 7])], [first, *rows])
    assert found[0] == first
    assert [token.token_id for token in found[1]] == kept


class Always:
    """Proposes zeros; `left` tokens of each prompt are to be read first."""

    def __init__(self, left: int = 0) -> None:
        self.left = left

    def unread(self, name: object, prompt: int) -> int:
        return self.left

    def propose(self, wanted: list[Wanted]) -> list[list[int]]:
        return [[0] * one.count for one in wanted]

    def keep(self, names: object) -> None:
        pass


def test_proposals_fit_the_blocks_and_what_may_still_be_said() -> None:
    speculator = Speculator(Always(), FREE, 6, block_size=4)  # type: ignore[arg-type]

    def proposed(one: SequenceStep) -> int:
        speculator.lengths([NAME])
        return speculator.extend([one])[0].proposed

    assert proposed(step([4], [], max_tokens=30)) == 6
    assert proposed(step([4], [], blocks=2, max_tokens=30)) == 4  # 4 of 8 places are taken
    assert proposed(step([4, 5, 6], [], max_tokens=6)) == 2  # two proposals and the draw in any case
    assert proposed(step([4, 5, 6], [], max_tokens=4)) == 0
    chunk = SequenceStep("q", 1, 0, [1, 2], 1, [0, 1], Draw(sampling(max_tokens=9), (0,), [1, 2, 3], []))
    assert proposed(chunk) == 0


def test_nothing_is_proposed_before_reading_pays() -> None:
    proposer = Always(left=2000)
    speculator = Speculator(proposer, DRAFT, 6, block_size=4)  # type: ignore[arg-type]

    def proposed(generated: list[int], max_tokens: int) -> int:
        speculator.lengths([NAME])
        return speculator.extend([step(generated, [], blocks=1000, max_tokens=max_tokens)])[0].proposed

    assert proposed([4], 3000) == 0
    assert proposed([4] * 120, 150) == 0 < proposed([4] * 120, 3000)
    proposer.left = 0
    assert proposed([4], 30) > 0


def test_what_became_of_proposals_is_counted() -> None:
    speculator = Speculator(Always(), FREE, 3, block_size=4)  # type: ignore[arg-type]
    rng = random.Random(3)
    kept = 0
    for _ in range(10):
        speculator.lengths([NAME])
        steps = speculator.extend([step([4], [], max_tokens=30)])
        rows = [SampledToken(0, 0, None, ())] * rng.randint(1, steps[0].proposed + 1)
        kept += len(rows) - 1
        speculator.observe(steps, [rows])
    assert speculator.drafts == 10
    assert speculator.accepted_tokens == kept < speculator.draft_tokens
