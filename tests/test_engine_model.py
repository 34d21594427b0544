"""The model against Transformers, and against itself in other chunks, batches, block sizes and rank counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from baton.engine.batch import BatchTensors
from baton.tests.harness.hf_reference import load_reference
from baton.tests.harness.model_rig import CPU, Rig, no_layers, random_tokens
from baton.tests.harness.tiny_model import VOCAB, write_tiny_model
from torch import Tensor

TOKENS = random_tokens(150, VOCAB)
ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie": False}),
    ("llama", {"kv_heads": 4}),
    ("mistral", {"tie": False}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3", {"attention_bias": True}),
]


def _reference(path: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.no_grad():
        logits: Tensor = load_reference(path, dtype)(torch.tensor([tokens])).logits[0]
    return logits.float()


@pytest.mark.parametrize(("arch", "settings"), ARCHITECTURES)
def test_float32_equals_transformers(tmp_path: Path, arch: str, settings: dict[str, Any]) -> None:
    path = write_tiny_model(tmp_path, arch=arch, **settings)
    torch.testing.assert_close(Rig(path).sequence(TOKENS), _reference(path, TOKENS), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers(tmp_path: Path, arch: str) -> None:
    path = write_tiny_model(tmp_path, arch=arch)
    exact = _reference(path, TOKENS)
    theirs = (_reference(path, TOKENS, torch.bfloat16) - exact).abs().mean()
    ours = (Rig(path, dtype="bfloat16").sequence(TOKENS) - exact).abs().mean()
    assert ours < 1.5 * theirs


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_equal_one_prefill_in_float32(tmp_path: Path, chunk: int) -> None:
    rig = Rig(write_tiny_model(tmp_path))
    torch.testing.assert_close(rig.sequence(TOKENS, chunk=chunk), rig.sequence(TOKENS), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 2, 2), (9, 3, 2), (9, 3, 3), (6, 2, 4), (6, 2, 3)])
@pytest.mark.parametrize("tie", [True, False])
def test_tensor_parallel_equals_one_rank(tmp_path: Path, heads: int, kv_heads: int, ranks: int, tie: bool) -> None:
    """2 + 1 heads, one each, and KV heads replicated evenly and unevenly."""
    path = write_tiny_model(tmp_path, heads=heads, kv_heads=kv_heads, hidden=72, tie=tie)
    alone, together = Rig(path), Rig(path, ranks=ranks)
    torch.testing.assert_close(together.sequence(TOKENS, chunk=64), alone.sequence(TOKENS), atol=2e-4, rtol=1e-4)
    assert len({weights.fingerprint for weights in [*alone.weights, *together.weights]}) == 1


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_biases_are_added_once_with_several_ranks(tmp_path: Path, arch: str) -> None:
    settings: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if arch == "llama" else {}
    path = write_tiny_model(tmp_path, arch=arch, **settings)
    torch.testing.assert_close(Rig(path, ranks=2).sequence(TOKENS), Rig(path).sequence(TOKENS), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("group", "expected"), [(1, [(0, 1), (1, 2), (2, 3)]), (2, [(0, 2), (2, 3)]), (8, [(0, 3)])])
def test_layers_are_announced_when_their_kv_is_in_the_pool(
    tmp_path: Path, group: int, expected: list[tuple[int, int]]
) -> None:
    rig = Rig(write_tiny_model(tmp_path, layers=3), layer_group=group)
    seen: list[tuple[int, int]] = []

    def note(low: int, high: int) -> None:
        seen.append((low, high))
        written = rig.pools[0].data.abs().sum((1, 3, 4, 5))[:, 0] > 0
        assert written.tolist() == [layer < high for layer in range(3)]

    rig.forward([rig.step(TOKENS[:10], 0, 10)], note)
    assert seen == expected


def test_only_the_asked_rows_have_logits(tmp_path: Path) -> None:
    rig = Rig(write_tiny_model(tmp_path))
    whole = rig.sequence(TOKENS)
    batch = BatchTensors.build([rig.step(TOKENS, 0, 100)], rig.block_size, CPU)
    assert rig.models[0].forward(batch, rig.pools[0], no_layers).shape == (0, VOCAB)
    torch.testing.assert_close(rig.forward([rig.step(TOKENS, 100, 150)]), whole[100:], atol=2e-4, rtol=1e-4)
