"""The kernels as plans of tests/harness/attention_case.py: lists and CPU tensors in, a CPU tensor out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from baton.kernels import reference
from baton.kernels.gpu.paged_decode import paged_decode
from baton.kernels.gpu.paged_prefill import paged_prefill
from torch import Tensor

Scales = tuple[Tensor, Tensor] | None


class DecodePlan:
    """One new token for each sequence. With `kind` the pools are quantised first."""

    device = torch.device("cpu")
    kind: str | None = None
    slack = 0  # more tokens than the longest context has, as a captured graph would allow for

    def __init__(
        self, cu_seqlens: Sequence[int], context_lens: Sequence[int], tables: Sequence[Sequence[int]], pool: Tensor
    ) -> None:
        self._contexts, self._cu_seqlens = list(context_lens), list(cu_seqlens)
        width = max(map(len, tables), default=0) + 1
        self._tables = torch.tensor([[*table, *[-1] * (width - len(table))] for table in tables], dtype=torch.int32)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
        """See `AttentionPlan`."""
        pools, scales = stored((keys, values), self.kind, self.device)
        out.copy_(self.run(query.to(self.device), *pools, scale, scales))

    def run(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, scales: Scales) -> Tensor:
        """The kernel."""
        longest = max(self._contexts) + self.slack
        return paged_decode(query, keys, values, *self.where(), longest, scale, scales)

    def where(self) -> tuple[Tensor, Tensor]:
        """Tables and context lengths on the device."""
        return self._tables.to(self.device), torch.tensor(self._contexts, dtype=torch.int32, device=self.device)


class PrefillPlan(DecodePlan):
    """Any number of new tokens for each sequence."""

    def run(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, scales: Scales) -> Tensor:
        """The kernel."""
        tables, contexts = self.where()
        offsets = torch.tensor(self._cu_seqlens, dtype=torch.int32, device=self.device)
        return paged_prefill(query, keys, values, tables, offsets, contexts, scale, scales)


def stored(
    pools: tuple[Tensor, Tensor], kind: str | None, device: torch.device
) -> tuple[tuple[Tensor, Tensor], Scales]:
    """Pools of keys and values on `device`, as codes with their scales where `kind` is int8 or fp8.

    Where a pool holds NaN, codes and scales are such that reading them does harm: NaN again.
    """
    if kind is None:
        return (pools[0].to(device), pools[1].to(device)), None
    codes, scales = [], []
    for pool in pools:
        rows = pool.reshape(-1, pool.shape[3])
        unused = rows.isnan().any(dim=1)
        part, part_scales = reference.quantize_kv(rows.float().masked_fill(unused[:, None], 0.0), kind)
        part_scales[unused] = float("nan")
        codes.append(part.view(pool.shape).to(device))
        scales.append(part_scales.view(pool.shape[:3]).contiguous().to(device))
    return (codes[0], codes[1]), (scales[0], scales[1])
