"""The layers of a decoder by C, a step or a group of layers in one call (c/decoder_layer.c).

It makes the calls that engine/model.py makes one by one where this does not run, so the bits are the same. What a layer
hands on to the next stays in memory that is taken once; the threads of a step are woken once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .linear import Linear, NativeLinear
from .memory import prefer_huge_pages
from .native import BEST, library
from .paged_attention import PagedAttention

_KINDS = {"bf16": 0, "int8": 1, "int4": 2}  # as c/decoder_layer.h counts them
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer, ready to run."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear  # to query heads, key heads, value heads
    query_norm: Tensor | None  # [head_dim]; both or none
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear
    down: Linear


class _Product(ctypes.Structure):
    _fields_ = (("linear", ctypes.c_void_p), ("kind", ctypes.c_int64))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _Product) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("final_norm", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layer_count", "hidden", "query_heads", "kv_heads", "head_dim", "mlp")),
        ("slab", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("decoder", "attention", "cos", "sin", "slots", "pool")),
        *((name, ctypes.c_int64) for name in ("layer_bytes", "value_bytes")),
        ("picked", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("tokens", "picked_count")),
        *((name, ctypes.c_void_p) for name in ("hidden", "normed", "scratch")),
        *((name, ctypes.c_int64) for name in ("threads", "level")),
    )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the layers of one step share: T tokens, R rows that are asked for."""

    plan: PagedAttention
    cos: Tensor  # bfloat16 [T, 1, head_dim / 2]
    sin: Tensor
    slots: Tensor  # int64 [T]: block * block_size + offset, in the pool: nothing here checks them
    pool: Tensor  # [layers, 2, blocks, kv_heads, block_size, row]
    picked: Tensor  # int64 [R], ascending rows of the T


class NativeDecoder:
    """All layers of a rank that has whole ones: it has nobody to sum with. One step at a time."""

    def __init__(
        self, layers: Sequence[DecoderLayer], final_norm: Tensor, heads: tuple[int, int, int], eps: float, slab: int
    ) -> None:
        """`heads`: query heads, KV heads, head_dim; `slab`: rows of an MLP at a time. See `runs`."""
        native = library()
        if native is None or not runs(layers, final_norm):
            raise ValueError("these layers are not for the C kernels")
        self._keep = (layers, final_norm)
        table = (_Layer * len(layers))(*map(_describe, layers))
        self._hidden, mlp = len(final_norm), _native(layers[0].down).inputs
        shape = (len(layers), self._hidden, *heads, mlp, slab)
        self._decoder = _Decoder(table, final_norm.data_ptr(), *shape, eps)
        self._heads, self._scale = heads, heads[2] ** -0.5
        self._step = _Step(decoder=ctypes.addressof(self._decoder), level=BEST)
        self._run, self._scratch_bytes = native.baton_run_layers, native.baton_decoder_scratch
        self._run.argtypes, self._run.restype = [ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_int], ctypes.c_int
        self._scratch_bytes.argtypes, self._scratch_bytes.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
        self._inputs: StepInputs | None = None
        self._rows = torch.empty(2, 0, self._hidden, dtype=torch.bfloat16)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def hidden(self, tokens: int) -> Tensor:
        """Where the embeddings of the next step's tokens belong: bfloat16 [tokens, hidden]."""
        if self._rows.shape[1] < tokens:
            with torch.inference_mode(False):
                self._rows = torch.empty(2, tokens, self._hidden, dtype=torch.bfloat16)
            size = int(self._scratch_bytes(ctypes.addressof(self._decoder), tokens))
            self._scratch = prefer_huge_pages(torch.empty(size + _ALIGN, dtype=torch.uint8))
        return self._rows[0, :tokens]

    def start(self, inputs: StepInputs) -> None:
        """Begin a step whose embeddings are in `hidden(T)`."""
        queries, keys, dim = self._heads
        pool, tokens, step = inputs.pool, len(inputs.slots), self._step
        self._inputs = inputs  # keeps what the pointers lead to
        step.attention = inputs.plan.prepare(queries, (queries + 2 * keys) * dim, torch.bfloat16, self._scale)
        step.cos, step.sin = inputs.cos.data_ptr(), inputs.sin.data_ptr()
        step.slots, step.picked = inputs.slots.data_ptr(), inputs.picked.data_ptr()
        step.tokens, step.picked_count = tokens, len(inputs.picked)
        step.pool = pool.data_ptr()
        step.layer_bytes, step.value_bytes = (pool.stride(at) * pool.element_size() for at in (0, 1))
        step.hidden, step.normed = self._rows[0].data_ptr(), self._rows[1].data_ptr()
        step.scratch = -(-self._scratch.data_ptr() // _ALIGN) * _ALIGN
        step.threads = torch.get_num_threads()

    def run(self, first: int, last: int, finish: bool) -> None:
        """Go on until keys and values of layers [first, last) are in the pool; with `finish`, to the end of the last.

        The calls of a step go on from layer to layer. Raises MemoryError.
        """
        if self._run(ctypes.addressof(self._step), first, last, finish):
            raise MemoryError(f"no memory for {self._step.tokens} quantised rows")

    def normed(self) -> Tensor:
        """bfloat16 [R, hidden] of a finished step, valid until the next: the picked rows under the final norm."""
        return self._rows[1, : self._step.picked_count]


def runs(layers: Sequence[DecoderLayer], final_norm: Tensor) -> bool:
    """Whether all of it is for the C kernels: native linears, and norms in bfloat16."""
    norms = [final_norm, *(norm for layer in layers for norm in _norms(layer) if norm is not None)]
    native = all(isinstance(linear, NativeLinear) for layer in layers for linear in _linears(layer))
    plain = all(norm.dtype == torch.bfloat16 and norm.is_contiguous() for norm in norms)
    paired = all((layer.query_norm is None) == (layer.key_norm is None) for layer in layers)
    return library() is not None and native and plain and paired


def _norms(layer: DecoderLayer) -> tuple[Tensor | None, ...]:
    return layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _native(linear: Linear) -> NativeLinear:
    if not isinstance(linear, NativeLinear):
        raise TypeError(f"{linear} is not a linear of the C kernels")
    return linear


def _describe(layer: DecoderLayer) -> _Layer:
    norms = (None if norm is None else norm.data_ptr() for norm in _norms(layer))
    linears = (_native(linear) for linear in _linears(layer))
    return _Layer(*norms, *(_Product(linear.where, _KINDS[linear.kind]) for linear in linears))
