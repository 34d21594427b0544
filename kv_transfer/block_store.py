"""How the transfer sees a rank's KV pool: it names blocks, layers, heads and tokens, and never a raw address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class BlockStore(Protocol):
    """A rank's pool, [layer][k|v][block][kv_head][token in block][row] (kernels/kv_rows.py).

    In both calls `blocks[i]` holds the sequence's tokens [i * block_size, (i + 1) * block_size); `tokens`, `layers` and
    `heads` are half-open ranges; `heads` counts this rank's own heads from 0. Both calls come from transfer threads.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Of the pool's elements."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the pool is; payloads are there too."""
        ...

    def gather(
        self,
        blocks: Sequence[int],
        layers: tuple[int, int],
        heads: tuple[int, int],
        tokens: tuple[int, int],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A contiguous copy [layers, 2, heads, tokens, row]; or `out` (flat uint8), filled with it."""
        ...

    def scatter(
        self,
        blocks: Sequence[int],
        layers: tuple[int, int],
        heads: tuple[int, int],
        tokens: tuple[int, int],
        payload: torch.Tensor,
    ) -> None:
        """Write what `gather` returned."""
        ...
