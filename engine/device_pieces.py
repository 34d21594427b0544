"""Steps of prompts in pieces: what lies between two attentions is a graph for each size of a step.

How attention is launched depends on the sequences, everything else on the number of tokens alone. So each layer is one
graph (what follows the attention of the layer before, up to the keys and values in their pages) and one launch. Only
for steps that the device would run through faster than the host launches them; rows of padding have slot -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .device_edge import Edge
from .device_kv import DeviceKV
from .device_model import DeviceModel, OnQueued
from .device_steps import PieceInputs
from .step import SequenceStep

MOST_TOKENS = 1024  # of a step in pieces: longer ones keep the device busy while the host launches
_LEAST_TOKENS = 16
_FEW = 256  # tokens; up to there the weights' bytes decide, and padding costs little


def token_sizes() -> tuple[int, ...]:
    """16, 32, 64, 128, 256, 384, 512, ... 1024."""
    doubled = [_LEAST_TOKENS]
    while doubled[-1] < _FEW:
        doubled.append(2 * doubled[-1])
    return (*doubled, *range(_FEW + 128, MOST_TOKENS + 1, 128))


class Pieces:
    """Of one model and pool. The buffers between pieces are shared by all sizes: one step runs at a time."""

    def __init__(self, edge: Edge, model: DeviceModel, kv: DeviceKV, block_size: int) -> None:
        self._edge, self._model, self._kv, self._block_size = edge, model, kv, block_size
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._sized: dict[int, _Sized] = {}

    def fit(self, steps: Sequence[SequenceStep]) -> bool:
        """Whether there is a size for this step."""
        return sum(len(step.tokens) for step in steps) <= MOST_TOKENS

    def run(self, steps: Sequence[SequenceStep], on_queued: OnQueued) -> Tensor:
        """See DeviceModel.forward. The first step of a size is captured behind it."""
        tokens = sum(len(step.tokens) for step in steps)
        size = next(size for size in token_sizes() if size >= tokens)
        if self._buffers is None:
            self._buffers = self._model.new_buffers(MOST_TOKENS)
        if size not in self._sized:
            hidden, query = (buffer[:size] for buffer in self._buffers)
            inputs = PieceInputs(self._edge, size, self._block_size)
            self._sized[size] = _Sized(self._edge, self._model, self._kv, inputs, hidden, query)
        return self._sized[size].run(steps, on_queued)


class _Sized:
    """Steps of at most so many tokens; `hidden` and `query` are where the pieces leave what the next one takes."""

    def __init__(
        self, edge: Edge, model: DeviceModel, kv: DeviceKV, inputs: PieceInputs, hidden: Tensor, query: Tensor
    ) -> None:
        self._edge, self._model, self._kv, self._inputs = edge, model, kv, inputs
        self._hidden, self._query = hidden, query
        self._attended = torch.zeros_like(query).flatten(1)  # rows of padding are read, too
        self._turned = model.turned(inputs.positions)
        self._pieces: list[Callable[[], Tensor]] = [partial(self._piece, index) for index in range(model.layers)]
        self._captured = False

    def run(self, steps: Sequence[SequenceStep], on_queued: OnQueued) -> Tensor:
        """See Pieces."""
        batch, announced = self._inputs.load(steps), 0
        tokens = len(batch.token_ids)
        for index, piece in enumerate(self._pieces):
            piece()
            if self._model.ends_group(index):
                on_queued(announced, index + 1)
                announced = index + 1
            if self._model.is_over(index, batch):
                break
            self._attended[:tokens] = self._model.attend(index, self._query[:tokens], batch, self._kv)
        logits = self._model.finish(self._hidden[:tokens], self._attended[:tokens], batch)
        if not self._captured:
            self._pieces = [self._edge.capture(piece) for piece in self._pieces]
            self._captured = True
        return logits

    def _piece(self, index: int) -> Tensor:
        """From behind the attention of the layer before `index` to the queries of this one."""
        if index:
            normed = self._model.behind(index - 1, self._hidden, self._attended)
        else:
            self._hidden.copy_(self._model.embed(self._inputs.token_ids))
            for table, turned in zip(self._turned, self._model.turned(self._inputs.positions), strict=True):
                table.copy_(turned)
            normed = self._model.first_norm(self._hidden)
        query = self._model.project(index, normed, self._turned, self._inputs.slots, self._kv)
        return self._query.copy_(query)
