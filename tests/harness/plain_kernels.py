"""The kernels of kernels/gpu in plain torch, so that the engine for GPUs can be run through thousands of steps.

What the kernels themselves compute is looked at in tests/gpu; here they are what kernels/reference.py says, and what
is left is everything around them: queues, batches, tables, what is known when. Pools of floats only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from baton.engine import sampler
from baton.kernels import reference
from baton.proto.sampling import SamplingParams
from baton.tests.harness.monolithic import sampling
from torch import Tensor

Span = tuple[int, int]


class DevicePages:
    """See kernels/gpu/kv_pages.py: pool [layers, 2, blocks, heads, block_size, D]."""

    def __init__(self, pool: Tensor, scales: Tensor | None) -> None:
        assert scales is None
        self._pool = pool

    def _places(self, blocks: Sequence[int], low: int, count: int) -> tuple[Tensor, Tensor]:
        size = self._pool.shape[4]
        at = torch.arange(low, low + count)
        return torch.tensor(blocks)[at // size], at % size

    def gather(self, blocks: Sequence[int], layers: Span, heads: Span, low: int, count: int, out: Tensor) -> None:
        """To the wire: [layers, 2, heads, tokens, D]."""
        block, offset = self._places(blocks, low, count)
        found = self._pool[slice(*layers), :, :, slice(*heads)][:, :, block, :, offset]  # tokens come first
        out.view(-1).view(torch.uint8).copy_(found.permute(1, 2, 3, 0, 4).contiguous().view(-1).view(torch.uint8))

    def scatter(self, blocks: Sequence[int], layers: Span, heads: Span, low: int, count: int, wire: Tensor) -> None:
        """From the wire, of any dtype."""
        block, offset = self._places(blocks, low, count)
        shape = (layers[1] - layers[0], 2, heads[1] - heads[0], count, self._pool.shape[5])
        values = wire.view(-1).view(torch.uint8).view(self._pool.dtype).view(shape)
        part = self._pool[slice(*layers), :, :, slice(*heads)]
        part[:, :, block, :, offset] = values.permute(3, 0, 1, 2, 4)


def add_rms_norm(rows: Tensor, part: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels/gpu/rms_norm.py."""
    rows += part
    return reference.rms_norm(rows, weight, eps)


def rotate_into_pages(
    heads: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor, scales: None
) -> Tensor:
    """See kernels/gpu/rotary.py."""
    kv_heads, size = keys.shape[1:3]
    queries = heads.shape[1] - 2 * kv_heads
    left, right = heads[:, : queries + kv_heads].float().chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(heads.dtype)
    kept = slots >= 0
    block, offset = slots[kept] // size, slots[kept] % size
    keys[block, :, offset] = turned[kept, queries:].to(keys.dtype)
    values[block, :, offset] = heads[kept, queries + kv_heads :].to(values.dtype)
    heads[:, :queries] = turned[:, :queries]
    return heads[:, :queries]


def paged_decode(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lens: Tensor, longest: int, scale: float, scales: None
) -> Tensor:
    """See kernels/gpu/paged_decode.py; a row without a context is zero."""
    assert int(lens.max()) <= longest
    out = torch.zeros_like(query)
    for row, context in enumerate(lens.tolist()):
        if context:
            own = (query[row : row + 1], keys, values, [0, 1], [context], [_table(tables[row], keys, context)])
            out[row] = reference.paged_attention(*own, scale)[0]
    return out


def paged_prefill(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, cu: Tensor, lens: Tensor, scale: float, scales: None
) -> Tensor:
    """See kernels/gpu/paged_prefill.py."""
    contexts = lens.tolist()
    blocks = [_table(table, keys, context) for table, context in zip(tables, contexts, strict=True)]
    return reference.paged_attention(query, keys, values, cu.tolist(), contexts, blocks, scale)


def _table(table: Tensor, keys: Tensor, context: int) -> list[int]:
    return [int(block) for block in table[: -(-context // keys.shape[2])]]


def sample(
    scores: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, rows: Tensor, keys: Tensor
) -> Tensor:
    """See kernels/gpu/sampling.py: the tokens of engine/sampler.py, from its own parts."""
    drawn = []
    for row, key in zip(rows.tolist(), keys, strict=True):
        one = scores[row : row + 1].float()
        if not bool(one.amax() > -torch.inf):  # false for NaN, too
            drawn.append(-1)
        elif float(temperatures[row]) == 0:
            drawn.append(int(one.argmax()))
        else:
            params = sampling(top_k=int(top_k[row]), top_p=float(top_p[row]), min_p=float(min_p[row]))
            drawn.append(_noisy((one - one.amax()) / temperatures[row], params, key[None]))
    return torch.tensor(drawn, dtype=torch.int64)


def _noisy(scores: Tensor, params: SamplingParams, key: Tensor) -> int:
    """From one row whose best is 0."""
    blocked = sampler._blocked(scores)
    floor = sampler._floor(blocked, [params])
    weights = blocked.exp()
    if floor is not None:
        weights.masked_fill_(blocked < floor[:, None, None], 0.0)
    block = sampler._pick(weights.sum(dim=2), sampler._mix(key), torch.zeros_like(key))
    first = block * sampler._BLOCK
    return int(first + sampler._pick(weights[0, block], key, first))


def verify(drawn: Tensor, proposed: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """See kernels/gpu/verify.py."""
    same = (drawn[:, :-1] == proposed).long().cumprod(1).sum(1)
    return drawn, (torch.minimum(same, lengths.long()) + 1).int()


def silu_mul(gates: Tensor) -> Tensor:
    """See kernels/gpu/silu_mul.py."""
    return reference.silu_mul(gates)


_PARTS: dict[str, dict[str, Any]] = {
    "kv_pages": {"DevicePages": DevicePages},
    "rms_norm": {"rms_norm": reference.rms_norm, "add_rms_norm": add_rms_norm},
    "rotary": {"rotate_into_pages": rotate_into_pages},
    "paged_decode": {"paged_decode": paged_decode},
    "paged_prefill": {"paged_prefill": paged_prefill},
    "silu_mul": {"silu_mul": silu_mul},
    "sampling": {"sample": sample},
    "verify": {"verify": verify},
}


def install(patch: pytest.MonkeyPatch) -> None:
    """Whoever imports the kernels gets these."""
    for name, parts in _PARTS.items():
        module = ModuleType(f"baton.kernels.gpu.{name}")
        for part, value in parts.items():
            setattr(module, part, value)
        patch.setitem(sys.modules, module.__name__, module)
