"""ML-02: base and scaling of the rotary positions, in both spellings, near and beyond the original maximum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from baton.engine import rope as rotary
from baton.engine.model_config import load_config
from baton.kernels.rotary import angles
from baton.proto.errors import ConfigError
from baton.tests.harness.hf_reference import load_reference
from baton.tests.harness.model_rig import Rig, random_tokens
from baton.tests.harness.tiny_gguf import write_gguf
from baton.tests.harness.tiny_model import VOCAB, write_tiny_model
from baton.text.source import resolve
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

MAX = 256
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-attention": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.2},
}


def _spelling(name: str, new: bool, theta: float) -> dict[str, Any]:
    kind = name.split("-")[0]
    if new:
        return {"rope_theta": None, "rope_parameters": {"rope_type": kind, "rope_theta": theta, **SCALINGS[name]}}
    return {"rope_theta": theta, "rope_scaling": {"type": kind, **SCALINGS[name]} if SCALINGS[name] else None}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("name", SCALINGS)
def test_ml_02_tables_equal_transformers(name: str, new: bool) -> None:
    fields = {"max_position_embeddings": MAX, **_spelling(name, new, 50000.0)}
    ours = rotary.from_huggingface(fields, MAX)
    positions = torch.tensor([0, 1, 63, 64, 100, 200, 255])
    cos, sin = angles(positions, rotary.inverse_frequencies(ours, 16), ours.attention_factor, torch.float32)
    parameters = {"rope_type": name.split("-")[0], "rope_theta": 50000.0, **SCALINGS[name]}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=MAX, rope_parameters=parameters)
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    for ours_table, theirs in zip((cos, sin), expected, strict=True):
        torch.testing.assert_close(ours_table[:, 0], theirs[0, :, :8], atol=1e-5, rtol=0)


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("name", SCALINGS)
def test_ml_02_logits_equal_transformers(tmp_path: Path, name: str, arch: str, new: bool) -> None:
    path = write_tiny_model(tmp_path, arch=arch, max_len=MAX, **_spelling(name, new, 50000.0))
    tokens = random_tokens(220, VOCAB)
    with torch.no_grad():
        expected = load_reference(path)(torch.tensor([tokens])).logits[0]
    ours = Rig(path).sequence(tokens, chunk=64)
    for position in (0, 100, 219):
        torch.testing.assert_close(ours[position], expected[position], atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "made-up"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_ml_02_other_types_are_refused_by_name(tmp_path: Path, kind: str, key: str) -> None:
    fields: dict[str, Any] = {key: {"rope_type": kind, "factor": 2.0}}
    path = write_tiny_model(tmp_path, **fields)
    with pytest.raises(ConfigError, match=f"unsupported rope_type '{kind}'.*supported: default, linear, llama3, yarn"):
        load_config(resolve(str(path)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear': factor must be a number above 0, not None"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be a number above 0, not -1"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "slope": 1}}, "unsupported settings: slope"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor must be a number above 0"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "must exceed low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling must be a table of settings"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "settings per layer type .full_attention."),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "disagree",
        ),
    ],
)
def test_ml_02_mistakes_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = write_tiny_model(tmp_path, **fields)
    with pytest.raises(ConfigError, match=message):
        load_config(resolve(str(path)))


def test_ml_02_settings_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    """Two workers that rotate differently must not exchange KV (see KV-03)."""
    rigs = [Rig(write_tiny_model(tmp_path / str(theta), rope_theta=theta)) for theta in (10000.0, 500000.0)]
    assert rigs[0].config.rope.describe() != rigs[1].config.rope.describe()
    assert rigs[0].weights[0].fingerprint != rigs[1].weights[0].fingerprint


@pytest.mark.parametrize("name", ["linear", "yarn", "yarn-attention"])
def test_ml_02_gguf_scaling(tmp_path: Path, name: str) -> None:
    kind, fields = name.split("-")[0], SCALINGS[name]
    original = write_tiny_model(tmp_path / "original", rope_scaling={"rope_type": kind, **fields})
    metadata: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    if kind == "yarn":
        metadata["rope.scaling.original_context_length"] = 64
    if "attention_factor" in fields:
        plain = rotary.from_huggingface({"rope_scaling": {"type": "yarn", "factor": 4.0}}, MAX).attention_factor
        metadata["rope.scaling.attn_factor"] = fields["attention_factor"] / plain
    oracle = write_gguf(original, tmp_path / "model.gguf", "F32", metadata=metadata)
    _assert_same_logits(tmp_path / "model.gguf", oracle)


def test_ml_02_gguf_frequency_divisors(tmp_path: Path) -> None:
    """How llama.cpp's converter stores llama3 scaling."""
    original = write_tiny_model(tmp_path / "original", rope_scaling={"rope_type": "llama3", **LLAMA3})
    config = rotary.from_huggingface({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, MAX)
    divisors = rotary.inverse_frequencies(rotary.plain(10000.0), 16) / rotary.inverse_frequencies(config, 16)
    oracle = write_gguf(original, tmp_path / "model.gguf", "F32", rope_freqs=divisors.numpy())
    _assert_same_logits(tmp_path / "model.gguf", oracle)


def test_ml_02_gguf_unknown_scaling_is_refused(tmp_path: Path) -> None:
    original = write_tiny_model(tmp_path / "original")
    write_gguf(original, tmp_path / "model.gguf", "F32", metadata={"rope.scaling.type": "longrope"})
    with pytest.raises(
        ConfigError, match=r"unsupported llama\.rope\.scaling\.type 'longrope'; supported: none, linear"
    ):
        load_config(resolve(str(tmp_path / "model.gguf")))


def _assert_same_logits(file: Path, oracle: Path) -> None:
    tokens = random_tokens(220, VOCAB)
    with torch.no_grad():
        expected = load_reference(oracle)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(Rig(file).sequence(tokens), expected, atol=5e-4, rtol=1e-3)
