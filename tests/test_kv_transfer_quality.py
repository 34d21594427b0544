"""What a quantised wire costs in quality, on the real SmolLM2-135M: prints the figures of docs/architecture.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from baton.tests.harness.handover import HandOver
from baton.tests.harness.kv_convert import naive
from baton.tests.harness.prompts import long_text, twenty_prompts
from baton.text.source import resolve
from baton.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "smollm2-135m-instruct"
COUNT = 32
# Least teacher-forced top-1 agreement with the raw wire, and the greatest error of KV over the largest of its row.
LIMITS = {"raw": (1.0, 0.0), "int8": (0.97, 0.5 / 127 + 2**-8), "fp8": (0.94, 16 / 448 + 2**-8)}


@dataclass
class Quality:
    """Sums over all prompts."""

    agreed: int = 0
    tokens: int = 0
    free: int = 0  # prompts whose free-running answer is the same to its end
    largest: float = 0.0
    of_row: float = 0.0
    squares: float = 0.0
    energy: float = 0.0
    logprob: float = 0.0

    def add_kv(self, exact: torch.Tensor, got: torch.Tensor) -> None:
        """How far the arrived KV is off."""
        error = (got.float() - exact.float()).abs()
        self.largest = max(self.largest, float(error.max()))
        self.of_row = max(self.of_row, float((error.amax(-1) / exact.float().abs().amax(-1)).max()))
        self.squares += float(error.double().square().sum())
        self.energy += float(exact.double().square().sum())

    def row(self, codec: str, prompts: int) -> str:
        """For people."""
        return (
            f"{codec:5} top-1 {self.agreed}/{self.tokens} = {self.agreed / self.tokens:.4f}, "
            f"same answer {self.free}/{prompts}, mean |d logprob| {self.logprob / self.tokens:.4f}, "
            f"KV error max {self.largest:.4f}, of the row's largest {self.of_row:.4f}, "
            f"rms {(self.squares / self.energy) ** 0.5:.5f}"
        )


def test_quality_of_the_codecs(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.load(resolve(MODEL))
    texts = [str(line["prompt"]) for line in twenty_prompts() if "prompt" in line] + [long_text(70)]
    prompts = [ids for text in texts[::2] if 1 < len(ids := tokenizer.encode(text, special=True, bos=None)) < 1100]
    engines = HandOver(Path(MODEL), "bfloat16", ("bfloat16", "bfloat16"), chunk=512, blocks=160)
    results = {codec: Quality() for codec in LIMITS}
    for prompt in prompts:
        first, kv = engines.read(prompt, COUNT, logprobs=0)
        right = engines.go_on(prompt, [first], kv, COUNT, logprobs=0)
        said = [token.token_id for token in right]
        for codec, quality in results.items():
            arrived = naive(kv, codec, "bfloat16")
            quality.add_kv(kv, arrived)
            forced = engines.go_on(prompt, [first], arrived, COUNT, logprobs=0, forced=said)
            quality.tokens += COUNT - 1
            for ours, theirs in zip(forced[1:], right[1:], strict=True):
                quality.agreed += ours.token_id == theirs.token_id
                quality.logprob += abs((ours.logprob or 0) - (theirs.logprob or 0))
            free = engines.go_on(prompt, [first], arrived, COUNT)
            quality.free += [token.token_id for token in free] == said
    with capsys.disabled():
        print()
        for codec, quality in results.items():
            print(quality.row(codec, len(prompts)))
    for codec, (agreement, error) in LIMITS.items():
        assert results[codec].agreed / results[codec].tokens >= agreement
        assert results[codec].of_row <= error
