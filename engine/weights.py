"""One rank's share of a model's weights, read when the model asks for them, layer by layer.

All names and shapes are checked against the configuration first: every parameter is there exactly once, and nothing is
left over. What is read is already cut for the rank, fused (q, k and v; gate and up) and in the engine's dtype, so the
peak beside the finished model is one layer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..proto.errors import ConfigError
from ..text.source import ModelSource
from .checkpoint_format import declares_sparsity, stored_format
from .linear import PROBE_BYTES
from .model_config import ModelConfig
from .params import Quantization
from .partition import Range, head_ranges, query_ranges, split
from .quantized import BYTES, HEAD_SCHEMES, QKV_SCHEMES, Weight, join, quantize
from .tensor_names import EMBEDDING, HEAD, NORM, check_tensors, expected
from .tensor_store import TensorStore
from .weights_gguf import GGUFStore
from .weights_hf import SafetensorsStore
from .weights_quantized import QuantizedStore
from .weights_sparse import SparseStore

Progress = Callable[[int, int], None]
_CHUNK_BYTES = 4 << 20  # of float32, while a tensor is converted (and a few times that inside the conversion)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, cut for one rank. Linear weights are [outputs, inputs], quantised where the engine's settings say so;
    biases of split sums are on rank 0 only."""

    attention_norm: Tensor
    qkv: Weight  # the rank's query heads, then its key heads, then its value heads
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Weight
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Weight  # the rank's gate rows, then its up rows
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank owns, as [start, stop)."""

    rank: int
    query_heads: Range
    kv_heads: Range
    mlp: Range
    vocab: Range
    vocab_widths: tuple[int, ...]  # rows of the vocabulary on every rank

    @staticmethod
    def of(config: ModelConfig, rank: int, ranks: int) -> Shard:
        """Raises ConfigError where the model cannot be split so."""
        vocab = split(config.vocab_size, ranks)
        return Shard(
            rank=rank,
            query_heads=query_ranges(config.heads, config.kv_heads, ranks)[rank],
            kv_heads=head_ranges(config.kv_heads, ranks)[rank],
            mlp=split(config.intermediate, ranks)[rank],
            vocab=vocab[rank],
            vocab_widths=tuple(stop - start for start, stop in vocab),
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that one rank's weights take: when loaded, and at the highest point of loading."""

    resident: int
    peak: int


