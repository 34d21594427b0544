"""ML-06 on the real weights: SmolLM2 from GGUF gives the tokens of Transformers on the same dequantised weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baton.tests.harness.hf_reference import TIE, difference, greedy, load_reference
from baton.tests.harness.model_rig import Rig
from baton.text.source import ModelSource
from baton.text.tokenizer import Tokenizer

NAME = "smollm2-135m-instruct"
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Die drei wichtigsten Städte in Deutschland sind",
    "Once upon a time there was a small dog who lived by the sea. " * 30,
]


@pytest.fixture(scope="module")
def reference(smol_source: ModelSource) -> Any:
    return load_reference(smol_source.path)


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(NAME)


def _assert_same_tokens(rig: Rig, reference: Any, tokenizer: Tokenizer, text: str, count: int) -> None:
    prompt = tokenizer.encode(text, special=True, bos=None)
    expected = greedy(reference, prompt, count, frozenset())
    assert difference(rig.greedy(prompt, count), expected) == ""


def test_ml_06_smollm2_knows_the_capital_of_france(rig: Rig, smol_tokenizer: Tokenizer) -> None:
    prompt = smol_tokenizer.encode(PROMPTS[0], special=True, bos=None)
    assert smol_tokenizer.decode(rig.greedy(prompt, 2), skip_special=True) == " Paris."


@pytest.mark.slow
@pytest.mark.parametrize("text", PROMPTS)
def test_ml_06_smollm2_greedy(rig: Rig, reference: Any, smol_tokenizer: Tokenizer, text: str) -> None:
    _assert_same_tokens(rig, reference, smol_tokenizer, text, 48)


@pytest.mark.slow
def test_ml_06_smollm2_uneven_ranks(reference: Any, smol_tokenizer: Tokenizer) -> None:
    """9 query heads on 3 KV heads: 6 + 3 on two ranks."""
    _assert_same_tokens(Rig(NAME, ranks=2), reference, smol_tokenizer, PROMPTS[2], 24)


@pytest.mark.slow
def test_ml_06_smollm2_bfloat16_follows_float32(reference: Any, smol_tokenizer: Tokenizer) -> None:
    """Teacher-forced: our choice is within 1.0 of the reference's best logit everywhere, and differs in at most 5 %."""
    prompt = smol_tokenizer.encode(PROMPTS[1], special=True, bos=None)
    tokens = [*prompt, *greedy(reference, prompt, 120, frozenset()).token_ids]
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    chosen = Rig(NAME, dtype="bfloat16").sequence(tokens).argmax(-1)
    behind = expected.max(-1).values - expected.gather(1, chosen[:, None])[:, 0]
    assert float(behind.max()) < 1.0
    assert float((behind > TIE).float().mean()) <= 0.05
