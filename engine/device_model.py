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
from .sparse24 import SparseLinears
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
        self._sparse = SparseLinears(params.sparsity, shard.sparse, self._device)
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

    def forward(self, batch: DeviceBatch, kv: DeviceKV, on_queued: OnQueued | None) -> Tensor:
        """Queue a step; the logits [R, this rank's vocabulary] of the model's dtype.

        `on_queued(lo, hi)`: all that writes the KV of layers [lo, hi) is queued.
        """
        from ..kernels.gpu.rms_norm import rms_norm

        hidden = self._embed(batch.token_ids)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        normed = rms_norm(hidden, self._layers[0].attention_norm, self._config.rms_eps)
        announced, last = 0, len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            query = self._project(layer, normed, cos, sin, batch.slots, kv, index)
            if index + 1 - announced == self._layer_group or index == last:
                if on_queued is not None:
                    on_queued(announced, index + 1)
                announced = index + 1
            if index == last and batch.logit_rows is not None and not len(batch.logit_rows):
                return hidden.new_empty(0, self._owned.vocab[1] - self._owned.vocab[0])
            attended = self._attend(query, batch, kv, index)
            if index == last and batch.logit_rows is not None:  # from here on only for the rows that are asked for
                hidden, attended = hidden[batch.logit_rows], attended[batch.logit_rows]
            normed = self._add_norm(hidden, layer.output(attended), layer.mlp_norm)
            following = self._norm if index == last else self._layers[index + 1].attention_norm
            normed = self._add_norm(hidden, self._mlp(layer, normed), following)
        return self._head(normed)

    def gather_logits(self, local: Tensor) -> Tensor:
        """[R, vocabulary] on rank 0, [0, 0] on the others."""
        return self._group.gather_columns(local, self._owned.vocab_widths)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return F.embedding(token_ids, self._embedding)
        start, stop = self._owned.vocab
        elsewhere = (token_ids < start) | (token_ids >= stop)
        hidden = F.embedding((token_ids - start).masked_fill(elsewhere, 0), self._embedding)
        hidden = hidden.masked_fill_(elsewhere[:, None], 0)
        self._group.all_reduce(hidden)
        return hidden

    def _project(
        self, layer: _Layer, normed: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: DeviceKV, index: int
    ) -> Tensor:
        """Queries [T, local heads, D], rotated; keys and values go into the pool."""
        from ..kernels.gpu.rms_norm import rms_norm
        from ..kernels.gpu.rotary import rotate_into_pages

        queries = self._owned.query_heads[1] - self._owned.query_heads[0]
        keys = self._owned.kv_heads[1] - self._owned.kv_heads[0]
        heads = layer.qkv(normed).view(-1, queries + 2 * keys, self._config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            for low, high, weight in ((0, queries, layer.query_norm), (queries, queries + keys, layer.key_norm)):
                part = heads[:, low:high]
                part.copy_(rms_norm(part, weight, self._config.rms_eps))
        return rotate_into_pages(heads, cos, sin, slots, kv.key(index), kv.value(index), kv.scales(index))

    def _attend(self, query: Tensor, batch: DeviceBatch, kv: DeviceKV, index: int) -> Tensor:
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
