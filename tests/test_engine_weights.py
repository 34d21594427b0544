"""Reading one rank's share: progress, fingerprints and configuration errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from baton.engine.model_config import load_config
from baton.engine.quantized import full
from baton.engine.weights import Weights
from baton.proto.errors import ConfigError
from baton.tests.harness.model_rig import silent
from baton.tests.harness.tiny_gguf import write_gguf
from baton.tests.harness.tiny_model import write_tiny_model
from baton.text.source import resolve


def _open(path: Path, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float32) -> Weights:
    source = resolve(str(path))
    return Weights.open(source, load_config(source), dtype, "none", rank, ranks, silent)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("arch", "settings"), [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {"tie": False})]
)
def test_progress_ends_at_its_total(tmp_path: Path, arch: str, settings: dict[str, Any], ranks: int) -> None:
    source = resolve(str(write_tiny_model(tmp_path, arch=arch, **settings)))
    config = load_config(source)
    for rank in range(ranks):
        seen: list[tuple[int, int]] = []
        weights = Weights.open(source, config, torch.bfloat16, "none", rank, ranks, lambda *state: seen.append(state))  # noqa: B023
        weights.embedding()
        for layer in range(config.layers):
            weights.layer(layer)
        weights.final_norm()
        weights.head()
        assert seen == sorted(seen)
        assert len({total for _, total in seen}) == 1
        assert seen[-1][0] == seen[-1][1]


def test_ranks_share_the_tensors_out(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, heads=9, kv_heads=3, hidden=72)
    whole, *parts = (_open(path, rank, ranks).layer(0) for rank, ranks in ((0, 1), (0, 2), (1, 2)))
    qkv, first, second = (full(layer.qkv) for layer in (whole, *parts))
    assert [part.shape[0] // 16 for part in (first, second)] == [6 + 2 * 2, 3 + 2 * 1]
    assert torch.equal(torch.cat([full(part.output) for part in parts], 1), full(whole.output))
    assert torch.equal(torch.cat([full(part.down) for part in parts], 1), full(whole.down))
    assert torch.equal(first[:96], qkv[:96])
    assert torch.equal(second[48:64], qkv[144 + 32 : 144 + 48])


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "a")
    same = {
        _open(path, rank, ranks, dtype).fingerprint
        for rank, ranks, dtype in ((0, 1, torch.float32), (1, 2, torch.bfloat16))
    }
    others = [
        _open(write_tiny_model(tmp_path / "seed", seed=1)).fingerprint,
        _open(write_tiny_model(tmp_path / "eps", rms_norm_eps=1e-6)).fingerprint,
        _open(write_tiny_model(tmp_path / "half", dtype="bfloat16")).fingerprint,
    ]
    write_gguf(path, tmp_path / "model.gguf", "Q8_0")
    others.append(_open(tmp_path / "model.gguf").fingerprint)
    assert len(same) == 1
    assert len({*same, *others}) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "unsupported architecture GPT2LMHeadModel; supported: Llama",
        ),
        ({"architectures": [], "model_type": "gemma"}, "unsupported model_type 'gemma'"),
        ({"hidden_act": "gelu"}, "unsupported hidden_act 'gelu'; supported: silu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "unsupported quantization_config .quant_method 'fp8'."),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3 KV heads"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, not '64'"),
        ({"vocab_size": None}, "vocab_size must be a whole number, not None"),
        ({"num_hidden_layers": 0}, "layers is 0, must be at least 1"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
    ],
)
def test_settings_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=message):
        load_config(resolve(str(path)))


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    for text, message in (
        ("{", r"config\.json: Expecting"),
        ("[]", "must hold a table"),
        ("{}", "unsupported model_type"),
    ):
        (path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(resolve(str(path)))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, r"unsupported llama\.expert_count 8"),
        ({"rope.dimension_count": 8}, r"llama\.rope\.dimension_count 8 differs from the head's 16 dimensions"),
        ({"block_count": "two"}, r"llama\.block_count must be a whole number, not 'two'"),
    ],
)
def test_gguf_settings_are_refused_by_name(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    write_gguf(write_tiny_model(tmp_path / "original"), tmp_path / "model.gguf", "F32", metadata=metadata)
    with pytest.raises(ConfigError, match=message):
        load_config(resolve(str(tmp_path / "model.gguf")))
