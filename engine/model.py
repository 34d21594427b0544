"""The decoder of one rank on a CPU: embed, then for each layer attend and transform, then logits.

Tensor parallel ranks own whole KV heads with their query heads, columns of the MLP and rows of the vocabulary; partial
sums meet in `RankGroup.all_reduce` after each attention and each MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import cpu_attention, decoder_layer
from ..kernels.decoder_layer import DecoderLayer, NativeDecoder, StepInputs
from ..kernels.linear import Linear
from ..kernels.paged_attention import PagedAttention
from ..kernels.rms_norm import add_rms_norm, norm_heads, rms_norm
from ..kernels.rotary import Rotation, angles
from ..kernels.silu_mul import silu_mul
from .batch import BatchTensors
from .linear import Packing, padded_rows
from .model_config import ModelConfig
from .paged_kv import PagedKV
from .params import EngineParams
from .quantized import HEAD_SCHEMES, Weight, quantize
from .ranks import RankGroup
from .rope import inverse_frequencies
from .sparse24 import SparseLinears
from .step import OnLayers
from .weights import LayerWeights, Weights

_SLAB_BYTES = 24 << 20  # of one MLP activation: larger tensors would be mapped anew, page by page, in every step


@dataclass(frozen=True, slots=True)
class _Step:
    """What the layers of one step share."""

    batch: BatchTensors
    rotation: Rotation
    plan: cpu_attention.AttentionPlan


class Model:
    """A model's share on one rank. Call torch.set_num_threads before: bits are verified for the threads at hand."""

    def __init__(self, config: ModelConfig, shard: Weights, params: EngineParams, group: RankGroup) -> None:
        """Reads and packs the weights, layer by layer."""
        self._config = config
        self._group = group
        self._layer_group = params.layer_group
        self._owned = shard.shard
        self._packing = Packing(params.batch_invariant)
        self._sparse = SparseLinears(params.sparsity, shard.sparse, "a CPU has no sparse products")
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._embedding = shard.embedding()
        self._layers = [self._prepare(shard.layer(index)) for index in range(config.layers)]
        self._sparse.report()
        self._norm = shard.final_norm()
        head = shard.head()
        head = self._embedding if head is None else head
        self._head = self._packing.head(quantize(head, HEAD_SCHEMES[params.quantization]))
        self._native = self._native_decoder()
        self._padded = self._packing.pads(shard.dtype)

    def _prepare(self, weights: LayerWeights) -> DecoderLayer:
        def linear(weight: Weight, bias: Tensor | None) -> Linear:
            return self._sparse.linear(weight, bias) or self._packing.linear(weight, bias)

        return DecoderLayer(
            attention_norm=weights.attention_norm,
            qkv=linear(weights.qkv, weights.qkv_bias),
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            output=linear(weights.output, weights.output_bias),
            mlp_norm=weights.mlp_norm,
            gate_up=linear(weights.gate_up, weights.gate_up_bias),
            down=linear(weights.down, weights.down_bias),
        )

    def _native_decoder(self) -> NativeDecoder | None:
        """All layers by C, where they are for it and nothing is summed over ranks between them."""
        if self._group.size > 1 or not decoder_layer.runs(self._layers, self._norm):
            return None
        heads = (self._config.heads, self._config.kv_heads, self._config.head_dim)
        return NativeDecoder(self._layers, self._norm, heads, self._config.rms_eps, self._slab())

    @torch.no_grad()
    def forward(self, batch: BatchTensors, kv: PagedKV, on_layers: OnLayers | None) -> Tensor:
        """Run T tokens: their KV goes into the pool, the logits of `batch.logit_rows` come back.

        Returns [R, vocabulary] of the model's dtype on rank 0, and [0, 0] on other ranks. `on_layers(lo, hi)` is called
        once the KV of layers [lo, hi) of all tokens is in the pool; None where nobody waits for it.
        """
        if self._native is None:
            return self._head_logits(self._run_layers(batch, kv, on_layers))
        return self._head_logits(self._run_native(self._native, batch, kv, on_layers))

    def _run_native(
        self, native: NativeDecoder, batch: BatchTensors, kv: PagedKV, on_layers: OnLayers | None
    ) -> Tensor:
        """What `_run_layers` does, by C: one call for each group of layers that is announced, else one for all."""
        torch.index_select(self._embedding, 0, batch.token_ids, out=native.hidden(len(batch.token_ids)))
        plan = PagedAttention(batch.cu_seqlens, batch.context_lens, batch.block_tables, kv.key(0))
        native.start(StepInputs(plan, *self._angles(batch), batch.slots, kv.data, batch.logit_rows))
        layers, wanted = len(self._layers), len(batch.logit_rows) > 0
        if on_layers is None:
            native.run(0, layers, finish=wanted)
            return native.normed()
        for first, last in pairwise([*range(0, layers, self._layer_group), layers]):
            native.run(first, last, finish=False)
            on_layers(first, last)
        if wanted:
            native.run(layers, layers, finish=True)
        return native.normed()

    def _run_layers(self, batch: BatchTensors, kv: PagedKV, on_layers: OnLayers | None) -> Tensor:
        """[R, hidden]: the rows that are asked for, under the final norm."""
        hidden = self._embed(batch.token_ids)
        step = self._prepare_step(batch, kv)
        normed = rms_norm(hidden, self._layers[0].attention_norm, self._config.rms_eps)
        announced, last = 0, len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            query = self._project(layer, normed, step, kv, index)
            if index + 1 - announced == self._layer_group or index == last:
                if on_layers is not None:
                    on_layers(announced, index + 1)
                announced = index + 1
            if index == last and not len(batch.logit_rows):
                return normed[:0]
            attended = self._attend(query, step, kv, index, hidden.shape[0])
            if index == last:  # from here on only for the rows that are asked for
                hidden, attended = self._pick(hidden, batch.logit_rows), self._pick(attended, batch.logit_rows)
            normed = self._add_norm(hidden, layer.output(attended), layer.mlp_norm)
            following = self._norm if index == last else self._layers[index + 1].attention_norm
            normed = self._add_norm(hidden, self._mlp(layer, normed), following)
        return normed[: len(batch.logit_rows)]

    def _prepare_step(self, batch: BatchTensors, kv: PagedKV) -> _Step:
        cos, sin = self._angles(batch)
        plan = cpu_attention.plan_attention(batch.cu_seqlens, batch.context_lens, batch.block_tables, kv.key(0))
        return _Step(batch, Rotation(cos, sin, batch.slots, kv.key(0)), plan)

    def _angles(self, batch: BatchTensors) -> tuple[Tensor, Tensor]:
        factor = self._config.rope.attention_factor
        return angles(batch.positions, self._frequencies, factor, self._embedding.dtype)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[rows, hidden]: the tokens, and zero rows up to a count that the linears take as it is."""
        extra = padded_rows(len(token_ids)) - len(token_ids) if self._padded else 0
        if self._group.size == 1:
            return F.pad(F.embedding(token_ids, self._embedding), (0, 0, 0, extra))
        start, stop = self._owned.vocab
        elsewhere = (token_ids < start) | (token_ids >= stop)
        rows = F.embedding((token_ids - start).masked_fill(elsewhere, 0), self._embedding)
        hidden = F.pad(rows.masked_fill_(elsewhere[:, None], 0), (0, 0, 0, extra))
        self._group.all_reduce(hidden)
        return hidden

    def _pick(self, rows: Tensor, indices: Tensor) -> Tensor:
        """Some rows, and zero rows up to a count that the linears take as it is."""
        extra = padded_rows(len(indices)) - len(indices) if self._padded else 0
        return F.pad(rows[indices], (0, 0, 0, extra))

    def _project(self, layer: DecoderLayer, normed: Tensor, step: _Step, kv: PagedKV, index: int) -> Tensor:
        """Queries [T, local heads, D], rotated; keys and values go into the pool."""
        dim = self._config.head_dim
        queries = self._owned.query_heads[1] - self._owned.query_heads[0]
        keys = self._owned.kv_heads[1] - self._owned.kv_heads[0]
        heads = layer.qkv(normed)[: len(step.batch.token_ids)].view(-1, queries + 2 * keys, dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            heads = norm_heads(heads, layer.query_norm, layer.key_norm, queries, keys, self._config.rms_eps)
        return step.rotation.apply(heads, kv.key(index), kv.value(index))

    def _attend(self, query: Tensor, step: _Step, kv: PagedKV, index: int, rows: int) -> Tensor:
        """[rows, local heads * D]; rows beyond the tokens are zero."""
        tokens, heads, dim = query.shape
        scale = dim**-0.5
        out = query.new_empty(rows, heads, dim)
        if rows > tokens:
            out[tokens:].zero_()
        step.plan.attend(query, kv.key(index), kv.value(index), scale, out[:tokens])
        return out.view(rows, heads * dim)

    def _slab(self) -> int:
        """Rows of an MLP at a time."""
        width = 2 * (self._owned.mlp[1] - self._owned.mlp[0]) * self._embedding.element_size()
        return max(512, _SLAB_BYTES // width // 512 * 512)

    def _mlp(self, layer: DecoderLayer, normed: Tensor) -> Tensor:
        slab = self._slab()
        if len(normed) <= slab:
            return layer.down(silu_mul(layer.gate_up(normed)))
        return torch.cat([layer.down(silu_mul(layer.gate_up(part))) for part in torch.split(normed, slab)])

    def _add_norm(self, hidden: Tensor, part: Tensor, weight: Tensor) -> Tensor:
        """Adds the sum of all ranks' parts to the residual stream `hidden`, and returns its norm."""
        self._group.all_reduce(part)
        return add_rms_norm(hidden, part, weight, self._config.rms_eps)

    def _head_logits(self, last: Tensor) -> Tensor:
        """Logits of normed rows [R, hidden]; see `forward`."""
        rows = len(last)
        local = self._head(last) if rows else last.new_empty(0, self._owned.vocab[1] - self._owned.vocab[0])
        return self._group.gather_columns(local, self._owned.vocab_widths)
