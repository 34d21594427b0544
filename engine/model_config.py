"""What a model is: its shape and settings, from config.json or from GGUF metadata; unsupported ones are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..proto.errors import ConfigError
from ..text import gguf_metadata
from ..text.source import ModelSource
from . import rope as rotary
from .checkpoint_format import checkpoint_format
from .rope import RopeConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_F32, _F16 = 0, 1  # ggml type numbers


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder: RMS norms, rotary positions, grouped-query attention, gated SiLU."""

    arch: str  # llama | mistral | qwen2 | qwen3
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    tied: bool  # the head is the embedding
    attention_bias: bool  # of the q, k and v projections
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMS norm over each q and k head
    max_positions: int  # tokens


def load_config(source: ModelSource) -> ModelConfig:
    """The configuration of the model at `source`. Raises ConfigError naming what is missing or unsupported."""
    config = _from_gguf(source.path) if source.kind == "gguf" else _from_directory(source.path)
    _check(config, source.path)
    return config


def _check(config: ModelConfig, path: Path) -> None:
    for name in ("vocab_size", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "max_positions"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{path}: {name} is {getattr(config, name)}, must be at least 1")
    if config.heads % config.kv_heads:
        raise ConfigError(f"{path}: {config.heads} query heads are not a multiple of {config.kv_heads} KV heads")
    if config.head_dim % 2:
        raise ConfigError(f"{path}: head_dim {config.head_dim} is odd, so it cannot be rotated")
    if config.rope.divisors and len(config.rope.divisors) != config.head_dim // 2:
        raise ConfigError(f"{path}: rope_freqs has {len(config.rope.divisors)} values for head_dim {config.head_dim}")


def _from_directory(path: Path) -> ModelConfig:
    file = path / "config.json"
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} must hold a table of settings")
    try:
        return _from_fields(fields)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _from_fields(fields: Mapping[str, Any]) -> ModelConfig:
    arch = _architecture(fields)
    _refuse_unsupported(fields, arch)
    hidden, heads = _integer(fields, "hidden_size"), _integer(fields, "num_attention_heads")
    biased = bool(fields.get("attention_bias", False))
    max_positions = _integer(fields, "max_position_embeddings")
    head_dim = fields.get("head_dim")
    if head_dim is None and arch == "qwen3":
        head_dim = 128  # what Transformers assumes
    if head_dim is None and hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is not a multiple of {heads} heads, and head_dim is not given")
    return ModelConfig(
        arch=arch,
        vocab_size=_integer(fields, "vocab_size"),
        hidden=hidden,
        intermediate=_integer(fields, "intermediate_size"),
        layers=_integer(fields, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads if fields.get("num_key_value_heads") is None else _integer(fields, "num_key_value_heads"),
        head_dim=hidden // heads if head_dim is None else _integer(fields, "head_dim", head_dim),
        rms_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope=rotary.from_huggingface(fields, max_positions),
        tied=bool(fields.get("tie_word_embeddings", False)),
        attention_bias=arch == "qwen2" or (biased and arch != "mistral"),
        output_bias=biased and arch in ("llama", "qwen3"),
        mlp_bias=bool(fields.get("mlp_bias", False)) and arch == "llama",
        qk_norm=arch == "qwen3",
        max_positions=max_positions,
    )


def _architecture(fields: Mapping[str, Any]) -> str:
    known = ", ".join(ARCHITECTURES)
    names = fields.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if names:
        raise ConfigError(f"unsupported architecture {', '.join(map(str, names))}; supported: {known}")
    kind = fields.get("model_type")
    if kind in ARCHITECTURES.values():
        return str(kind)
    raise ConfigError(f"unsupported model_type {kind!r}; supported architectures: {known}")


def _refuse_unsupported(fields: Mapping[str, Any], arch: str) -> None:
    """Settings that would change the arithmetic and that the model does not have."""
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"unsupported hidden_act {activation!r}; supported: silu")
    checkpoint_format(fields)
    window = fields.get("sliding_window", 4096 if arch == "mistral" else None)  # Mistral's default is a window
    if arch in ("qwen2", "qwen3") and not fields.get("use_sliding_window", False):
        window = None
    if window is not None:
        raise ConfigError(f"unsupported sliding_window {window} ({arch}); supported: null (full attention)")
    others = sorted({str(kind) for kind in fields.get("layer_types") or []} - {"full_attention"})
    if others:
        raise ConfigError(f"unsupported layer_types {', '.join(others)}; supported: full_attention")


