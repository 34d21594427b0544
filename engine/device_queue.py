"""One rank's steps on their way to a device: as graphs where there are some of their size, else launch by launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .device_edge import Edge, Mark
from .device_kv import DeviceKV
from .device_model import DeviceModel, OnQueued
from .device_pieces import Pieces
from .device_steps import Bucket, BucketInputs, bucket_of, by_rows, row_batch, varlen_batch
from .step import SequenceStep

LayerGroup = tuple[int, int, Mark]  # layers, and the mark behind the writing of their KV


class StepQueue:
    """`longest`: tokens of a context."""

    def __init__(self, edge: Edge, model: DeviceModel, kv: DeviceKV, block_size: int, longest: int) -> None:
        self._edge, self._model, self._kv = edge, model, kv
        self._block_size, self._longest = block_size, longest
        self.captured: dict[Bucket, tuple[BucketInputs, Callable[[], Tensor]]] = {}
        self._pieces = Pieces(edge, model, kv, block_size)

    def put(self, steps: Sequence[SequenceStep], prior: Tensor | None) -> tuple[Tensor, list[LayerGroup]]:
        """Queue a step: its logits, on rank 0 those of all ranks, and the marks of its groups of layers.

        `prior`: what the step before drew, for the tokens that are -1 - row. Raises ValueError for too few blocks.
        """
        groups: list[LayerGroup] = []
        if by_rows(steps):
            local = self._by_rows(steps, prior)
            groups.append((0, self._model.layers, self._edge.mark()))
        else:
            local = self._end_to_end(steps, lambda low, high: groups.append((low, high, self._edge.mark())))
        return self._model.gather_logits(local), groups

    def _end_to_end(self, steps: Sequence[SequenceStep], on_queued: OnQueued) -> Tensor:
        if self._pieces.fit(steps):
            return self._pieces.run(steps, on_queued)
        return self._model.forward(varlen_batch(self._edge, steps, self._block_size), self._kv, on_queued)

    def _by_rows(self, steps: Sequence[SequenceStep], prior: Tensor | None) -> Tensor:
        bucket = bucket_of(steps, self._longest)
        if bucket is None:
            batch = row_batch(self._edge, steps, self._block_size)
            _take_from(prior, batch.token_ids)
            return self._model.forward(batch, self._kv, None)
        return self._replay(bucket, steps, prior)[: sum(len(step.tokens) for step in steps)]

    def _replay(self, bucket: Bucket, steps: Sequence[SequenceStep], prior: Tensor | None) -> Tensor:
        """Run a step of that size; the first of its size is captured behind it."""
        if bucket in self.captured:
            inputs, run = self.captured[bucket]
            inputs.load(steps)
            _take_from(prior, inputs.batch.token_ids)
            return run()
        inputs = BucketInputs(self._edge, bucket, self._block_size)
        inputs.load(steps)
        _take_from(prior, inputs.batch.token_ids)

        def forward() -> Tensor:
            return self._model.forward(inputs.batch, self._kv, None)

        logits = forward()
        self.captured[bucket] = inputs, self._edge.capture(forward)
        return logits


def _take_from(prior: Tensor | None, token_ids: Tensor) -> None:
    """Ids -1 - row become those of that row of `prior`; what could not be drawn becomes 0, and nobody asks for it."""
    if prior is not None:
        rows = (-1 - token_ids).clamp_min_(0)
        token_ids.copy_(torch.where(token_ids < 0, prior[rows].clamp_min(0), token_ids))
