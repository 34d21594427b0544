"""ML-01: the head is the embedding where the configuration says so, there where it does not; nothing is left over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.proto.errors import ConfigError
from baton.tests.harness.hf_reference import load_reference
from baton.tests.harness.model_rig import Rig, random_tokens
from baton.tests.harness.tiny_model import VOCAB, write_tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

TOKENS = random_tokens(40, VOCAB)


def _edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tie", [True, False])
def test_ml_01_head_as_configured(tmp_path: Path, tie: bool, ranks: int) -> None:
    path = write_tiny_model(tmp_path, tie=tie)
    with torch.no_grad():
        expected = load_reference(path)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(Rig(path, ranks=ranks).sequence(TOKENS), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ml_01_tied_with_a_redundant_head(tmp_path: Path, ranks: int) -> None:
    expected = Rig(write_tiny_model(tmp_path / "plain")).sequence(TOKENS)
    path = write_tiny_model(tmp_path / "redundant")
    _edit(path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    torch.testing.assert_close(Rig(path, ranks=ranks).sequence(TOKENS), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ml_01_untied_without_a_head_is_refused(tmp_path: Path, ranks: int) -> None:
    path = write_tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ConfigError, match=r"missing tensors: lm_head\.weight; \(tie_word_embeddings is false"):
        Rig(path, ranks=ranks)


def test_ml_01_missing_extra_and_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        del weights["model.layers.0.mlp.up_proj.weight"]
        weights["model.layers.0.mlp.up_projection.weight"] = torch.zeros(128, 64)
        weights["model.norm.weight"] = torch.ones(63)

    with pytest.raises(ConfigError) as refused:
        Rig(_edit(write_tiny_model(tmp_path), change))
    assert str(refused.value) == (
        f"{tmp_path / 'model.safetensors'}: missing tensors: model.layers.0.mlp.up_proj.weight; "
        "unexpected tensors: model.layers.0.mlp.up_projection.weight; "
        "wrong shapes: model.norm.weight is [63], must be [64]"
    )


def test_ml_01_a_long_list_is_cut(tmp_path: Path) -> None:
    path = _edit(write_tiny_model(tmp_path), lambda w: [w.pop(name) for name in list(w) if "layers.1" in name])
    with pytest.raises(ConfigError, match=r"missing tensors: .* and 1 more$"):
        Rig(path)


def test_ml_01_buffers_of_old_converters_are_ignored(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    _edit(path, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert Rig(path).sequence(TOKENS).shape == (40, VOCAB)
