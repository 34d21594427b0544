"""The ranks of one worker during a step: the collectives that a tensor-parallel model needs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.process_group import Group, make_group
from .channel import FollowerChannel, LeaderChannel, RankLost


class RankGroup(Protocol):
    """Collectives among a worker's ranks. All ranks call the same ones in the same order, inside a step only."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Ranks."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place; bit-equal on all of them. float32 or bfloat16, contiguous, any shape."""
        ...

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """Rank i gives [rows, widths[i]]; rank 0 gets [rows, sum(widths)] in rank order, the others [0, 0]."""
        ...

    def share(self, tensor: Tensor) -> None:
        """What rank 0 has in it, on all ranks, in place; contiguous, of equal shape and dtype."""
        ...


class SingleRank:
    """The group of a worker with one rank: nothing to do."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> None:
        """The sum of one."""

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns are whole already."""
        return tensor

    def share(self, tensor: Tensor) -> None:
        """Nobody else wants it."""


class TorchGroup:
    """Ranks joined by gloo (CPU) or NCCL (CUDA).

    `ordered`: sums are taken in rank order, in float32 and rounded once, so that a row's bits do not depend on where it
    stands in the batch (rings and trees sum each part of a tensor in another order). It moves size / 2 times the bytes
    of a ring, so it is free for two ranks. Every method raises RankLost when a rank died or the limit passed.
    """

    def __init__(self, group: Group, ordered: bool) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        self._ordered = ordered
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def join(
        channel: LeaderChannel | FollowerChannel,
        backend: str,
        rank: int,
        size: int,
        timeout_s: float,
        host: str,
        ordered: bool,
    ) -> TorchGroup:
        """Meet the other ranks over `channel`; all of them call this at about the same time.

        backend: "gloo" | "nccl"; `timeout_s` limits the meeting and every collective; `host` is this machine's address
        towards the others. Raises RankLost when they do not come.
        """
        channel.store.set_timeout(datetime.timedelta(seconds=timeout_s))
        try:
            return TorchGroup(make_group(backend, channel.store, rank, size, timeout_s, host, channels=None), ordered)
        except (TimeoutError, ConnectionError, RuntimeError) as error:
            raise RankLost(f"rank {rank} could not join its group: {error}") from error

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place; see RankGroup."""
        try:
            if self._ordered:
                self._sum_in_order(tensor)
            else:
                self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """All columns on rank 0; see RankGroup. Raises ValueError when the own width is another."""
        rows = tensor.shape[0]
        if tensor.shape[1] != widths[self.rank] or len(widths) != self.size:
            raise ValueError(f"rank {self.rank} of {self.size} has {tensor.shape[1]} columns; widths {list(widths)}")
        if not rows:
            return tensor.new_empty((0, 0 if self.rank else sum(widths)))
        try:
            if self.rank:
                self._group.send([_as_bytes(tensor.contiguous())], 0, 0).wait()
                return tensor.new_empty((0, 0))
            parts = [tensor, *(tensor.new_empty((rows, width)) for width in widths[1:])]
            pending = [self._group.recv([_as_bytes(part)], rank + 1, 0) for rank, part in enumerate(parts[1:])]
            for work in pending:
                work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return torch.cat(parts, dim=1)

    def share(self, tensor: Tensor) -> None:
        """Rank 0's on all ranks; see RankGroup."""
        try:
            self._group.broadcast([tensor]).wait()  # of rank 0, unless told otherwise
        except RuntimeError as error:
            raise self._lost(error) from error

    def _sum_in_order(self, tensor: Tensor) -> None:
        own = _as_bytes(tensor)
        parts = list(self._room(own.numel() * self.size, tensor.device).view(self.size, -1))
        self._group.allgather([parts], [own]).wait()
        values = [part.view(tensor.dtype).view(tensor.shape) for part in parts]
        total = values[0].float() if tensor.dtype != torch.float32 else values[0]
        for value in values[1:]:
            total.add_(value)
        tensor.copy_(total)

    def _room(self, size: int, device: torch.device) -> Tensor:
        """For the parts of all ranks. On a CPU it is kept; a captured graph must have its own."""
        if device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=device)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size]

    def _lost(self, error: RuntimeError) -> RankLost:
        return RankLost(f"rank {self.rank} of {self.size}: a collective failed: {error}")


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
