"""Rotary position settings: read from both spellings of a Hugging Face config and from GGUF, and made into frequencies.

What cannot be served exactly is refused by name: `dynamic` and `longrope` choose frequencies by the length that a
request has reached, so keys already in the cache would no longer fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..proto.errors import ConfigError

SUPPORTED = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10000.0
_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary settings, all resolved. Fields that the type does not use hold neutral values."""

    type: str  # one of SUPPORTED
    theta: float
    factor: float
    original_max_positions: int  # of the unscaled training; 0 where unused
    low_freq_factor: float  # llama3
    high_freq_factor: float  # llama3
    beta_fast: float  # yarn: rotations
    beta_slow: float  # yarn: rotations
    truncate: bool  # yarn: whether the correction range is rounded to whole dimensions
    attention_factor: float  # multiplies cos and sin
    divisors: tuple[float, ...]  # GGUF `rope_freqs`: divides each frequency; () where absent

    def describe(self) -> str:
        """Readable and complete: two models with the same text rotate alike."""
        parts = [f"{self.type} theta={self.theta}"]
        if self.type != "default":
            parts.append(f"factor={self.factor}")
        if self.type in ("llama3", "yarn"):
            parts.append(f"original={self.original_max_positions}")
        if self.type == "llama3":
            parts.append(f"low={self.low_freq_factor} high={self.high_freq_factor}")
        if self.type == "yarn":
            parts.append(f"beta={self.beta_fast}/{self.beta_slow} truncate={self.truncate}")
            parts.append(f"attention_factor={self.attention_factor}")
        if self.divisors:
            parts.append("divisors=" + ",".join(f"{value:g}" for value in self.divisors))
        return " ".join(parts)


def plain(theta: float) -> RopeConfig:
    """Unscaled rotary positions with base `theta`."""
    return RopeConfig("default", theta, 1.0, 0, 1.0, 1.0, 32.0, 1.0, True, 1.0, ())


def from_huggingface(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """The settings of a config.json, from `rope_scaling` + `rope_theta` or from `rope_parameters`.

    Raises ConfigError for an unsupported type, an unknown or missing key, or two spellings that disagree.
    """
    fields = _spelling(config)
    kind = str(fields.pop("rope_type", None) or fields.pop("type", None) or "default")
    fields.pop("type", None)
    theta = _number(fields.pop("rope_theta", config.get("rope_theta")), "rope_theta", _DEFAULT_THETA)
    partial = fields.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (1, None):
        raise ConfigError(f"partial_rotary_factor {partial} is not supported (only whole heads are rotated)")
    if kind not in SUPPORTED:
        reason = " (its frequencies depend on the length reached)" if kind in ("dynamic", "longrope") else ""
        raise ConfigError(f"unsupported rope_type {kind!r}{reason}; supported: {', '.join(SUPPORTED)}")
    unknown = sorted(set(fields) - _KEYS[kind])
    if unknown:
        raise ConfigError(f"rope_type {kind!r} with unsupported settings: {', '.join(unknown)}")
    original = config.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    return _resolve(kind, theta, fields, int(original or max_positions))


def _spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a table of settings, not {value!r}")
    if old and new and any(new.get(key, value) != value for key, value in old.items()):
        raise ConfigError(f"rope_scaling {dict(old)} and rope_parameters {dict(new)} disagree")
    fields = {**(new or {}), **(old or {})}
    nested = [key for key, value in fields.items() if isinstance(value, Mapping)]
    if nested:
        raise ConfigError(f"rotary settings per layer type ({', '.join(nested)}) are not supported")
    return {key: value for key, value in fields.items() if value is not None}


def _resolve(kind: str, theta: float, fields: Mapping[str, Any], original: int) -> RopeConfig:
    factor = _number(fields.get("factor"), f"rope_type {kind!r}: factor", 1.0 if kind == "default" else None)
    scaled = kind in ("llama3", "yarn")
    low = high = 1.0
    if kind == "llama3":
        low = _number(fields.get("low_freq_factor"), "rope_type 'llama3': low_freq_factor", None)
        high = _number(fields.get("high_freq_factor"), "rope_type 'llama3': high_freq_factor", None)
        if high <= low:
            raise ConfigError(f"rope_type 'llama3': high_freq_factor {high} must exceed low_freq_factor {low}")
    return RopeConfig(
        type=kind,
        theta=theta,
        factor=factor,
        original_max_positions=original if scaled else 0,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=_number(fields.get("beta_fast"), "beta_fast", 32.0),
        beta_slow=_number(fields.get("beta_slow"), "beta_slow", 1.0),
        truncate=bool(fields.get("truncate", True)),
        attention_factor=_attention_factor(kind, factor, fields),
        divisors=(),
    )


def _attention_factor(kind: str, factor: float, fields: Mapping[str, Any]) -> float:
    """yarn: what multiplies cos and sin (arXiv 2309.00071, section 3.4), with DeepSeek's two mscale settings."""
    if kind != "yarn":
        return 1.0
    given = fields.get("attention_factor")
    if given is not None:
        return _number(given, "attention_factor", None)
    both = (fields.get("mscale"), fields.get("mscale_all_dim"))
    if both[0] and both[1]:
        return _mscale(factor, float(both[0])) / _mscale(factor, float(both[1]))
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(value: Any, name: str, default: float | None) -> float:
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} must be a number above 0, not {value!r}")
    return float(value)


