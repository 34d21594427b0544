"""Models as Transformers itself saves them: its spelling of config.json, its shards and its index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from baton.tests.harness.model_rig import Rig, random_tokens
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None, "head_dim": 32}),
        ("qwen2", {"rope_parameters": YARN}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
)
def test_save_pretrained(tmp_path: Path, arch: str, settings: dict[str, Any], shards: int) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(arch, **{**SIZES, "initializer_range": 0.2, **settings})
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path, max_shard_size="5GB" if shards == 1 else "150KB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards > 1)
    tokens = random_tokens(400, 300)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    ours = Rig(tmp_path).sequence(tokens, chunk=130)
    for position in (0, 100, 399):
        torch.testing.assert_close(ours[position], expected[position], atol=5e-4, rtol=1e-3)