def _integer(fields: Mapping[str, Any], name: str, value: Any = None) -> int:
    value = fields.get(name) if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {value!r}" if name in fields else f"{name} is missing")
    return value


def _from_gguf(path: Path) -> ModelConfig:
    header = gguf_metadata.read_header(path)
    try:
        divisors = _rope_divisors(path, header)
        return _from_metadata(header, divisors)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _from_metadata(header: gguf_metadata.Header, divisors: tuple[float, ...]) -> ModelConfig:
    metadata = header.metadata
    arch = str(metadata.get("general.architecture"))
    if arch not in GGUF_ARCHITECTURES:
        raise ConfigError(f"unsupported general.architecture {arch!r}; supported: {', '.join(GGUF_ARCHITECTURES)}")
    shapes = {entry.name: entry.shape for entry in header.tensors}
    _refuse_unsupported_gguf(metadata, arch)
    heads = _field(metadata, f"{arch}.attention.head_count", None)
    hidden = _field(metadata, f"{arch}.embedding_length", None)
    head_dim = _field(metadata, f"{arch}.attention.key_length", hidden // heads)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if _field(metadata, key, head_dim) != head_dim:
            raise ConfigError(f"{key} {metadata[key]} differs from the head's {head_dim} dimensions: not supported")
    embedding = shapes.get("token_embd.weight", (hidden, 0))
    max_positions = _field(metadata, f"{arch}.context_length", None)
    return ModelConfig(
        arch=arch,
        vocab_size=_field(metadata, f"{arch}.vocab_size", embedding[-1]),
        hidden=hidden,
        intermediate=_field(metadata, f"{arch}.feed_forward_length", None),
        layers=_field(metadata, f"{arch}.block_count", None),
        heads=heads,
        kv_heads=_field(metadata, f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_eps=float(metadata.get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)),
        rope=rotary.from_gguf(metadata, arch, max_positions, divisors),
        tied="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=arch == "qwen3",
        max_positions=max_positions,
    )


def _refuse_unsupported_gguf(metadata: Mapping[str, Any], arch: str) -> None:
    for key in (f"{arch}.expert_count", f"{arch}.attention.sliding_window"):
        if metadata.get(key):
            raise ConfigError(f"unsupported {key} {metadata[key]}")


def _field(metadata: Mapping[str, Any], key: str, default: int | None) -> int:
    """A whole number; a list with one value per layer must hold the same value throughout."""
    value = metadata.get(key, default)
    if isinstance(value, list) and value:
        if len(set(value)) > 1:
            raise ConfigError(f"{key} differs between layers: not supported")
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key} is missing" if value is None else f"{key} must be a whole number, not {value!r}")
    return value


def _rope_divisors(path: Path, header: gguf_metadata.Header) -> tuple[float, ...]:
    """The `rope_freqs` tensor (how GGUF carries llama3 scaling): a few floats."""
    for entry in header.tensors:
        if entry.name == "rope_freqs.weight":
            if entry.kind not in (_F32, _F16):
                raise ConfigError(f"tensor {entry.name} has ggml type {entry.kind}; F32 or F16 expected")
            kind = np.dtype("<f4" if entry.kind == _F32 else "<f2")
            values = np.fromfile(path, dtype=kind, count=entry.shape[0], offset=entry.offset)
            return tuple(float(value) for value in values)
    return ()
