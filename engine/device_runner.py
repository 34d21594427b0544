"""One rank of the engine on a GPU: the `Runner` of runner.py over kernels/gpu.

    upload -> forward (a graph, or launches group by group) -> draws -> download -> the host waits, for the first time

While the device computes, the host has nothing to do with the step but to tell, mark by mark, which layers' KV is in
the pool; what follows in the queue does not wait for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from ..proto.errors import ConfigError
from ..proto.kv_layout import block_count
from .device_edge import CudaEdge, Edge, Mark
from .device_kv import DeviceKV
from .device_model import DeviceModel
from .device_sampler import drawn
from .device_steps import (
    Bucket,
    BucketInputs,
    bucket_of,
    by_rows,
    context_sizes,
    row_batch,
    row_sizes,
    varlen_batch,
)
from .params import EngineParams
from .prompt_scores import take_scores
from .ranks import RankGroup
from .runner import Runner, check_device
from .step import DRAWN_BY_LEADER, Kind, OnLayers, SampledToken, SequenceStep, pack_plan
from .weights import Weights

_Group = tuple[int, int, Mark]  # layers, and the mark behind the writing of their KV


class DeviceRunner(Runner):
    """See Runner. `edge`: where it computes."""

    kv: DeviceKV

    def __init__(
        self,
        params: EngineParams,
        group: RankGroup,
        progress: Callable[[int, int], None],
        broadcast: Callable[[bytes], None] | None,
        edge: Edge,
    ) -> None:
        self._edge = edge
        self._graphs: dict[Bucket, tuple[BucketInputs, Callable[[], Tensor]]] = {}
        super().__init__(params, group, progress, broadcast)

    def _make_pool(self, rank: int) -> DeviceKV:
        if self.layout.head_dim % 4:
            raise ConfigError(f"device: cuda needs heads of a multiple of 4 values, not {self.layout.head_dim}")
        return DeviceKV(self.layout, rank, self.blocks, self._edge)

    def _load(self, weights: Weights, params: EngineParams, group: RankGroup) -> None:
        with torch.inference_mode():
            self._device_model = DeviceModel(self.config, weights, params, group, self._edge, self.max_model_len)

    def follow(self, kind: Kind, steps: Sequence[SequenceStep], on_layers: OnLayers) -> None:
        """See Runner. Returns when the step is over: transfer threads may then read what it wrote."""
        with torch.inference_mode(), self._edge.queue():
            _, groups = self._queue(steps)
            over = self._edge.mark()
        _announce(groups, on_layers if kind == "prefill" else None)
        over.wait()

    def warm_up(self) -> float:
        """See Runner; also compiles the kernels of prefill and captures steps of every size that the pool has room for.

        Only rank 0 of a worker calls it; the others take part as in any step.
        """
        size = self.layout.block_size
        room = min(self.blocks * size, self.max_model_len)
        chunk = min(2 * size, room)
        blocks = list(range(block_count(chunk, size)))
        self._lead("prefill", [SequenceStep("", 0, 0, [0] * chunk, 0, blocks, None)], None)
        layers, heads = (0, self.layout.layers), (0, self.kv.data.shape[3])
        self.kv.scatter([0], layers, heads, (0, 1), self.kv.gather([0], layers, heads, (0, 1)))
        if self._edge.captures:
            for rows, longest in product(row_sizes(), context_sizes(self.max_model_len)):
                self._lead("decode", self._padding(rows, min(longest, room)), None)
        step = SequenceStep("", 0, 0, [0], 0, [0], DRAWN_BY_LEADER)
        self.decode([step])
        started = time.perf_counter()
        self.decode([step])
        return time.perf_counter() - started

    def _padding(self, rows: int, context: int) -> list[SequenceStep]:
        """Steps of one token each that all end at `context` in the same blocks."""
        blocks = [0] * block_count(context, self.layout.block_size)
        return [SequenceStep("", 0, 0, [0], context - 1, blocks, DRAWN_BY_LEADER)] * rows

    def _lead(self, kind: Kind, steps: Sequence[SequenceStep], on_layers: OnLayers | None) -> list[list[SampledToken]]:
        allowed = self.guide.begin(steps)
        if self._broadcast is not None:
            self._broadcast(pack_plan(kind, steps))
        with torch.inference_mode(), self._edge.queue():
            logits, groups = self._queue(steps)
            logits = take_scores(steps, logits)  # waits for the device where a prompt is to be scored
            draws = drawn(self._edge, steps, logits, allowed.result() if allowed else {})
            over = self._edge.mark()
        _announce(groups, on_layers)
        over.wait()
        return draws.tokens()

    def _queue(self, steps: Sequence[SequenceStep]) -> tuple[Tensor, list[_Group]]:
        """Queue a step: its logits, on rank 0 those of all ranks, and the marks of its groups of layers."""
        if not by_rows(steps):
            groups: list[_Group] = []
            batch = varlen_batch(self._edge, steps, self.layout.block_size)
            local = self._device_model.forward(
                batch, self.kv, lambda low, high: groups.append((low, high, self._edge.mark()))
            )
            return self._device_model.gather_logits(local), groups
        bucket = bucket_of(steps, self.max_model_len)
        if bucket is None:
            local = self._device_model.forward(row_batch(self._edge, steps, self.layout.block_size), self.kv, None)
        else:
            local = self._replay(bucket, steps)[: sum(len(step.tokens) for step in steps)]
        return self._device_model.gather_logits(local), [(0, self.layout.layers, self._edge.mark())]

    def _replay(self, bucket: Bucket, steps: Sequence[SequenceStep]) -> Tensor:
        """Run a step of that size; the first of its size is captured behind it."""
        if bucket in self._graphs:
            inputs, run = self._graphs[bucket]
            inputs.load(steps)
            return run()
        inputs = BucketInputs(self._edge, bucket, self.layout.block_size)
        inputs.load(steps)

        def forward() -> Tensor:
            return self._device_model.forward(inputs.batch, self.kv, None)

        logits = forward()
        self._graphs[bucket] = inputs, self._edge.capture(forward)
        return logits


def make_device_runner(
    params: EngineParams,
    group: RankGroup,
    progress: Callable[[int, int], None],
    broadcast: Callable[[bytes], None] | None,
) -> DeviceRunner:
    """The runner of `device: cuda`. Raises ConfigError where there is no GPU."""
    check_device(params.device)
    return DeviceRunner(params, group, progress, broadcast, CudaEdge())


def _announce(groups: Sequence[_Group], on_layers: OnLayers | None) -> None:
    """Say of each group that its KV is in the pool, as soon as it is."""
    if on_layers is not None:
        for low, high, mark in groups:
            mark.wait()
            on_layers(low, high)
