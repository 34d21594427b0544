"""Tensors of a GGUF file under their Hugging Face names, dequantised row by row.

llama.cpp rotates neighbouring pairs of dimensions where Transformers rotates the two halves of a head, so its converter
interleaves the rows of q and k for the `llama` architecture; that is undone here. Qwen models are stored as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from ..kernels.linear import GROUP
from ..proto.errors import ConfigError
from ..text import gguf_metadata
from .params import Quantization
from .quantized import Int4Weight
from .tensor_store import StoredTensor

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROOT_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROOT = re.compile(r"(\w+)\.(weight|bias)")
_SUPPORTED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_BLOCK_HEADS = {"Q4_0": 1, "Q4_1": 2}  # float16 numbers before the codes of a block: its scale, and its minimum
_KINDS = {int(gguf.GGMLQuantizationType[name]): name for name in _SUPPORTED}


class GGUFStore:
    """The tensors of one file."""

    def __init__(self, path: Path, head_dim: int) -> None:
        """Raises ConfigError naming the tensor when its type is unsupported or its bytes pass the end of the file."""
        header = gguf_metadata.read_header(path)
        self._interleaved = header.metadata.get("general.architecture") == "llama"
        self._head_dim = head_dim
        size = path.stat().st_size
        tensors: dict[str, StoredTensor] = {}
        for entry in header.tensors:
            name = huggingface_name(entry.name)
            if name in tensors:
                raise ConfigError(f"{path}: tensor {entry.name} appears twice")
            tensors[name] = _stored(path, entry, size)
        self.tensors: Mapping[str, StoredTensor] = tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) as float32, in the order of Transformers."""
        tensor = self.tensors[name]
        row, rows = tensor.row_bytes, stop - start
        data = np.fromfile(tensor.file, np.uint8, rows * row, offset=tensor.offset + start * row)
        kind = gguf.GGMLQuantizationType[tensor.kind]
        if len(tensor.shape) > 1:
            data = data.reshape(rows, row)
        values = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(data, kind), dtype=np.float32))
        values = values.view(rows, *tensor.shape[1:])
        return halves_from_pairs(values, self._head_dim) if self._is_rotated(name) else values

    def quantized_group(self, name: str, wanted: Quantization) -> int:
        """Blocks of 32 4-bit codes are those of `int4`."""
        return GROUP if wanted == "int4" and self.tensors[name].kind in _BLOCK_HEADS else 0

    def read_quantized(self, name: str, start: int, stop: int) -> Int4Weight:
        """Rows [start, stop) of a Q4_0 or Q4_1 tensor in the order of Transformers, not a bit changed."""
        tensor, rows = self.tensors[name], stop - start
        head = _BLOCK_HEADS[tensor.kind]
        data = np.fromfile(
            tensor.file, np.uint8, rows * tensor.row_bytes, offset=tensor.offset + start * tensor.row_bytes
        )
        blocks = torch.from_numpy(data).view(rows, -1, 2 * head + GROUP // 2)
        nibbles = blocks[:, :, 2 * head :]
        codes = torch.cat((nibbles & 15, nibbles >> 4), dim=2).view(rows, -1)
        numbers = blocks[:, :, : 2 * head].contiguous().view(torch.float16).unbind(2)
        weight = Int4Weight(codes, numbers[0], numbers[1] if head > 1 else None)
        if self._is_rotated(name):
            return weight.rows(halves_from_pairs(torch.arange(rows), self._head_dim))
        return weight

    def _is_rotated(self, name: str) -> bool:
        return self._interleaved and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name)


def huggingface_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; unknown names are returned as they are."""
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_PARTS[part]}.{kind}" if part in _LAYER_PARTS else name
    if (match := _ROOT.fullmatch(name)) and match[1] in _ROOT_PARTS:
        return f"{_ROOT_PARTS[match[1]]}.{match[2]}"
    return name


def halves_from_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Undo the interleave: of each head's rows, the even ones first, then the odd ones. Rows of whole heads."""
    heads = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def _stored(path: Path, entry: gguf_metadata.TensorEntry, file_size: int) -> StoredTensor:
    kind = _KINDS.get(entry.kind)
    if kind is None:
        known = {int(member): member.name for member in gguf.GGMLQuantizationType}
        raise ConfigError(
            f"{path}: tensor {entry.name} has unsupported type {known.get(entry.kind, entry.kind)}; "
            f"supported: {', '.join(_SUPPORTED)}"
        )
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if not entry.shape or min(entry.shape) < 1 or entry.shape[0] % block:
        raise ConfigError(f"{path}: tensor {entry.name} has rows of {entry.shape[:1]}, not whole {kind} blocks")
    size = int(np.prod([int(extent) for extent in entry.shape])) // block * block_bytes
    if entry.offset + size > file_size:
        raise ConfigError(
            f"{path}: tensor {entry.name} ends at byte {entry.offset + size}, the file at {file_size} (cut off?)"
        )
    return StoredTensor(entry.name, tuple(reversed(entry.shape)), kind, path, entry.offset, size)
