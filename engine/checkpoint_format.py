"""How the linear weights of a Hugging Face checkpoint are stored, quantised or sparse: what `quantization_config` says,
checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..proto.errors import ConfigError
from .params import Quantization

Layout = Literal["int8", "packed", "gptq", "awq", "sparse24"]
_SUPPORTED = "supported: compressed-tensors (w8a8 int8, 4-bit pack-quantized), gptq and awq with 4 bits"


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """One of the layouts that weights_quantized.py reads, or weights_sparse.py (sparse24)."""

    layout: Layout  # int8, packed and sparse24 are those of compressed-tensors
    zero_offset: int = 0  # what zero points in the file lack

    @property
    def quantization(self) -> Quantization:
        """What the engine computes with."""
        if self.layout == "sparse24":
            return "none"
        return "w8a8" if self.layout == "int8" else "int4"


def stored_format(directory: Path) -> CheckpointFormat | None:
    """That of a directory whose config.json was read without complaint."""
    return checkpoint_format(json.loads((directory / "config.json").read_text()))


def checkpoint_format(fields: Mapping[str, Any]) -> CheckpointFormat | None:
    """The format that config.json's `fields` name; None: plain numbers. Raises ConfigError for any other."""
    config = fields.get("quantization_config")
    if not config:
        return None
    method = config.get("quant_method", "unknown") if isinstance(config, Mapping) else config
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method not in ("gptq", "awq"):
        raise ConfigError(f"unsupported quantization_config (quant_method {method!r}); {_SUPPORTED}")
    _expect(method, config, {"bits": (4,), "group_size": (None, -1, 32, 64, 128, 256)})
    if method == "awq":
        _expect(method, config, {"version": (None, "gemm", "GEMM"), "zero_point": (True,)})
        return CheckpointFormat("awq")
    _expect(method, config, {"desc_act": (None, False), "checkpoint_format": (None, "gptq", "gptq_v2")})
    return CheckpointFormat("gptq", 0 if config.get("checkpoint_format") == "gptq_v2" else 1)


def declares_sparsity(directory: Path) -> bool:
    """Whether config.json says that linear weights are 2:4 sparse, however they are stored."""
    fields = json.loads((directory / "config.json").read_text())
    found = fields.get("quantization_config")
    sparsity = found.get("sparsity_config") if isinstance(found, Mapping) else None
    return isinstance(sparsity, Mapping) and sparsity.get("sparsity_structure") == "2:4"


def _compressed_tensors(config: Mapping[str, Any]) -> CheckpointFormat | None:
    groups = list((config.get("config_groups") or {}).values())
    if not groups and config.get("sparsity_config"):
        return _sparse(config["sparsity_config"])
    if len(groups) != 1 or not groups[0].get("weights"):
        raise ConfigError(f"unsupported quantization_config (compressed-tensors with {len(groups)} config_groups)")
    weights, rows = groups[0]["weights"], groups[0].get("input_activations")
    name = f"compressed-tensors {groups[0].get('format') or config.get('format')}"
    _expect(name, config, {"kv_cache_scheme": (None,), "sparsity_config": (None, {})})
    _expect(name, weights, {"type": ("int",), "num_bits": (4, 8), "actorder": (None, "weight")})
    if weights["num_bits"] == 4 and name.endswith("pack-quantized") and rows is None:
        _expect(name, weights, {"strategy": ("group", "channel")})
        return CheckpointFormat("packed")
    if weights["num_bits"] == 8 and name.endswith("int-quantized") and rows is not None:
        _expect(name, weights, {"strategy": ("channel", "tensor"), "symmetric": (None, True)})
        _expect(
            f"{name} input_activations",
            rows,
            {"type": ("int",), "num_bits": (8,), "dynamic": (True,), "symmetric": (None, True)},
        )
        return CheckpointFormat("int8")
    kind = f"{name}, {weights['num_bits']}-bit weights {'without' if rows is None else 'and'} quantised activations"
    raise ConfigError(f"unsupported quantization_config ({kind}); {_SUPPORTED}")


def _sparse(sparsity: Mapping[str, Any]) -> CheckpointFormat | None:
    """Weights that are pruned and not quantised: as bitmask and values, or with their zeros."""
    _expect("compressed-tensors sparsity_config", sparsity, {"format": ("sparse-24-bitmask", "dense")})
    if sparsity["format"] == "dense":
        return None
    _expect("compressed-tensors sparse-24-bitmask", sparsity, {"sparsity_structure": ("2:4",)})
    return CheckpointFormat("sparse24")


def _expect(name: str, config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    for key, values in allowed.items():
        if config.get(key) not in values:
            known = ", ".join(str(value) for value in values if value is not None)
            raise ConfigError(
                f"unsupported quantization_config ({name} with {key} {config.get(key)!r}); supported: {known or 'none'}"
            )
