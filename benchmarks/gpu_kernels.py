"""Each kernel against the bytes that it must move or the operations that it must do, and against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from baton.engine.quantized import Int8Weight, quantize
from baton.kernels.gpu.kv_pages import DevicePages
from baton.kernels.gpu.linear import int8_linear
from baton.kernels.gpu.paged_decode import paged_decode
from baton.kernels.gpu.paged_prefill import paged_prefill
from baton.kernels.gpu.rms_norm import add_rms_norm
from baton.kernels.gpu.rotary import rotate_into_pages
from baton.kernels.gpu.silu_mul import silu_mul
from torch import Tensor

from .gpu_setup import Row, Setup, each

_DECODE_TARGET, _COPY_TARGET, _SDPA_TARGET = 0.8, 0.8, 0.6
_ALL = 2048  # programs: more than run at once


def kernels(at: Setup) -> Iterator[Row]:
    """All rows."""
    parts: list[tuple[str, Callable[[], Iterable[Row]]]] = [("elementwise", lambda: _elementwise(at))]
    parts += [(f"paged_decode, {context}", partial(_decode, at, context)) for context in at.sizes.contexts]
    parts += [(f"paged_prefill, {tokens}", partial(_prefill, at, tokens)) for tokens in at.sizes.prompts]
    parts += [("int8_linear", lambda: _int8(at)), ("kv_pages", lambda: _transfer(at))]
    return each("kernel", parts)


def _elementwise(at: Setup) -> Iterator[Row]:
    shape, tokens = at.sizes.model, at.sizes.tokens
    item = at.half.itemsize
    rows, part, weight = at.normal(tokens, shape.hidden), at.normal(tokens, shape.hidden), at.normal(shape.hidden)
    size = 4 * rows.nbytes  # two are read, two written
    yield at.by_bytes(
        "kernel", "add_rms_norm", f"{tokens} rows", lambda: add_rms_norm(rows, part, weight, 1e-5), size, 0.85
    )
    gates = at.normal(tokens, 2 * shape.intermediate)
    size = gates.nbytes * 3 // 2
    yield at.by_bytes("kernel", "silu_mul", f"{tokens} rows", lambda: silu_mul(gates), size, 0.85)
    heads = at.normal(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    angle = at.normal(tokens, 1, shape.head_dim // 2)
    blocks = -(-tokens // 16)
    pools = torch.zeros(2, blocks, shape.kv_heads, 16, shape.head_dim, dtype=at.half, device=at.device)
    slots = torch.arange(tokens, device=at.device)
    size = 2 * tokens * (shape.heads + 2 * shape.kv_heads) * shape.head_dim * item
    yield at.by_bytes(
        "kernel",
        "rotate_into_pages",
        f"{tokens} rows",
        lambda: rotate_into_pages(heads, angle, angle, slots, pools[0], pools[1]),
        size,
        0.85,
    )


def _decode(at: Setup, context: int) -> Iterator[Row]:
    """Pages of 16, each read by one sequence alone."""
    shape = at.sizes.model
    batch = max(1, min(max(at.sizes.batches), at.sizes.pool_tokens // context // 4))
    blocks = -(-context // 16)
    pools, tables = _pool(at, batch * blocks), _tables(at, batch, blocks)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=at.device)
    query = at.normal(batch, shape.heads, shape.head_dim)
    size = 2 * batch * context * shape.kv_heads * shape.head_dim * at.half.itemsize
    run = _with(paged_decode, query, pools[0], pools[1], tables, lengths, context, shape.head_dim**-0.5)
    case = f"{batch} x {context}"
    yield at.by_bytes("kernel", "paged_decode", case, run, size, _DECODE_TARGET)
    dense = [pool.transpose(1, 2).reshape(batch, -1, shape.kv_heads, shape.head_dim).transpose(1, 2) for pool in pools]
    one = query[:, :, None]
    yield at.by_bytes("torch", "SDPA of one token", case, lambda: _sdpa(one, dense, causal=False), size, None)


def _prefill(at: Setup, tokens: int) -> Iterator[Row]:
    shape = at.sizes.model
    blocks = -(-tokens // 64)
    pools = at.normal(2, blocks, shape.kv_heads, 64, shape.head_dim)
    tables = _tables(at, 1, blocks)
    offsets, lengths = (torch.tensor(p, dtype=torch.int32, device=at.device) for p in ([0, tokens], [tokens]))
    query = at.normal(tokens, shape.heads, shape.head_dim)
    work = 2.0 * tokens * tokens * shape.heads * shape.head_dim  # two products over half of the square
    run = _with(paged_prefill, query, pools[0], pools[1], tables, offsets, lengths, shape.head_dim**-0.5)
    ours = at.by_flops("kernel", "paged_prefill", f"{tokens} tokens", run, work, None)
    dense = [pool.transpose(0, 1).flatten(1, 2)[None, :, :tokens] for pool in pools]
    whole = query.transpose(0, 1)[None]
    theirs = at.by_flops(
        "torch", "SDPA, causal", f"{tokens} tokens", lambda: _sdpa(whole, dense, causal=True), work, None
    )
    share = ours.figure / theirs.figure
    yield Row(ours.section, ours.name, ours.case, ours.seconds, ours.figure, ours.unit, share, _SDPA_TARGET)
    yield theirs


def _int8(at: Setup) -> Iterator[Row]:
    """Few rows, where bytes decide; torch's product with the plain weight beside it."""
    outputs, inputs = at.sizes.model.intermediate, at.sizes.model.hidden
    weight = at.normal(outputs, inputs, dtype=torch.float32)
    coded = quantize(weight.cpu(), "w8a8")
    if not isinstance(coded, Int8Weight):
        raise TypeError("a weight of another kind than was asked for")
    codes, scales = coded.codes.to(at.device), coded.scales.t().contiguous().to(at.device)
    plain = weight.to(at.half)
    for rows in at.sizes.batches[:2]:
        x = at.normal(rows, inputs)
        run = _with(int8_linear, x, codes, scales)
        yield at.by_bytes("kernel", "int8_linear", f"{rows} rows", run, codes.nbytes + scales.nbytes, 0.5)
        yield at.by_bytes("torch", "linear", f"{rows} rows", _with(F.linear, x, plain), plain.nbytes, None)


