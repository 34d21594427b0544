"""Draws that are queued on the device, against engine/sampler.py: tokens, log probabilities, proposals that stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baton.engine import sampler
from baton.engine.device_sampler import drawn
from baton.engine.step import Draw, SampledToken, SequenceStep
from baton.engine.verify import accept, draws_of
from baton.proto.errors import BatonError, InternalError
from baton.tests.gpu.device_rig import edge
from baton.tests.harness.monolithic import sampling

VOCAB = 300
SETTINGS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 0.8},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 1.1},
    {"logit_bias": {5: 9.0, 7: -3.0}, "logprobs": 2},
    {"min_tokens": 9, "stop_token_ids": frozenset(range(0, 400, 2))},
    {"repetition_penalty": 0.6, "logit_bias": {2: 1.0}, "min_tokens": 9, "stop_token_ids": frozenset({2})},
]


def step(number: int, changes: dict[str, Any], proposed: tuple[int, ...] = (), choices: int = 1) -> SequenceStep:
    draw = Draw(
        sampling(seed=number, **changes), tuple(range(choices)), [1, 2, 3, 1, 5], [2, 4, 4] if choices == 1 else []
    )
    return SequenceStep(f"r{number}", 0, 0, [9, *proposed], 7, list(range(9)), draw, len(proposed))


def logits_of(rows: int) -> torch.Tensor:
    logits = 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))
    logits[:, 40:44] = 6.0  # equals, and the best
    return logits


def expected(steps: list[SequenceStep], logits: torch.Tensor) -> list[list[SampledToken]]:
    return accept(steps, sampler.sample(logits, [draw for one in steps for draw in draws_of(one)]))


def same(ours: list[list[SampledToken]], theirs: list[list[SampledToken]]) -> None:
    for mine, other in zip([t for row in ours for t in row], [t for row in theirs for t in row], strict=True):
        assert (mine.choice, mine.token_id) == (other.choice, other.token_id)
        assert [token for token, _ in mine.top] == [token for token, _ in other.top]
        assert mine.logprob == (None if other.logprob is None else pytest.approx(other.logprob, abs=1e-5))
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in other.top], abs=1e-5)


def test_every_setting() -> None:
    steps = [step(number, changes, choices=1 + number % 2) for number, changes in enumerate(SETTINGS)]
    logits = logits_of(len(steps))
    before = logits.clone()
    same(drawn(edge(), steps, logits.to(edge().device)).tokens(), expected(steps, logits))
    assert torch.equal(logits, before)


def test_proposals_that_stand() -> None:
    """None, some, all; beside steps without proposals, and one that draws nothing."""
    logits = logits_of(9)
    logits[:, 40:44] = 0.0
    best = logits.argmax(1).tolist()
    steps = [
        step(0, {}, (best[0], best[1], 7)),
        SequenceStep("none", 0, 0, [1, 2], 0, [0], None),
        step(1, {"logprobs": 1}),
        step(2, {}, (best[5],)),
        step(3, {"temperature": 0.5}, (3,)),
    ]
    found = drawn(edge(), steps, logits.to(edge().device)).tokens()
    same(found, expected(steps, logits))
    assert [len(row) for row in found] == [3, 1, 2, 1]


def test_what_a_grammar_forbids() -> None:
    """Masks shorter than the vocabulary, a grammar that failed, and both behind proposals."""
    logits = logits_of(6)
    logits[:, 40:44] = 0.0
    only = torch.zeros(200, dtype=torch.bool)
    only[[3, 77]] = True
    failed = InternalError("the grammar is gone")
    best = logits.argmax(1).tolist()
    steps = [step(0, {"logprobs": 1}), step(1, {"temperature": 1.0}), step(2, {}), step(3, {}, (best[3], 7))]
    allowed: dict[int, torch.Tensor | BatonError] = {0: only, 1: only, 2: failed, 4: failed}
    found = drawn(edge(), steps, logits.to(edge().device), allowed).tokens()
    same(found, accept(steps, sampler.sample(logits, [draw for one in steps for draw in draws_of(one)], allowed)))
    assert found[0][0].token_id in (3, 77)
    assert found[2][0].error is failed
    assert len(found[3]) == 1


def test_what_is_no_number_is_refused() -> None:
    logits = logits_of(2)
    logits[1, 3] = float("nan")
    with pytest.raises(InternalError, match="not numbers"):
        drawn(edge(), [step(0, {}), step(1, {})], logits.to(edge().device)).tokens()