class Weights:
    """The reader of one rank."""

    def __init__(
        self,
        config: ModelConfig,
        store: TensorStore,
        shard: Shard,
        dtype: torch.dtype,
        quantization: Quantization,
        sparse: bool,
        report: Progress,
    ):
        """`report(done, total)` gets bytes of the files. Raises ConfigError: missing, extra or misshapen tensors."""
        check_tensors(config, store)
        self.config = config
        self.shard = shard
        self.dtype = dtype
        self.sparse = sparse  # the checkpoint says that its linear weights are 2:4
        self._quantization = quantization
        self._store = store
        self._report = report
        self._done = 0
        self._total = _file_bytes(config, store, shard)

    @staticmethod
    def open(
        source: ModelSource,
        config: ModelConfig,
        dtype: torch.dtype,
        quantization: Quantization,
        rank: int,
        ranks: int,
        report: Progress,
    ) -> Weights:
        """The weights of `source` for one of `ranks` ranks; only headers are read here. Raises ConfigError."""
        store: TensorStore
        form = None if source.kind == "gguf" else stored_format(source.path)
        if source.kind == "gguf":
            store = GGUFStore(source.path, config.head_dim)
        elif form is None:
            store = SafetensorsStore(source.path, integers=False)
        elif form.layout == "sparse24":
            store = SparseStore(source.path)
        elif quantization in ("none", form.quantization):
            store = QuantizedStore(source.path, form)
        else:
            raise ConfigError(
                f"model.quantization: {quantization}, but {source.path} is quantised as {form.quantization} already; "
                f"use none or {form.quantization}"
            )
        sparse = source.kind == "huggingface" and declares_sparsity(source.path)
        return Weights(config, store, Shard.of(config, rank, ranks), dtype, quantization, sparse, report)

    @property
    def fingerprint(self) -> str:
        """Of the whole model, whatever the tensor parallelism: settings, names, shapes and samples of the bytes."""
        digest = hashlib.blake2b(self._quantization.encode(), digest_size=16)
        digest.update(json.dumps(dataclasses.asdict(self.config), sort_keys=True).encode())
        for name in sorted(expected(self.config)):
            tensor = self._store.tensors[name]
            digest.update(f"{name} {tensor.shape} {tensor.kind}\n".encode())
            with tensor.file.open("rb") as file:
                for quarter in range(5):
                    file.seek(tensor.offset + max(0, tensor.size - 256) * quarter // 4)
                    digest.update(file.read(min(256, tensor.size)))
        return digest.hexdigest()

    def memory_plan(self) -> MemoryPlan:
        """What loading will take, before anything is loaded. Packed bfloat16 heads cost a second copy when tied."""
        config, shard = self.config, self.shard
        unit = self.dtype.itemsize
        vocab = (shard.vocab[1] - shard.vocab[0]) * config.hidden * unit
        qkv, others = self._layer_elements()
        layer = (qkv + others) * unit
        copies = 1 if config.tied and self.dtype == torch.float32 else 2
        resident = copies * vocab + config.layers * layer
        if self._quantization != "none":
            head = vocab // unit if HEAD_SCHEMES[self._quantization] == "w8a8" else vocab
            packed = qkv * BYTES.get(QKV_SCHEMES[self._quantization], unit) + others * BYTES[self._quantization]
            resident = vocab + head + int(config.layers * packed)
        mlp = 2 * (shard.mlp[1] - shard.mlp[0]) * config.hidden * unit
        packing = PROBE_BYTES + 3 * mlp if self.dtype == torch.bfloat16 else 0
        loose = max(layer, 0 if config.tied else vocab)  # read, and not yet packed
        return MemoryPlan(resident, resident + loose + packing + 8 * _CHUNK_BYTES)

    def _layer_elements(self) -> tuple[int, int]:
        """Of queries, keys and values, and of everything else in a layer."""
        config, shard = self.config, self.shard
        query, kv = (stop - start for start, stop in (shard.query_heads, shard.kv_heads))
        mlp = shard.mlp[1] - shard.mlp[0]
        others = query * config.head_dim + 3 * mlp + 2
        return config.hidden * (query + 2 * kv) * config.head_dim, config.hidden * others

    def embedding(self) -> Tensor:
        """[the rank's vocabulary, hidden]."""
        return self._rows(EMBEDDING, self.shard.vocab)

    def final_norm(self) -> Tensor:
        """[hidden]."""
        return self._vector(NORM, None)

    def head(self) -> Tensor | None:
        """[the rank's vocabulary, hidden], or None when the embedding serves as head."""
        return None if self.config.tied else self._rows(HEAD, self.shard.vocab)

    def layer(self, index: int) -> LayerWeights:
        """The tensors of layer `index`."""
        config, shard, prefix = self.config, self.shard, f"model.layers.{index}."
        dim = config.head_dim
        query = (shard.query_heads[0] * dim, shard.query_heads[1] * dim)
        kv = (shard.kv_heads[0] * dim, shard.kv_heads[1] * dim)
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = [(attention + "q_proj", query), (attention + "k_proj", kv), (attention + "v_proj", kv)]
        gate_up = [(mlp + "gate_proj", shard.mlp), (mlp + "up_proj", shard.mlp)]
        hidden, leading = (0, config.hidden), shard.rank == 0
        return LayerWeights(
            attention_norm=self._vector(prefix + "input_layernorm.weight", None),
            qkv=self._linear(qkv, hidden, QKV_SCHEMES[self._quantization]),
            qkv_bias=self._fused_bias(qkv) if config.attention_bias else None,
            query_norm=self._vector(attention + "q_norm.weight", None) if config.qk_norm else None,
            key_norm=self._vector(attention + "k_norm.weight", None) if config.qk_norm else None,
            output=self._linear([(attention + "o_proj", hidden)], query, self._quantization),
            output_bias=self._vector(attention + "o_proj.bias", None) if config.output_bias and leading else None,
            mlp_norm=self._vector(prefix + "post_attention_layernorm.weight", None),
            gate_up=self._linear(gate_up, hidden, self._quantization),
            gate_up_bias=self._fused_bias(gate_up) if config.mlp_bias else None,
            down=self._linear([(mlp + "down_proj", hidden)], shard.mlp, self._quantization),
            down_bias=self._vector(mlp + "down_proj.bias", None) if config.mlp_bias and leading else None,
        )

    def _linear(self, parts: Sequence[tuple[str, Range]], columns: Range, scheme: Quantization) -> Weight:
        """The outputs of all parts with the inputs `columns`, as the engine computes with them."""
        if not any(self._keeps(name, columns) for name, _ in parts):
            return quantize(self._plain(parts, columns), scheme)
        return join([self._part(name, rows, columns, scheme) for name, rows in parts])

    def _part(self, name: str, rows: Range, columns: Range, scheme: Quantization) -> Weight:
        if not self._keeps(name, columns):
            return quantize(self._plain([(name, rows)], columns), scheme)
        tensor = self._store.tensors[f"{name}.weight"]
        self._advance((rows[1] - rows[0]) * tensor.row_bytes)
        return self._store.read_quantized(f"{name}.weight", *rows).columns(*columns)

    def _keeps(self, name: str, columns: Range) -> bool:
        """Whether the weight stays in the bits that the checkpoint has it in. Never in float32: that is for oracles."""
        group = self._store.quantized_group(f"{name}.weight", self._quantization)
        width = self._store.tensors[f"{name}.weight"].shape[1]
        whole = group > 0 and all(edge % group == 0 or edge == width for edge in columns)
        return whole and self.dtype == torch.bfloat16

    def _plain(self, parts: Sequence[tuple[str, Range]], columns: Range) -> Tensor:
        total = sum(stop - start for _, (start, stop) in parts)
        out = torch.empty(total, columns[1] - columns[0], dtype=self.dtype)
        at = 0
        for name, rows in parts:
            size = rows[1] - rows[0]
            self._fill(out[at : at + size], f"{name}.weight", rows, columns)
            at += size
        return out

    def _fused_bias(self, parts: Sequence[tuple[str, Range]]) -> Tensor:
        return torch.cat([self._vector(f"{name}.bias", rows) for name, rows in parts])

    def _rows(self, name: str, rows: Range) -> Tensor:
        out = torch.empty(rows[1] - rows[0], self.config.hidden, dtype=self.dtype)
        self._fill(out, name, rows, (0, self.config.hidden))
        return out

    def _vector(self, name: str, rows: Range | None) -> Tensor:
        tensor = self._store.tensors[name]
        start, stop = rows or (0, tensor.shape[0])
        self._advance((stop - start) * tensor.row_bytes)
        return self._store.read(name, start, stop).to(self.dtype)

    def _fill(self, out: Tensor, name: str, rows: Range, columns: Range) -> None:
        """Convert in pieces of whole heads, so that no float32 copy of a large tensor is ever made."""
        tensor = self._store.tensors[name]
        dim = self.config.head_dim
        step = max(1, _CHUNK_BYTES // (4 * tensor.shape[1] * dim)) * dim
        for start in range(rows[0], rows[1], step):
            stop = min(start + step, rows[1])
            piece = self._store.read(name, start, stop)
            out[start - rows[0] : stop - rows[0]].copy_(piece[:, columns[0] : columns[1]])
            self._advance((stop - start) * tensor.row_bytes)

    def _advance(self, size: int) -> None:
        self._done += size
        self._report(self._done, self._total)


def _file_bytes(config: ModelConfig, store: TensorStore, shard: Shard) -> int:
    """Bytes of the files that one rank reads, as `Weights._advance` counts them."""
    heads = {"q_proj": (shard.query_heads, config.head_dim), "k_proj": (shard.kv_heads, config.head_dim)}
    heads["v_proj"] = heads["k_proj"]
    total = 0
    for name in expected(config):
        tensor = store.tensors[name]
        part = name.split(".")[-2]
        rows = tensor.shape[0]
        if part in heads:
            (start, stop), dim = heads[part]
            rows = (stop - start) * dim
        elif part in ("gate_proj", "up_proj"):
            rows = shard.mlp[1] - shard.mlp[0]
        elif name in (EMBEDDING, HEAD):
            rows = shard.vocab[1] - shard.vocab[0]
        elif name.endswith(("o_proj.bias", "down_proj.bias")) and shard.rank:
            rows = 0
        total += rows * tensor.row_bytes
    return total