def _transfer(at: Setup) -> Iterator[Row]:
    """All layers of a group in one launch, pages in no order."""
    shape, tokens = at.sizes.model, at.sizes.tokens
    layers, blocks = min(8, shape.layers), -(-tokens // 16)
    pool = at.normal(layers, 2, blocks, shape.kv_heads, 16, shape.head_dim)
    order = torch.randperm(blocks).tolist()
    wire = torch.empty(layers, 2, shape.kv_heads, tokens, shape.head_dim, dtype=at.half, device=at.device)
    spans = ((0, layers), (0, shape.kv_heads), 0, tokens)
    size, case = 2 * wire.nbytes, f"{layers} layers, {tokens} tokens"
    pages = DevicePages(pool)
    for programs, many in ((None, "few programs"), (_ALL, "the whole GPU")):
        own = DevicePages(pool, programs=programs)
        target = None if programs is None else _COPY_TARGET
        for name, move in (("pack", own.gather), ("unpack", own.scatter)):
            run = _with(move, order, *spans, wire)
            yield at.by_bytes("kernel", f"{name}, {many}", case, run, size, target)
    codes = torch.empty(wire.shape, dtype=torch.int8, device=at.device)
    scales = torch.empty(wire.shape[:-1], device=at.device)
    size = wire.nbytes + codes.nbytes + scales.nbytes
    run = _with(pages.gather_codes, order, *spans, codes, scales)
    yield at.by_bytes("kernel", "pack as int8", case, run, size, None)


def _pool(at: Setup, blocks: int) -> Tensor:
    shape = at.sizes.model
    return torch.randn(2, blocks, shape.kv_heads, 16, shape.head_dim, device=at.device).to(at.half)


def _tables(at: Setup, batch: int, blocks: int) -> Tensor:
    return torch.arange(batch * blocks, dtype=torch.int32, device=at.device).view(batch, blocks)


def _with(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


def _sdpa(query: Tensor, kv: list[Tensor], causal: bool) -> Tensor:
    """Whatever torch has for it: FlashAttention or cuDNN on a GPU."""
    return F.scaled_dot_product_attention(query, kv[0], kv[1], is_causal=causal, enable_gqa=True)
