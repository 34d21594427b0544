"""Draws without a sort: the tokens of engine/sampler.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from baton.engine import sampler
from baton.engine.step import Draw
from baton.kernels.gpu.sampling import sample
from baton.tests.harness.monolithic import sampling

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 700, "temperature": 1.5},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 10_000, "top_p": 0.5},
    {"temperature": 1e-6, "top_p": 0.5},
]


def draws(settings: list[dict[str, Any]], choices: int = 1) -> list[Draw]:
    return [
        Draw(sampling(**{"temperature": 1.0, "seed": seed, **entry}), tuple(range(choices)), [1] * (7 + seed), [])
        for seed, entry in enumerate(settings)
    ]


def run(logits: torch.Tensor, wanted: list[Draw], device: torch.device) -> list[list[int]]:
    params = [draw.params for draw in wanted]
    floats = [[getattr(p, name) for p in params] for name in ("temperature", "top_p", "min_p")]
    temperatures, top_p, min_p = torch.tensor(floats, device=device).unbind()
    top_k = torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device)
    pairs = [(row, key) for row, draw in enumerate(wanted) for key in sampler.keys_of(draw)]
    rows, keys = torch.tensor(pairs, device=device).unbind(1)
    found = sample(logits.to(device), temperatures, top_k, top_p, min_p, rows.contiguous(), keys.contiguous()).tolist()
    return [
        [token for (row, _), token in zip(pairs, found, strict=True) if row == index] for index in range(len(wanted))
    ]


def expected(logits: torch.Tensor, wanted: list[Draw]) -> list[list[int]]:
    return [[token.token_id for token in tokens] for tokens in sampler.sample(logits, wanted)]


@pytest.mark.parametrize("vocab", [1, 37, 256, 2600])
def test_the_tokens_of_the_sampler(vocab: int, device: torch.device) -> None:
    wanted = draws(SETTINGS, choices=4)
    logits = 3 * torch.randn(len(wanted), vocab, generator=torch.Generator().manual_seed(vocab))
    assert run(logits, wanted, device) == expected(logits, wanted)


def test_equal_logits_stay_together(device: torch.device) -> None:
    wanted = draws([{"top_k": 3}, {"top_p": 0.2}, {"top_k": 4, "top_p": 0.6}, {"temperature": 0.0}] * 3, choices=3)
    logits = torch.randint(0, 4, (len(wanted), 600), generator=torch.Generator().manual_seed(1)).float()
    assert run(logits, wanted, device) == expected(logits, wanted)


def test_what_top_k_and_top_p_leave_exactly(device: torch.device) -> None:
    """Of tokens whose probabilities are known: many draws find all that is left, and nothing else."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[torch.randperm(4)]
    order = logits.argsort(descending=True)
    cases = (
        ({"top_k": 2}, 2),
        ({"top_p": 0.65}, 2),
        ({"top_p": 0.71}, 3),
        ({"min_p": 0.6}, 2),
        ({"top_k": 2, "top_p": 0.55}, 1),  # 0.55 of what top-k leaves
    )
    for setting, left in cases:
        (tokens,) = run(logits[None], draws([setting], choices=40), device)
        assert set(tokens) == set(order[:left].tolist()), setting


def test_masked_tokens_are_never_drawn(device: torch.device) -> None:
    logits = torch.full((2, 500), -math.inf)
    logits[:, 300:303] = 1.0
    for tokens in run(logits, draws([{}, {"top_p": 0.9, "top_k": 400}], choices=9), device):
        assert set(tokens) <= {300, 301, 302}


@pytest.mark.filterwarnings("ignore:invalid value")  # which is the matter here
def test_rows_that_are_not_numbers_are_told(device: torch.device) -> None:
    logits = torch.zeros(3, 300)
    logits[0, 7], logits[2] = math.nan, -math.inf
    found = run(logits, draws([{}, {}, {}]), device)
    assert found[0] == [-1]
    assert found[2] == [-1]
    assert 0 <= found[1][0] < 300


def test_wrong_arguments_are_named(device: torch.device) -> None:
    ones, two = torch.ones(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="top_k"):
        sample(torch.zeros(2, 9, device=device), ones, ones, ones, ones, two, two)
    with pytest.raises(ValueError, match="logits"):
        sample(torch.zeros(2, 9, device=device).double(), ones, ones.int(), ones, ones, two, two)