def from_gguf(metadata: Mapping[str, Any], arch: str, max_positions: int, divisors: tuple[float, ...]) -> RopeConfig:
    """The settings of a GGUF file; `divisors` are its `rope_freqs` tensor. Raises ConfigError for unsupported ones."""
    theta = _number(metadata.get(f"{arch}.rope.freq_base"), f"{arch}.rope.freq_base", _DEFAULT_THETA)
    kind = str(metadata.get(f"{arch}.rope.scaling.type", "none"))
    scale = {key: metadata.get(f"{arch}.rope.scaling.{key}") for key in ("factor", "attn_factor", "yarn_attn_factor")}
    if kind == "none":
        config = plain(theta)
    elif kind == "linear":
        config = _resolve("linear", theta, {"factor": scale["factor"]}, 0)
    elif kind == "yarn":
        original = int(metadata.get(f"{arch}.rope.scaling.original_context_length") or max_positions)
        fields = {"factor": scale["factor"]}
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            fields[ours] = metadata.get(f"{arch}.rope.scaling.{theirs}")
        extra = scale["attn_factor"] or scale["yarn_attn_factor"]
        if extra not in (None, 1):
            factor = _number(scale["factor"], f"{arch}.rope.scaling.factor", None)
            fields["attention_factor"] = _mscale(factor, 1.0) * extra
        config = _resolve("yarn", theta, fields, original)
    else:
        raise ConfigError(f"unsupported {arch}.rope.scaling.type {kind!r}; supported: none, linear, yarn")
    values = {name: getattr(config, name) for name in RopeConfig.__slots__}
    return RopeConfig(**{**values, "divisors": divisors})


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions: float32 [head_dim / 2].

    llama3 as published with Llama 3.1; yarn is "NTK by parts" (arXiv 2309.00071, section 3.2).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.type == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.type == "yarn":
        frequencies = _yarn(rope, exponents, head_dim)
    if rope.divisors:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, and those between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    blend = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig, exponents: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn often are kept, those that turn rarely are interpolated, with a ramp between."""
    bounds = [
        head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        for rotations in (rope.beta_fast, rope.beta_slow)
    ]
    if rope.truncate:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    turns = rope.theta**exponents
    kept: Tensor = 1.0 / turns
    interpolated: Tensor = 1.0 / (rope.factor * turns)
    return interpolated * ramp + kept * (1 - ramp)
