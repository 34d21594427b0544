"""The decoder of one rank on a GPU, from the kernels of kernels/gpu: the arithmetic of model.py.

Everything is queued and nothing waits for the device: shapes come from the host, lengths and tables are read by the
kernels. With one token a sequence (or some, each seen as a sequence of its own) attention is `paged_decode`, else
`paged_prefill`; the first has only inputs that stay where they are, so that a step can be captured as a graph.

Linear layers are cuBLAS's for plain weights, and Triton's for int8 and 4-bit ones. Sums over ranks are NCCL's, on its
own stream: the step's stream waits there, the host does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.linear import Linear
from ..kernels.rotary import angles
from .device_edge import Edge
from .device_kv import DeviceKV
from .model_config import ModelConfig
from .params import EngineParams
from .quantized import HEAD_SCHEMES, Int4Weight, Int8Weight, Weight, quantize
from .ranks import RankGroup
from .rope import inverse_frequencies
from .sparse24 import SparseLinears, sparse_products
from .weights import LayerWeights, Weights

OnQueued = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """S sequences with T tokens, on the device. With `offsets` None sequence i is row i alone (T = S)."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: block * block_size + offset; -1: a row of padding
    context_lens: Tensor  # int32 [S], new tokens included; 0: padding
    tables: Tensor  # int32 [S, most blocks]
    longest: int  # at least the longest context
    offsets: Tensor | None = None  # int32 [S + 1]
    logit_rows: Tensor | None = None  # int64 [R]; None: every row


