"""What the driver itself must know of the model before it starts anything: that it exists, its name and its heads.

Reads a few numbers from config.json or GGUF metadata; torch is not imported. The ranks check everything else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..proto.errors import ConfigError
from ..text import gguf_metadata
from ..text.source import ModelSource, resolve
from . import config_checks
from .config import Config


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model of a configuration."""

    source: ModelSource
    name: str  # what clients call it
    heads: int
    kv_heads: int
    warnings: tuple[str, ...]


def check_model(config: Config) -> ModelFacts:
    """The model, found and compared with the pools. Raises ConfigError for a missing one or too many ranks."""
    source = resolve(config.model_path)
    heads, kv_heads = _heads(source)
    wrong = config_checks.model_mistakes(config, heads)
    if wrong:
        raise ConfigError("\n".join(f"{key}: {text}" for key, text in wrong.items()))
    warnings = (*config_checks.exposed(config), *config_checks.model_warnings(config, kv_heads))
    return ModelFacts(source, config.model.name or source.name, heads, kv_heads, warnings)


def _heads(source: ModelSource) -> tuple[int, int]:
    if source.kind == "gguf":
        metadata = gguf_metadata.read(source.path)
        arch = metadata.get("general.architecture", "")
        heads = metadata.get(f"{arch}.attention.head_count")
        return _numbers(source, heads, metadata.get(f"{arch}.attention.head_count_kv", heads))
    try:
        fields: dict[str, Any] = json.loads((source.path / "config.json").read_text())
        heads = fields.get("num_attention_heads")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.path: {source.path}/config.json cannot be read: {error}") from None
    return _numbers(source, heads, fields.get("num_key_value_heads") or heads)


def _numbers(source: ModelSource, heads: object, kv_heads: object) -> tuple[int, int]:
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads < 1 or kv_heads < 1:
        raise ConfigError(f"model.path: {source.path} does not say how many attention heads it has")
    return heads, kv_heads
