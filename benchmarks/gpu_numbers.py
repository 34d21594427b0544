"""Kernels on this device against float64 on it: largest errors, relative to the largest value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from baton.engine import sampler
from baton.engine.device_sampler import drawn
from baton.engine.quantized import Int4Weight, Int8Weight, quantize
from baton.engine.step import Draw, SequenceStep
from baton.kernels import kv_quantize
from baton.kernels.gpu.fp8_linear import fp8_linear, quantise_rows
from baton.kernels.gpu.grouped_linear import grouped_linear, route
from baton.kernels.gpu.kv_pages import DevicePages
from baton.kernels.gpu.linear import int4_linear, int8_linear, pack_int4
from baton.kernels.gpu.paged_decode import paged_decode
from baton.kernels.gpu.paged_prefill import paged_prefill
from baton.kernels.gpu.rms_norm import add_rms_norm
from baton.kernels.gpu.rotary import rotate_into_pages
from baton.kernels.gpu.silu_mul import silu_mul
from baton.proto.sampling import SamplingParams
from torch import Tensor

from .gpu_setup import Row, Setup, each

_LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}  # of one rounding, and some of the way there
_KIND_LIMITS = {"int8": 3e-2, "fp8": 1e-1}


def numbers(at: Setup) -> Iterator[Row]:
    """One row for each kernel: its error, and whether that is within what its dtype allows (share 1, else 0)."""
    torch.manual_seed(1)
    parts: dict[str, Callable[[], Iterable[Row]]] = {
        "elementwise": lambda: _elementwise(at),
        "attention": lambda: [_attention(at, "none")],
        "attention, int8 pages": lambda: [_attention(at, "int8")],
        "attention, fp8 pages": lambda: [_attention(at, "fp8")],
        "attention, pages of 64": lambda: [_prefill_by_descriptors(at)],
        "int8_linear, int4_linear": lambda: _linears(at),
        "fp8_linear": lambda: _fp8(at),
        "grouped_linear": lambda: [_experts(at)],
        "kv_pages": lambda: [_pages(at)],
        "sampling": lambda: [_draws(at)],
    }
    if at.on_gpu and torch.cuda.get_device_capability() < (9, 0):
        del parts["fp8_linear"]  # no such products there
    return each("numbers", parts.items())


def _row(name: str, found: Tensor, expected: Tensor, limit: float, case: str = "") -> Row:
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    good = math.isfinite(error) and error <= limit
    return Row("numbers", name, case, None, error, "error", float(good), 1.0)


def _elementwise(at: Setup) -> list[Row]:
    rows, part, weight = at.normal(5, 96), at.normal(5, 96), at.normal(96)
    total = rows.double() + part.double()
    normed = add_rms_norm(rows, part, weight, 1e-5)
    expected = total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    gates = at.normal(5, 64)
    gate, up = gates.double().chunk(2, 1)
    limit = _LIMITS[at.half]
    return [
        _row("add_rms_norm", normed, expected, limit),
        _row("silu_mul", silu_mul(gates), gate * gate.sigmoid() * up, limit),
        _rotation(at),
    ]


def _rotation(at: Setup) -> Row:
    heads = at.normal(3, 4, 32)
    before = heads.double()
    angle = at.normal(3, 1, 16, dtype=torch.float32)
    pools = torch.zeros(2, 2, 1, 4, 32, device=at.device, dtype=at.half)
    slots = torch.tensor([1, 6, 2], device=at.device)
    query = rotate_into_pages(heads, angle.cos(), angle.sin(), slots, pools[0], pools[1])
    left, right = before[:, :3].chunk(2, 2)
    cos, sin = angle.double().cos(), angle.double().sin()
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), 2)
    written = pools[:, slots // 4, 0, slots % 4]
    found = torch.cat((query, written[:1].transpose(0, 1), written[1:].transpose(0, 1)), 1)
    return _row("rotate_into_pages", found, torch.cat((turned, before[:, 3:]), 1), _LIMITS[at.half])


def _pools(at: Setup, kind: str, blocks: int, heads: int, size: int, dim: int) -> tuple[Tensor, Tensor | None]:
    """Keys and values [2, blocks, heads, size, dim], as codes with scales where `kind` says so."""
    plain = at.normal(2, blocks, heads, size, dim)
    if kind == "none":
        return plain, None
    codes = torch.empty(plain.shape, dtype=kv_quantize.CODES[kind], device=at.device)
    scales = torch.empty(plain.shape[:-1], device=at.device)
    kv_quantize.quantize(plain.view(-1, dim), kind, codes.view(-1, dim), scales.view(-1))
    return codes.view(torch.int8 if kind == "int8" else torch.uint8), scales


def _values(pools: Tensor, scales: Tensor | None) -> Tensor:
    """float64 values of pools."""
    if scales is None:
        return pools.double()
    wide = pools if pools.dtype == torch.int8 else pools.view(torch.float8_e4m3fn).float()
    return wide.double() * scales.double()[..., None]


def _attend(query: Tensor, pools: Tensor, tables: Tensor, length: int, first: int, scale: float) -> Tensor:
    """Causal attention of query [T, Hq, D], its tokens from position `first` on, over one sequence; float64."""
    group = query.shape[1] // pools.shape[2]
    keys, values = (
        pool[tables.long()].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, 0) for pool in pools
    )
    scores = torch.einsum("thd,hsd->hts", query.double(), keys) * scale
    position = torch.arange(length, device=query.device)
    hidden = position[None, :] > first + torch.arange(len(query), device=query.device)[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hts,hsd->thd", weights, values)


def _attention(at: Setup, kind: str) -> Row:
    """Decode over some splits and prefill behind a prefix, in one figure: the larger error."""
    lengths, dim, heads = [300, 17], 64, 2
    pools, scales = _pools(at, kind, 24, heads, 16, dim)
    tables = torch.arange(40, device=at.device, dtype=torch.int32).remainder(24).view(2, 20)
    contexts = torch.tensor(lengths, dtype=torch.int32, device=at.device)
    parts = None if scales is None else (scales[0], scales[1])
    values, scale = _values(pools, scales), dim**-0.5
    one = at.normal(2, 2 * heads, dim)
    found = paged_decode(one, pools[0], pools[1], tables, contexts, 400, scale, parts)
    expected = [_attend(one[i : i + 1], values, tables[i], n, n - 1, scale) for i, n in enumerate(lengths)]
    many = at.normal(25, 2 * heads, dim)
    offsets = torch.tensor([0, 20, 25], dtype=torch.int32, device=at.device)
    chunk = paged_prefill(many, pools[0], pools[1], tables, offsets, contexts, scale, parts)
    expected += [
        _attend(many[:20], values, tables[0], 300, 280, scale),
        _attend(many[20:], values, tables[1], 17, 12, scale),
    ]
    limit = max(_LIMITS[at.half], _KIND_LIMITS.get(kind, 0.0) / 4)  # codes are exact: what is left are sums in `half`
    return _row("attention", torch.cat((found, chunk)), torch.cat(expected), limit, f"{kind} pages")


def _prefill_by_descriptors(at: Setup) -> Row:
    pools, _ = _pools(at, "none", 4, 2, 64, 128)
    tables = torch.tensor([[2, 0, 3]], dtype=torch.int32, device=at.device)
    query = at.normal(20, 4, 128)
    offsets, contexts = (torch.tensor(part, dtype=torch.int32, device=at.device) for part in ([0, 20], [150]))
    found = paged_prefill(query, pools[0], pools[1], tables, offsets, contexts, 0.1)
    expected = _attend(query, _values(pools, None), tables[0], 150, 130, 0.1)
    return _row("attention", found, expected, _LIMITS[at.half], "pages of 64")


def _linears(at: Setup) -> list[Row]:
    weight, rows = at.normal(40, 128, dtype=torch.float32), at.normal(3, 128)
    int8, int4 = quantize(weight.cpu(), "w8a8"), quantize(weight.cpu(), "int4")
    if not isinstance(int8, Int8Weight) or not isinstance(int4, Int4Weight) or int4.minima is None:
        raise TypeError("weights of another kind than was asked for")
    limit = _LIMITS[at.half]
    scales = int8.scales.t().contiguous().to(at.device)
    found = [
        _row(
            "int8_linear",
            int8_linear(rows, int8.codes.to(at.device), scales),
            rows.double() @ int8.dequantize().double().to(at.device).t(),
            limit,
        )
    ]
    halves = [part.t().contiguous().to(at.device) for part in (int4.scales, int4.minima)]
    packed = pack_int4(int4.codes).to(at.device)
    product = rows.double() @ int4.dequantize().double().to(at.device).t()
    found.append(_row("int4_linear", int4_linear(rows, packed, halves[0], halves[1]), product, limit))
    return found


def _fp8(at: Setup) -> list[Row]:
    weight, rows = at.normal(40, 128, dtype=torch.float32), at.normal(3, 128)
    codes, row_scales = quantise_rows(weight)
    own, own_scales = quantise_rows(rows)
    values = [
        c.view(torch.float8_e4m3fn).float().double() * s.double()[:, None]
        for c, s in ((own, own_scales), (codes, row_scales))
    ]
    found = fp8_linear(rows, codes, row_scales)
    return [_row("fp8_linear", found, values[0] @ values[1].t(), _LIMITS[at.half])]


def _experts(at: Setup) -> Row:
    rows, weight = at.normal(9, 64), at.normal(4, 24, 64)
    chosen = at.normal(9, 4, dtype=torch.float32).topk(2).indices
    found = grouped_linear(rows, weight, *route(chosen, 4))
    expected = torch.einsum("tk,tpok->tpo", rows.double(), weight.double()[chosen]).flatten(0, 1)
    return _row("grouped_linear", found, expected, _LIMITS[at.half])


def _pages(at: Setup) -> Row:
    """Bytes that go to the wire and back."""
    pool = at.normal(2, 2, 5, 2, 16, 32)
    wire = torch.empty(2, 2, 2, 40, 32, dtype=at.half, device=at.device)
    DevicePages(pool).gather([3, 1, 4], (0, 2), (0, 2), 5, 40, wire)
    target = torch.zeros_like(pool)
    DevicePages(target).scatter([3, 1, 4], (0, 2), (0, 2), 5, 40, wire)
    kept = pool.transpose(2, 3)[:, :, :, [3, 1, 4]].flatten(3, 4)[:, :, :, 5:45]
    same = torch.equal(wire, kept) and torch.equal(
        target.transpose(2, 3)[:, :, :, [3, 1, 4]].flatten(3, 4)[:, :, :, 5:45], kept
    )
    return Row("numbers", "kv_pages", "", None, 0.0 if same else 1.0, "error", float(same), 1.0)


def _draws(at: Setup) -> Row:
    """Tokens against engine/sampler.py on a CPU."""
    settings = [(0.0, 0, 1.0, 0.0), (0.8, 20, 1.0, 0.0), (1.2, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1)]
    logits = 3 * at.normal(len(settings), 600, dtype=torch.float32)
    draws = [
        Draw(
            SamplingParams(t, k, p, m, 1.1, 0.2, 0.1, {5: 1.0}, seed, 1, 9, 0, frozenset(), 2), (0,), [1, 2], [3] * seed
        )
        for seed, (t, k, p, m) in enumerate(settings)
    ]
    steps = [SequenceStep(str(i), 0, 0, [7], 4 + i, [0], draw) for i, draw in enumerate(draws)]
    found = [row[0].token_id for row in drawn(at.edge, steps, logits).tokens()]
    expected = [row[0].token_id for row in sampler.sample(logits.cpu(), draws)]
    wrong = sum(one != other for one, other in zip(found, expected, strict=True))
    return Row("numbers", "sampling", "", None, float(wrong), "tokens", float(not wrong), 1.0)