@dataclass(frozen=True, slots=True)
class _Layer:
    """Callables on the device."""

    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class DeviceModel:
    """A model's share on one rank; reads the weights layer by layer. `positions`: the longest context."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Weights,
        params: EngineParams,
        group: RankGroup,
        edge: Edge,
        positions: int,
    ) -> None:
        self._config = config
        self._group = group
        self._device = edge.device
        self._layer_group = params.layer_group
        self._invariant = params.batch_invariant
        self._owned = shard.shard
        self._sparse = SparseLinears(params.sparsity, shard.sparse, sparse_products(self._device))
        self._embedding = shard.embedding().to(self._device)
        self._layers = [self._prepare(shard.layer(index)) for index in range(config.layers)]
        self._sparse.report()
        self._norm = shard.final_norm().to(self._device)
        head = shard.head()
        head = self._embedding if head is None else head
        self._head = self._linear(quantize(head, HEAD_SCHEMES[params.quantization]), None)
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        turned = angles(torch.arange(positions), frequencies, config.rope.attention_factor, shard.dtype)
        self._cos, self._sin = (table.to(self._device) for table in turned)

    def _prepare(self, weights: LayerWeights) -> _Layer:
        def vector(weight: Tensor | None) -> Tensor | None:
            return None if weight is None else weight.to(self._device)

        return _Layer(
            attention_norm=weights.attention_norm.to(self._device),
            qkv=self._linear(weights.qkv, weights.qkv_bias),
            query_norm=vector(weights.query_norm),
            key_norm=vector(weights.key_norm),
            output=self._linear(weights.output, weights.output_bias),
            mlp_norm=weights.mlp_norm.to(self._device),
            gate_up=self._linear(weights.gate_up, weights.gate_up_bias),
            down=self._linear(weights.down, weights.down_bias),
        )

    def _linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        bias = None if bias is None else bias.to(self._device)
        if isinstance(weight, Tensor):
            placed = weight.to(self._device)
            return self._sparse.linear(placed, bias) or (lambda rows: F.linear(rows, placed, bias))
        return coded_linear(weight, bias, self._device, self._invariant)

    @property
    def layers(self) -> int:
        """How many."""
        return len(self._layers)

    def forward(self, batch: DeviceBatch, kv: DeviceKV, on_queued: OnQueued | None) -> Tensor:
        """Queue a step; the logits [R, this rank's vocabulary] of the model's dtype.

        `on_queued(lo, hi)`: all that writes the KV of layers [lo, hi) is queued.
        """
        hidden, turned, announced = self.embed(batch.token_ids), self.turned(batch.positions), 0
        attended, normed = hidden, self.first_norm(hidden)
        for index in range(self.layers):
            query = self.project(index, normed, turned, batch.slots, kv)
            if self.ends_group(index):
                if on_queued is not None:
                    on_queued(announced, index + 1)
                announced = index + 1
            if self.is_over(index, batch):
                break
            attended = self.attend(index, query, batch, kv)
            if index + 1 < self.layers:
                normed = self.behind(index, hidden, attended)
        return self.finish(hidden, attended, batch)

    def ends_group(self, index: int) -> bool:
        """Whether the KV of this layer is announced, with that of the layers before it."""
        return (index + 1) % self._layer_group == 0 or index + 1 == self.layers

    def is_over(self, index: int, batch: DeviceBatch) -> bool:
        """Whether only the KV up to this layer was wanted: it is the last one, and no logits are."""
        return index + 1 == self.layers and batch.logit_rows is not None and not len(batch.logit_rows)

    def finish(self, hidden: Tensor, attended: Tensor, batch: DeviceBatch) -> Tensor:
        """The logits, from what stands before and behind the last attention; for the rows that are asked for alone."""
        if batch.logit_rows is not None:
            if not len(batch.logit_rows):
                return hidden.new_empty(0, self._owned.vocab[1] - self._owned.vocab[0])
            hidden, attended = hidden[batch.logit_rows], attended[batch.logit_rows]
        return self._head(self.behind(self.layers - 1, hidden, attended))

    def new_buffers(self, rows: int) -> tuple[Tensor, Tensor]:
        """For the residual stream [rows, hidden] and for queries [rows, local heads, D]."""
        heads = self._owned.query_heads[1] - self._owned.query_heads[0]
        hidden = self._norm.new_zeros(rows, self._config.hidden)
        return hidden, hidden.new_zeros(rows, heads, self._config.head_dim)

    def turned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [T, 1, D / 2] each."""
        return self._cos[positions], self._sin[positions]

    def first_norm(self, hidden: Tensor) -> Tensor:
        """What the first layer takes."""
        from ..kernels.gpu.rms_norm import rms_norm

        return rms_norm(hidden, self._layers[0].attention_norm, self._config.rms_eps)

    def behind(self, index: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer behind its attention [T, local heads * D]: `hidden` is brought up to date, and what the
        next layer or the head takes is the result."""
        layer, last = self._layers[index], index + 1 == self.layers
        normed = self._add_norm(hidden, layer.output(attended), layer.mlp_norm)
        following = self._norm if last else self._layers[index + 1].attention_norm
        return self._add_norm(hidden, self._mlp(layer, normed), following)

    def gather_logits(self, local: Tensor) -> Tensor:
        """[R, vocabulary] on rank 0, [0, 0] on the others."""
        return self._group.gather_columns(local, self._owned.vocab_widths)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T, hidden]"""
        if self._group.size == 1:
            return F.embedding(token_ids, self._embedding)
        start, stop = self._owned.vocab
        elsewhere = (token_ids < start) | (token_ids >= stop)
        hidden = F.embedding((token_ids - start).masked_fill(elsewhere, 0), self._embedding)
        hidden = hidden.masked_fill_(elsewhere[:, None], 0)
        self._group.all_reduce(hidden)
        return hidden

    def project(self, index: int, normed: Tensor, turned: tuple[Tensor, Tensor], slots: Tensor, kv: DeviceKV) -> Tensor:
        """Queries [T, local heads, D], rotated; keys and values go into the pool."""
        from ..kernels.gpu.rms_norm import rms_norm
        from ..kernels.gpu.rotary import rotate_into_pages

        layer = self._layers[index]
        queries = self._owned.query_heads[1] - self._owned.query_heads[0]
        keys = self._owned.kv_heads[1] - self._owned.kv_heads[0]
        heads = layer.qkv(normed).view(-1, queries + 2 * keys, self._config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            for low, high, weight in ((0, queries, layer.query_norm), (queries, queries + keys, layer.key_norm)):
                part = heads[:, low:high]
                part.copy_(rms_norm(part, weight, self._config.rms_eps))
        return rotate_into_pages(heads, *turned, slots, kv.key(index), kv.value(index), kv.scales(index))

    def attend(self, index: int, query: Tensor, batch: DeviceBatch, kv: DeviceKV) -> Tensor:
        """[T, local heads * D]."""
        from ..kernels.gpu.paged_decode import paged_decode
        from ..kernels.gpu.paged_prefill import paged_prefill

        scale, scales = self._config.head_dim**-0.5, kv.scales(index)
        pools = (kv.key(index), kv.value(index))
        if batch.offsets is None:
            out = paged_decode(query, *pools, batch.tables, batch.context_lens, batch.longest, scale, scales)
        else:
            out = paged_prefill(query, *pools, batch.tables, batch.offsets, batch.context_lens, scale, scales)
        return out.flatten(1)

    def _mlp(self, layer: _Layer, normed: Tensor) -> Tensor:
        from ..kernels.gpu.silu_mul import silu_mul

        return layer.down(silu_mul(layer.gate_up(normed)))

    def _add_norm(self, hidden: Tensor, part: Tensor, weight: Tensor) -> Tensor:
        """Adds the sum of all ranks' parts to the residual stream `hidden`, and returns its norm."""
        from ..kernels.gpu.rms_norm import add_rms_norm

        self._group.all_reduce(part)
        return add_rms_norm(hidden, part, weight, self._config.rms_eps)


def coded_linear(weight: Int8Weight | Int4Weight, bias: Tensor | None, device: torch.device, invariant: bool) -> Linear:
    """Weights in codes times rows of floats: activations are not quantised, unlike on a CPU."""
    from ..kernels.gpu.linear import int4_linear, int8_linear, pack_int4

    scales = weight.scales.t().contiguous().to(device)
    if isinstance(weight, Int8Weight):
        codes, wide = weight.codes.contiguous().to(device), scales.float()
        return lambda rows: int8_linear(rows, codes, wide, bias, invariant)
    packed = pack_int4(weight.codes).to(device)
    minima = None if weight.minima is None else weight.minima.t().contiguous().to(device)
    return lambda rows: int4_linear(rows, packed, scales, minima, bias, invariant)
