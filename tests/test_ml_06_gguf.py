"""ML-06: GGUF keeps q and k in llama.cpp's rotary order, and its tensors come in many number formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from baton.engine.model_config import load_config
from baton.engine.weights_gguf import GGUFStore, halves_from_pairs
from baton.proto.errors import ConfigError
from baton.tests.harness.hf_reference import load_reference
from baton.tests.harness.model_rig import Rig, random_tokens
from baton.tests.harness.tiny_gguf import interleave, write_gguf
from baton.tests.harness.tiny_model import VOCAB, write_tiny_model
from baton.text.source import resolve
from safetensors.torch import load_file

TOKENS = random_tokens(120, VOCAB)
KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def _write(tmp_path: Path, kind: str, **settings: Any) -> tuple[Path, Path, Path]:
    """The original directory, the GGUF file, and the directory with its dequantised weights."""
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate_size": 256}
    original = write_tiny_model(tmp_path / "original", **{**sizes, **settings})
    file = tmp_path / "model.gguf"
    return original, file, write_gguf(original, file, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_ml_06_logits_equal_transformers_on_the_dequantised_weights(tmp_path: Path, kind: str) -> None:
    _, file, oracle = _write(tmp_path, kind)
    with torch.no_grad():
        expected = load_reference(oracle)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(Rig(file).sequence(TOKENS), expected, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q6_K"])
def test_ml_06_every_tensor_is_near_the_original(tmp_path: Path, kind: str) -> None:
    original, file, _ = _write(tmp_path, kind)
    store = GGUFStore(file, load_config(resolve(str(file))).head_dim)
    weights = load_file(original / "model.safetensors")
    assert set(store.tensors) == set(weights)
    for name, weight in weights.items():
        ours = store.read(name, 0, weight.shape[0])
        cosine = torch.nn.functional.cosine_similarity(ours.flatten(), weight.flatten(), dim=0)
        assert cosine > 0.99, name


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "mistral"])
def test_ml_06_other_architectures(tmp_path: Path, arch: str) -> None:
    """Qwen files are not interleaved; Mistral's call themselves llama."""
    _, file, oracle = _write(tmp_path, "Q8_0", arch=arch, tie=arch != "qwen2")
    with torch.no_grad():
        expected = load_reference(oracle)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(Rig(file).sequence(TOKENS), expected, atol=5e-4, rtol=1e-3)


def test_ml_06_biases_are_interleaved_too(tmp_path: Path) -> None:
    _, file, oracle = _write(tmp_path, "Q8_0", attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        expected = load_reference(oracle)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(Rig(file, ranks=2).sequence(TOKENS), expected, atol=5e-4, rtol=1e-3)


def test_ml_06_the_interleave_is_undone_by_whole_heads() -> None:
    rows = np.random.default_rng(0).normal(size=(3 * 8, 5)).astype(np.float32)
    stored = torch.from_numpy(interleave(rows, 3))
    assert torch.equal(halves_from_pairs(stored, 8), torch.from_numpy(rows))
    assert torch.equal(halves_from_pairs(stored[8:16], 8), torch.from_numpy(rows[8:16]))


def test_ml_06_an_unsupported_type_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    raw = np.zeros((4, 136), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=gguf.GGMLQuantizationType.IQ4_XS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.weight has unsupported type IQ4_XS; supported: F32"):
        GGUFStore(file, 64)


def test_ml_06_a_cut_file_is_refused(tmp_path: Path) -> None:
    _, file, _ = _write(tmp_path, "Q8_0")
    file.write_bytes(file.read_bytes()[:-512])
    with pytest.raises(ConfigError, match=r"model\.gguf: tensor .* ends at byte \d+, the file at \d+ \(cut off\?\)"):
        Rig(file)


def test_ml_06_extra_and_missing_tensors_are_named(tmp_path: Path) -> None:
    original, _, _ = _write(tmp_path, "Q8_0")
    file = tmp_path / "more.gguf"
    write_gguf(original, file, "F32", metadata={"block_count": 3})
    with pytest.raises(ConfigError, match=r"missing tensors: model\.layers\.2\.input_layernorm\.weight"):
        Rig(file)
    file = tmp_path / "fewer.gguf"
    write_gguf(original, file, "F32", metadata={"block_count": 1})
    with pytest.raises(ConfigError, match=r"unexpected tensors: model\.layers\.1\.input_layernorm\.weight"):
        Rig(file)
