"""KV-16: models with a sliding window are refused by name, not served without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from baton.engine.model_config import load_config
from baton.proto.errors import ConfigError
from baton.tests.harness.model_rig import Rig
from baton.tests.harness.tiny_gguf import write_gguf
from baton.tests.harness.tiny_model import write_tiny_model
from baton.text.source import resolve


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}),
        ("qwen3", {"sliding_window": 9, "use_sliding_window": True}),
    ],
)
def test_kv_16_a_window_is_refused(tmp_path: Path, arch: str, settings: dict[str, Any]) -> None:
    path = write_tiny_model(tmp_path, arch=arch, **settings)
    with pytest.raises(ConfigError, match=rf"unsupported sliding_window {settings['sliding_window']} \({arch}\)"):
        load_config(resolve(str(path)))


def test_kv_16_alternating_layers_are_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, arch="qwen3", layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ConfigError, match="unsupported layer_types sliding_attention"):
        load_config(resolve(str(path)))


def test_kv_16_mistral_without_the_key_has_its_default_window(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, arch="mistral")
    file = path / "config.json"
    file.write_text(file.read_text().replace('"sliding_window": null', '"_": null'))
    with pytest.raises(ConfigError, match="unsupported sliding_window 4096"):
        load_config(resolve(str(path)))


def test_kv_16_a_window_that_is_off_is_accepted(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, arch="qwen2", sliding_window=8, use_sliding_window=False)
    assert Rig(path).config.arch == "qwen2"


def test_kv_16_gguf(tmp_path: Path) -> None:
    original = write_tiny_model(tmp_path / "original", arch="mistral")
    write_gguf(original, tmp_path / "model.gguf", "F32", metadata={"attention.sliding_window": 8})
    with pytest.raises(ConfigError, match=r"unsupported llama\.attention\.sliding_window 8"):
        load_config(resolve(str(tmp_path / "model.gguf")))
