"""Every launch that is shipped, as a call of its public function with tensors that have a shape but no memory.

The names are those of kernels/gpu/budgets.yaml. Sizes are those of Llama-3-8B unless they matter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from baton.kernels.gpu.fp8_linear import fp8_linear
from baton.kernels.gpu.grouped_linear import combine, grouped_linear
from baton.kernels.gpu.kv_pages import DevicePages
from baton.kernels.gpu.linear import int4_linear, int8_linear
from baton.kernels.gpu.paged_decode import paged_decode
from baton.kernels.gpu.paged_prefill import paged_prefill
from baton.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from baton.kernels.gpu.rotary import rotate_into_pages
from baton.kernels.gpu.sampling import sample
from baton.kernels.gpu.silu_mul import silu_mul
from baton.kernels.gpu.verify import verify
from torch import Tensor

BF16, FP32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
_TOKENS, _BLOCKS = 64, 1024
_POOL_DTYPES = {"half": BF16, "int8": torch.int8, "fp8": torch.uint8, "float32": FP32}


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _pool(kind: str, dim: int, size: int = 16) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    scales = _empty(_BLOCKS, 8, size, dtype=FP32)
    return _empty(_BLOCKS, 8, size, dim, dtype=_POOL_DTYPES[kind]), (scales, scales) if kind in (
        "int8",
        "fp8",
    ) else None


def _norm(columns: int) -> None:
    add_rms_norm(_empty(_TOKENS, columns), _empty(_TOKENS, columns), _empty(columns), 1e-5)


def _head_norm() -> None:
    rms_norm(_empty(_TOKENS, 48, 128)[:, :32], _empty(128), 1e-6)


def _rotate(dim: int, kind: str = "half") -> None:
    pool, scales = _pool(kind, dim)
    angles = _empty(_TOKENS, 1, dim // 2)
    rotate_into_pages(_empty(_TOKENS, 48, dim), angles, angles, _empty(_TOKENS, dtype=INT64), pool, pool, scales)


def _decode(kind: str, dim: int, batch: int = 16, context: int = 8192) -> None:
    query = _empty(batch, 48, dim, dtype=FP32 if kind == "float32" else BF16)[:, :32]
    pool, scales = _pool(kind, dim)
    tables, lengths = _empty(batch, 512, dtype=INT32), _empty(batch, dtype=INT32)
    paged_decode(query, pool, pool, tables, lengths, context, 0.1, scales)


def _prefill(kind: str, dim: int, size: int, sequences: int = 4) -> None:
    query = _empty(2048, 48, dim, dtype=FP32 if kind == "float32" else BF16)[:, :32]
    pool, scales = _pool(kind, dim, size)
    tables, lengths = _empty(sequences, 512, dtype=INT32), _empty(sequences, dtype=INT32)
    paged_prefill(query, pool, pool, tables, _empty(sequences + 1, dtype=INT32), lengths, 0.1, scales)


_PREFILLS = (
    ("half", (64, 128), (16, 64)),
    ("half", (256,), (16,)),
    ("int8", (64, 128), (16,)),
    ("fp8", (64, 128), (16,)),
    ("float32", (64, 128), (16,)),
)


def _linear(bits: int, rows: int, outputs: int, inputs: int) -> None:
    """Few rows as batch invariance has them, many as they are faster."""
    x, bias, invariant = _empty(rows, inputs), _empty(outputs), rows <= 16
    if bits == 8:
        scales = _empty(inputs // 64, outputs, dtype=FP32)
        int8_linear(x, _empty(outputs, inputs, dtype=torch.int8), scales, bias, invariant)
        return
    scales = _empty(inputs // 32, outputs, dtype=torch.float16)
    int4_linear(x, _empty(inputs // 32, outputs, 16, dtype=torch.uint8), scales, scales, bias, invariant)


def _fp8(rows: int, outputs: int, inputs: int) -> None:
    """Few rows as batch invariance has them, many as they are faster."""
    codes, scales = _empty(outputs, inputs, dtype=torch.uint8), _empty(outputs, dtype=FP32)
    fp8_linear(_empty(rows, inputs), codes, scales, _empty(outputs), rows <= 16)


def _grouped(experts: int, per_row: int, outputs: int, inputs: int) -> None:
    """One layer of experts, and what comes of it."""
    x, weight = _empty(_TOKENS, inputs), _empty(experts, outputs, inputs)
    order, offsets = _empty(_TOKENS * per_row, dtype=INT64), _empty(experts + 1, dtype=INT32)
    parts = grouped_linear(x, weight, order, offsets)
    combine(parts.view(_TOKENS, per_row, outputs), _empty(_TOKENS, per_row))


def _verify() -> None:
    verify(_empty(8, 5, dtype=INT64), _empty(8, 4, dtype=INT64), _empty(8, dtype=INT32))


def _sample(vocab: int) -> None:
    floats, pairs = _empty(8, dtype=FP32), _empty(8, dtype=INT64)
    sample(_empty(8, vocab, dtype=FP32), floats, _empty(8, dtype=INT32), floats, floats, pairs, pairs)


def _one_run() -> None:
    """Triton makes other code for arguments that are one: it must compile, too."""
    DevicePages(_empty(4, 2, _BLOCKS, 8, 16, 128)).gather([0], (0, 1), (0, 1), 1, 1, _empty(1, 2, 1, 1, 128))


def _pages(quantise: str | None, scatter: bool) -> None:
    pages = DevicePages(_empty(4, 2, _BLOCKS, 8, 16, 128))
    where = [1, 2, 3], (0, 4), (2, 6), 5, 40
    shape = (4, 2, 4, 40)
    if quantise is None:
        (pages.scatter if scatter else pages.gather)(*where, _empty(*shape, 128))
        return
    codes, scales = _empty(*shape, 128, dtype=_POOL_DTYPES[quantise]), _empty(*shape, dtype=FP32)
    (pages.scatter_codes if scatter else pages.gather_codes)(*where, codes, scales)


def _rows(scatter: bool) -> None:
    """Of a pool of codes."""
    shape = (4, 2, _BLOCKS, 8, 16)
    pages = DevicePages(_empty(*shape, 128, dtype=torch.int8), _empty(*shape, dtype=FP32))
    where = [1, 2, 3], (0, 4), (2, 6), 5, 40
    (pages.scatter if scatter else pages.gather)(*where, _empty(4, 2, 4, 40, 132, dtype=torch.int8))


LAUNCHES: dict[str, Callable[[], None]] = {
    "add_rms_norm 576": partial(_norm, 576),
    "add_rms_norm 4096": partial(_norm, 4096),
    "add_rms_norm 8192": partial(_norm, 8192),
    "rms_norm of heads": _head_norm,
    "silu_mul 14336": lambda: void(silu_mul(_empty(_TOKENS, 28672))),
    **{f"rotate_into_pages {dim}": partial(_rotate, dim) for dim in (64, 80, 128)},
    **{f"rotate_into_pages {kind}_128": partial(_rotate, 128, kind) for kind in ("int8", "fp8")},
    **{
        f"paged_prefill {kind}_{dim}, pages of {size}": partial(_prefill, kind, dim, size)
        for kind, dims, sizes in _PREFILLS
        for dim in dims
        for size in sizes
    },
    **{
        f"paged_decode {kind}_{dim}": partial(_decode, kind, dim)
        for kind, dims in (("half", (64, 128, 256)), *((kind, (64, 128)) for kind in ("int8", "fp8", "float32")))
        for dim in dims
    },
    **{
        f"int{bits}_linear {rows} x {outputs} x {inputs}": partial(_linear, bits, rows, outputs, inputs)
        for bits in (8, 4)
        for rows, outputs, inputs in ((16, 4096, 14336), (256, 14336, 4096))
    },
    "grouped_linear 128 x 768 x 2048": partial(_grouped, 128, 8, 768, 2048),
    "fp8_linear 16 x 4096 x 14336": partial(_fp8, 16, 4096, 14336),
    "fp8_linear 256 x 14336 x 4096": partial(_fp8, 256, 14336, 4096),
    "sample from 128256": partial(_sample, 128256),
    "verify": _verify,
    "paged_decode of one": partial(_decode, "half", 128, 1, 256),
    "paged_prefill of one": partial(_prefill, "half", 128, 64, 1),
    "grouped_linear of one": partial(_grouped, 1, 1, 768, 2048),
    "int8_linear of one": partial(_linear, 8, 1, 768, 2048),
    "kv_pages of one": _one_run,
    **{
        f"kv_pages {name}{' as ' + kind if kind else ''}": partial(_pages, kind, name == "scatter")
        for name in ("gather", "scatter")
        for kind in (None, "int8", "fp8")
    },
    "kv_pages gather rows": partial(_rows, False),
    "kv_pages scatter rows": partial(_rows, True),
}


def void(_: object) -> None:
    """For a lambda that returns nothing."""
