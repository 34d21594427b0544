"""The tensors of one step: sequences laid end to end, with the places in the pool where their KV goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .step import SequenceStep


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """S sequences with T tokens altogether, and R rows of logits."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], absolute
    slots: Tensor  # int64 [T]: block * block_size + offset, where the token's KV is written
    cu_seqlens: list[int]  # S + 1 offsets into T
    context_lens: list[int]  # S: tokens of each sequence, the new ones included
    block_tables: list[list[int]]  # S: blocks[i] holds tokens [i * block_size, (i + 1) * block_size)
    logit_rows: Tensor  # int64 [R]: indices into T, ascending; those of `SequenceStep.logit_rows`

    @staticmethod
    def build(steps: Sequence[SequenceStep], block_size: int, device: torch.device) -> BatchTensors:
        """Lay `steps` end to end. Raises ValueError for an empty step or too few blocks."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu_seqlens = [0]
        rows: list[int] = []
        for step in steps:
            if not step.tokens or len(step.blocks) * block_size < step.end:
                raise ValueError(
                    f"{step.request_id}: {len(step.tokens)} tokens from {step.start} in {len(step.blocks)} blocks "
                    f"of {block_size}"
                )
            span = range(step.start, step.end)
            tokens.extend(step.tokens)
            positions.extend(span)
            slots.extend(step.blocks[p // block_size] * block_size + p % block_size for p in span)
            rows.extend(cu_seqlens[-1] + row for row in step.logit_rows)
            cu_seqlens.append(len(tokens))
        return BatchTensors(
            token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            cu_seqlens=cu_seqlens,
            context_lens=[step.end for step in steps],
            block_tables=[list(step.blocks) for step in steps],
            logit_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        )
