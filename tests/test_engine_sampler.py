"""The sampler: distributions, truncation, penalties, log probabilities, and independence of the batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from baton.engine.sampler import sample
from baton.engine.step import DRAWN_BY_LEADER, Draw
from baton.proto.errors import InternalError
from baton.proto.sampling import SamplingParams
from torch import Tensor

NEUTRAL = DRAWN_BY_LEADER.params
SEED_42 = [25789, 15548, 3004, 45545, 21941, 32175, 23958, 14666]


def params(**changes: Any) -> SamplingParams:
    return dataclasses.replace(NEUTRAL, **changes)


def draw(*, choices: tuple[int, ...] = (0,), prompt: int = 10, generated: tuple[int, ...] = (), **changes: Any) -> Draw:
    return Draw(params(**changes), choices, range(prompt), list(generated))


def noise(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def ids(logits: Tensor, *draws: Draw) -> list[list[int]]:
    return [[token.token_id for token in tokens] for tokens in sample(logits, draws)]


def counts(row: Tensor, times: int, **changes: Any) -> Tensor:
    """How often each token comes in `times` draws at as many positions."""
    drawn: list[int] = []
    for start in range(0, times, 500):
        draws = [draw(prompt=start + i + 1, **changes) for i in range(500)]
        drawn += [one[0] for one in ids(row.expand(500, -1), *draws)]
    return torch.bincount(torch.tensor(drawn), minlength=len(row)).double()


def chi_square(observed: Tensor, probabilities: Tensor) -> float:
    """The statistic, over the number that its distribution stays below in all but about 1 of 10,000 cases."""
    expected = probabilities.double() * observed.sum()
    freedom = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(statistic / (freedom + 3.7 * math.sqrt(2 * freedom) + 5))


@pytest.mark.parametrize("vocab", [7, 300, 1000])
def test_draws_follow_the_softmax(vocab: int) -> None:
    row = torch.linspace(-1, 1, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(1))]
    assert chi_square(counts(row, 20_000, temperature=0.7, seed=3), (row / 0.7).softmax(0)) < 1


def test_choices_of_one_row_follow_the_softmax_too() -> None:
    row = torch.linspace(-1, 1, 20)
    (tokens,) = ids(row[None], draw(choices=tuple(range(20_000)), temperature=1.0))
    assert chi_square(torch.bincount(torch.tensor(tokens), minlength=20).double(), row.softmax(0)) < 1


@pytest.mark.parametrize("changed", ["seed", "choice", "position"])
def test_neighbouring_keys_are_independent(changed: str) -> None:
    """Pairs of draws whose keys differ by one in one part: all pairs of tokens are equally frequent."""
    rows, times = torch.zeros(8000, 4), 8000
    if changed == "seed":
        drawn = [one[0] for one in ids(rows, *[draw(temperature=1.0, seed=i) for i in range(times)])]
    elif changed == "choice":
        (drawn,) = ids(rows[:1], draw(temperature=1.0, choices=tuple(range(times))))
    else:
        drawn = [one[0] for one in ids(rows, *[draw(temperature=1.0, prompt=i + 1) for i in range(times)])]
    pairs = torch.tensor([a * 4 + b for a, b in zip(drawn[::2], drawn[1::2], strict=True)])
    assert chi_square(torch.bincount(pairs, minlength=16).double(), torch.full((16,), 1 / 16)) < 1


def test_a_seed_means_these_tokens() -> None:
    """Draws are part of what users store: a change of the noise must be noticed."""
    row = (torch.arange(49_152) * 7919 % 49_152)[None] / 4096
    tokens = [ids(row, draw(temperature=1.0, seed=42, prompt=length))[0][0] for length in range(1, 9)]
    assert tokens == SEED_42


def test_st_10_rows_do_not_depend_on_the_batch() -> None:
    logits = noise(24, 5000)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 40},
        {"temperature": 1.0, "top_k": 500, "top_p": 0.95},
        {"temperature": 5.0, "top_p": 0.99, "min_p": 0.001, "logprobs": 3},
        {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "generated": (5, 5, 6)},
        {"temperature": 0.0, "logprobs": 5},
    ]
    draws = [draw(seed=row, prompt=row + 1, choices=(row % 3, 7), **kinds[row % len(kinds)]) for row in range(24)]
    together = sample(logits, draws)
    alone = [sample(logits[row : row + 1], [draws[row]])[0] for row in range(24)]
    backwards = sample(logits.flip(0), draws[::-1])[::-1]
    assert alone == together == backwards


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(3, 49_152)
    logits[0, [40_000, 255, 256, 300]] = 5
    logits[1, [40_000, 39_999]] = 5
    assert ids(logits, draw(), draw(), draw(choices=(0, 1))) == [[255], [39_999], [0, 0]]


def test_the_logits_stay_as_they_are() -> None:
    logits = noise(2, 300)
    before = logits.clone()
    sample(logits, [draw(temperature=0.5, top_p=0.5, logit_bias={3: 9.0}), draw(presence_penalty=1.0, generated=(1,))])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [300, 5000])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (5, 1.0, 0.0),
        (200, 1.0, 0.0),
        (0, 0.5, 0.0),
        (0, 0.9999, 0.0),
        (0, 0.0, 0.0),
        (0, 1.0, 0.2),
        (50, 0.8, 0.0),
        (10, 0.9, 0.15),
        (9000, 0.6, 0.0),
    ],
)
def test_truncation_leaves_what_a_sort_leaves(vocab: int, top_k: int, top_p: float, min_p: float) -> None:
    row = noise(1, vocab, seed=vocab)[0] / 3
    order = row.sort(descending=True).indices[: top_k or vocab].tolist()
    weights = row[order].double().softmax(0)
    before = weights.cumsum(0) - weights
    kept = [token for token, mass in zip(order, before.tolist(), strict=True) if mass < top_p or top_p == 1] or order[
        :1
    ]
    kept = [token for token in kept if row[token] >= row.max() + math.log(max(min_p, 1e-300))]
    expected = row[kept].softmax(0)
    observed = counts(row, 1000, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assert observed[kept].sum() == observed.sum()
    if 1 < len(kept) < 100:
        assert chi_square(observed[kept], expected) < 1


def test_equals_at_the_edge_of_top_k_all_stay() -> None:
    row = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert (counts(row, 2000, temperature=1.0, top_k=2) > 0).tolist() == [False, True, True, True, False]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = noise(4, 1000)
    best = logits.argmax(1).tolist()
    assert [one[0] for one in ids(logits, *[draw(temperature=t) for t in (1e-3, 1e-10, 1e-44, 1e-60)])] == best


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    row = torch.tensor([[2.0, 1.5, -1.0]])
    assert ids(row, Draw(params(repetition_penalty=1.5), (0,), [0], []))[0] == [1]
    assert ids(row, Draw(params(presence_penalty=1.0), (0,), [0], []))[0] == [0]
    assert ids(row, Draw(params(presence_penalty=1.0), (0,), [2], [0]))[0] == [1]
    assert ids(row, Draw(params(presence_penalty=0.4), (0,), [2], [0, 0]))[0] == [0]
    assert ids(row, Draw(params(frequency_penalty=0.4), (0,), [2], [0, 0]))[0] == [1]
    negative = torch.tensor([[-1.0, -1.2, -9.0]])
    assert ids(negative, Draw(params(repetition_penalty=1.5), (0,), [0], []))[0] == [1]


def test_bias_and_the_mask_of_early_stops() -> None:
    row = torch.tensor([[3.0, 2.0, 1.0]])
    assert ids(row, draw(logit_bias={2: 2.5})) == [[2]]
    stops = frozenset({0, 99})
    assert ids(row, draw(stop_token_ids=stops, min_tokens=2, generated=(1,))) == [[1]]
    assert ids(row, draw(stop_token_ids=stops, min_tokens=2, generated=(1, 1))) == [[0]]
    assert ids(row, draw(stop_token_ids=stops, min_tokens=1, temperature=1e-3)) == [[1]]


def test_st_05_logprobs_are_of_the_raw_logits() -> None:
    logits = noise(2, 1000)
    reference = logits.double().log_softmax(1)
    many, none = sample(
        logits, [draw(temperature=2.0, choices=(0, 1), logprobs=20, logit_bias={7: 50.0}), draw(logprobs=None)]
    )
    assert [token.token_id for token in many] == [7, 7]
    for token in many:
        assert token.logprob == pytest.approx(float(reference[0, 7]), abs=1e-5)
        assert [one for one, _ in token.top] == reference[0].topk(20).indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(reference[0].topk(20).values.tolist(), abs=1e-5)
    assert (none[0].logprob, none[0].top) == (None, ())
    assert sample(logits[:1], [draw(logprobs=0)])[0][0].top == ()


def test_equal_top_logprobs_come_lowest_id_first() -> None:
    logits = torch.zeros(1, 400)
    logits[0, 200] = 1
    (token,) = sample(logits, [draw(logprobs=4)])[0]
    assert [one for one, _ in token.top] == [200, 0, 1, 2]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logits_that_are_no_numbers_fail(value: float) -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(InternalError, match="not numbers"):
            sample(torch.full((1, 300), value), [draw(temperature=temperature)])


def test_rows_and_draws_must_pair_up() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1 draws"):
        sample(torch.zeros(2, 5), [draw()])
    assert sample(torch.zeros(0, 5), []) == []
    assert ids(torch.zeros(1, 5), DRAWN_BY_LEADER) == [[]]
