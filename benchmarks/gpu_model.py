"""A model of random weights on the device, in a runner that is otherwise the engine's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from baton.engine.device_edge import Edge
from baton.engine.device_kv import DeviceKV
from baton.engine.device_model import DeviceModel
from baton.engine.device_runner import DeviceRunner
from baton.engine.guide import Guide
from baton.engine.model_config import ModelConfig
from baton.engine.params import EngineParams
from baton.engine.ranks import SingleRank
from baton.engine.rope import RopeConfig
from baton.engine.weights import LayerWeights, Shard
from baton.proto.kv_layout import KVLayout
from baton.text.grammar import Vocabulary
from torch import Tensor

from .gpu_setup import Setup, Shape


class RandomWeights:
    """What a model asks of `Weights`. The same seed gives the same weights."""

    sparse = False

    def __init__(self, shape: Shape, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype = dtype
        self.shard = Shard.of(config, 0, 1)
        self.elements = 0  # of the weights that a step of one token reads
        self._shape = shape
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device

    def embedding(self) -> Tensor:
        """[vocabulary, hidden]"""
        return self._random(self._shape.vocab, self._shape.hidden)

    def head(self) -> Tensor:
        """[vocabulary, hidden]"""
        self.elements += self._shape.vocab * self._shape.hidden
        return self._random(self._shape.vocab, self._shape.hidden)

    def final_norm(self) -> Tensor:
        """[hidden]"""
        return torch.ones(self._shape.hidden, dtype=self.dtype, device=self._device)

    def layer(self, index: int) -> LayerWeights:
        """One of them; all alike."""
        shape = self._shape
        attention = shape.heads * shape.head_dim
        linears = {
            "qkv": (attention + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
            "output": (shape.hidden, attention),
            "gate_up": (2 * shape.intermediate, shape.hidden),
            "down": (shape.hidden, shape.intermediate),
        }
        self.elements += sum(rows * columns for rows, columns in linears.values())
        parts: dict[str, Any] = {name: self._random(*size) for name, size in linears.items()}
        parts |= {name: self.final_norm() for name in ("attention_norm", "mlp_norm")}
        parts |= dict.fromkeys(("qkv_bias", "query_norm", "key_norm", "output_bias", "gate_up_bias", "down_bias"))
        return LayerWeights(**parts)

    def _random(self, rows: int, columns: int) -> Tensor:
        """Of a size that keeps activations about 1."""
        wide = torch.empty(rows, columns, dtype=self.dtype, device=self._device)
        return wide.normal_(0.0, columns**-0.5, generator=self._generator)


class RandomRunner(DeviceRunner):
    """`weight_bytes`: what a step of one token reads of them."""

    def __init__(self, at: Setup, blocks: int, longest: int, seed: int = 1, layer_group: int = 8) -> None:
        shape = at.sizes.model
        self.config = _config(shape, longest)
        self.max_model_len = longest
        dtype = str(at.model_dtype).removeprefix("torch.")
        self.layout = KVLayout(
            f"random {seed}", shape.layers, shape.kv_heads, shape.head_dim, "default", dtype, 16, ((0, shape.kv_heads),)
        )
        self.blocks = blocks
        self._edge: Edge = at.edge
        self.guide = Guide(_no_vocabulary)
        self._broadcast: Callable[[bytes], None] | None = None
        self.kv: DeviceKV = self._make_pool(0)
        weights: Any = RandomWeights(shape, self.config, at.model_dtype, at.device, seed)
        with torch.inference_mode():
            params = _params(dtype, layer_group)
            self.model = DeviceModel(self.config, weights, params, SingleRank(), at.edge, longest)
        self._start(self.model, SingleRank())
        self.weights = weights.elements
        self.weight_bytes = weights.elements * at.model_dtype.itemsize


def _no_vocabulary() -> Vocabulary:
    raise RuntimeError("random weights have no vocabulary")


def _config(shape: Shape, longest: int) -> ModelConfig:
    return ModelConfig(
        arch="llama",
        vocab_size=shape.vocab,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_eps=1e-5,
        rope=RopeConfig("default", 500000.0, 1.0, 0, 1.0, 1.0, 32.0, 1.0, True, 1.0, ()),
        tied=False,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        max_positions=longest,
    )


def _params(dtype: str, layer_group: int) -> EngineParams:
    return EngineParams(
        model_path="random",
        dtype=dtype,
        quantization="none",
        sparsity="none",
        device="cuda",
        threads=1,
        block_size=16,
        kv_blocks=None,
        kv_bytes=0,
        kv_dtype="auto",
        max_model_len=None,
        batch_invariant=False,
        prefix_cache=False,
        layer_group=layer_group,
        tensor_parallel=1,
    )
