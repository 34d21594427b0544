"""ML-03: an explicit head_dim that is not hidden / heads wins everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from baton.tests.harness.hf_reference import load_reference
from baton.tests.harness.model_rig import Rig, random_tokens
from baton.tests.harness.tiny_gguf import write_gguf
from baton.tests.harness.tiny_model import VOCAB, write_tiny_model

TOKENS = random_tokens(120, VOCAB)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen3"])
def test_ml_03_explicit_head_dim(tmp_path: Path, arch: str, ranks: int) -> None:
    path = write_tiny_model(tmp_path, arch=arch, hidden=64, heads=4, head_dim=32)
    with torch.no_grad():
        expected = load_reference(path)(torch.tensor([TOKENS])).logits[0]
    rig = Rig(path, ranks=ranks)
    torch.testing.assert_close(rig.sequence(TOKENS, chunk=50), expected, atol=2e-4, rtol=1e-4)
    assert rig.config.head_dim == 32
    assert rig.pools[0].data.shape == (2, 2, 64, 2 // ranks, 16, 32)


def test_ml_03_gguf_key_length(tmp_path: Path) -> None:
    original = write_tiny_model(tmp_path / "original", arch="qwen3", hidden=64, heads=4, head_dim=32)
    oracle = write_gguf(original, tmp_path / "model.gguf", "Q8_0")
    with torch.no_grad():
        expected = load_reference(oracle)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(Rig(tmp_path / "model.gguf").sequence(TOKENS), expected, atol=5e-4, rtol=1e-3)
