"""GGUF files of tiny models, written as llama.cpp's converter does, with their dequantised weights beside them in the
Hugging Face format as the oracle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Floats = npt.NDArray[np.float32]
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_ROOT = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    directory: Path,
    target: Path,
    kind: str,
    *,
    metadata: Mapping[str, Any] | None = None,
    rope_freqs: Floats | None = None,
) -> Path:
    """Write the model of `directory` to `target` (.gguf) with matrices of type `kind`.

    Returns a Hugging Face directory beside it with the same, dequantised weights in float32. `metadata` adds or
    replaces numbers and strings, keys without the architecture; `rope_freqs` is the tensor of that name.
    """
    config = json.loads((directory / "config.json").read_text())
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(target, arch)
    _write_settings(writer, arch, config, dict(metadata or {}))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    dequantised: dict[str, torch.Tensor] = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        values = weight.float().numpy()
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
            name.split(".")[-2]
        )
        interleaved = heads if arch == "llama" else None
        if values.ndim == 1:
            dequantised[name] = weight.float()
            writer.add_tensor(gguf_name(name), interleave(values, interleaved))
            continue
        raw, back = _quantise(values, kind)
        dequantised[name] = torch.from_numpy(back.copy())
        # Rows are quantised one by one, so they can be put in llama.cpp's order afterwards.
        raw_kind = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(gguf_name(name), interleave(raw, interleaved), raw_dtype=raw_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _write_oracle(directory, target.with_suffix(".oracle"), dequantised)


def _write_oracle(directory: Path, oracle: Path, weights: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(directory, oracle)
    save_file(weights, oracle / "model.safetensors", metadata={"format": "pt"})
    return oracle


def _write_settings(writer: gguf.GGUFWriter, arch: str, config: Mapping[str, Any], extra: dict[str, Any]) -> None:
    numbers: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    for key, value in {**numbers, **extra}.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{arch}.{key}", value)
        else:
            writer.add_float32(f"{arch}.{key}", value)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    stem, kind = name.rsplit(".", 1)
    if stem in _ROOT:
        return f"{_ROOT[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def interleave(rows: npt.NDArray[Any], heads: int | None) -> npt.NDArray[Any]:
    """Rows of q or k in the order of llama.cpp: the two halves of each head alternate."""
    if heads is None:
        return rows
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _quantise(values: Floats, kind: str) -> tuple[npt.NDArray[Any], Floats]:
    """The stored form and what it stands for."""
    if kind == "F32":
        return values, values
    if kind == "F16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    if kind == "Q6_K":
        raw = quantise_q6_k(values)
    elif kind.endswith("_K"):
        raw = _random_blocks(values.shape, kind)
    else:
        raw = gguf.quantize(values, number)
    return raw, np.asarray(gguf.dequantize(raw, number), dtype=np.float32)


def quantise_q6_k(values: Floats) -> npt.NDArray[np.uint8]:
    """Q6_K by rounding: 256 values a block, a scale for each 16, six bits each (the gguf library only reads it)."""
    parts = values.reshape(-1, 16, 16)
    scales = np.abs(parts).max(-1) / 31
    step = np.maximum(scales.max(-1, keepdims=True) / 127, 1e-8).astype(np.float16)
    levels = np.maximum(np.round(scales / step.astype(np.float32)), 1).astype(np.int8)
    unit = (levels * step.astype(np.float32))[..., None]
    codes = (np.clip(np.round(parts / unit), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.stack((codes[:, :, 0] & 15 | codes[:, :, 2] << 4, codes[:, :, 1] & 15 | codes[:, :, 3] << 4), axis=2)
    top = codes >> 4
    high = top[:, :, 0] | top[:, :, 1] << 2 | top[:, :, 2] << 4 | top[:, :, 3] << 6
    blocks = [low.reshape(-1, 128), high.reshape(-1, 64), levels.view(np.uint8), step.view(np.uint8)]
    return np.concatenate(blocks, axis=1).reshape(values.shape[0], -1)


def _random_blocks(shape: tuple[int, ...], kind: str) -> npt.NDArray[np.uint8]:
    """Random codes with small scales, for the types that the gguf library only reads."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    count = shape[0] * shape[1] // block
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    scale = np.full((count, 1), 2e-4, np.float16).view(np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}[kind]
    for place in places:
        raw[:, place : place + 2] = scale
    return raw.reshape(shape[0], -1)
