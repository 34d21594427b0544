"""One rank of the engine on a GPU: the `Runner` of runner.py over kernels/gpu.

    upload -> forward (graphs, or launches) -> draws -> download -> the host waits, for the first time

While the device computes, the host has nothing to do with the step but to tell, mark by mark, which layers' KV is in
the pool; what follows in the queue does not wait for that. A batch that goes on has its next step queued before the
host waits for this one (device_flight.py), so the device does not wait for the host between them.
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
from .device_flight import Flight, can_run_ahead, next_step
from .device_kv import DeviceKV
from .device_model import DeviceModel
from .device_pieces import token_sizes
from .device_queue import LayerGroup, StepQueue
from .device_sampler import drawn
from .device_steps import context_sizes, row_sizes
from .params import EngineParams
from .prompt_scores import take_scores
from .ranks import RankGroup
from .runner import Runner, check_device
from .step import DRAWN_BY_LEADER, Kind, OnLayers, SampledToken, SequenceStep, pack_plan
from .weights import Weights


class DeviceRunner(Runner):
    """See Runner. `edge`: where it computes."""

    kv: DeviceKV
    ahead = 1

    def __init__(
        self,
        params: EngineParams,
        group: RankGroup,
        progress: Callable[[int, int], None],
        broadcast: Callable[[bytes], None] | None,
        edge: Edge,
    ) -> None:
        self._edge = edge
        super().__init__(params, group, progress, broadcast)

    def _make_pool(self, rank: int) -> DeviceKV:
        if self.layout.head_dim % 4:
            raise ConfigError(f"device: cuda needs heads of a multiple of 4 values, not {self.layout.head_dim}")
        return DeviceKV(self.layout, rank, self.blocks, self._edge)

    def _load(self, weights: Weights, params: EngineParams, group: RankGroup) -> None:
        with torch.inference_mode():
            model = DeviceModel(self.config, weights, params, group, self._edge, self.max_model_len)
        self._start(model, group)

    def _start(self, model: DeviceModel, group: RankGroup) -> None:
        """With a model that is loaded."""
        self._group = group
        self._queue = StepQueue(self._edge, model, self.kv, self.layout.block_size, self.max_model_len)
        self._flight: Flight | None = None  # of a leader
        self._before: tuple[int, Mark] | None = None  # of a follower: rows of the step before, and its end

    def follow(self, kind: Kind, steps: Sequence[SequenceStep], on_layers: OnLayers) -> None:
        """See Runner. Returns when the step before is over.

        What transfer threads are told to read was in a step that the leader has seen the end of: it needed this rank's
        part of a sum behind all that this rank wrote.
        """
        before, self._before = self._before, None
        with torch.inference_mode(), self._edge.queue():
            prior = None
            if before is not None and any(step.tokens[0] < 0 for step in steps):
                prior = torch.empty(before[0], dtype=torch.int64, device=self._edge.device)
                self._group.share(prior)
            _, groups = self._queue.put(steps, prior)
            self._before = len(steps), self._edge.mark()
        _announce(groups, on_layers if kind == "prefill" else None)
        if before is not None:
            before[1].wait()

    def decode_ahead(self, steps: Sequence[SequenceStep]) -> list[list[SampledToken]]:
        """See Runner. A batch with something that needs the host between its steps runs without that."""
        flight, self._flight = self._flight, None
        found = flight.rows_of(steps) if flight is not None else {}
        able = all(can_run_ahead(step) for step in steps)
        if flight is None or not found:
            if not able:
                return self.decode(steps)
            flight, found = self._take_off(steps, None), {row: row for row in range(len(steps))}
        if able and (following := self._following(steps, found)):
            self._flight = self._take_off(following, flight.ids)
            self._kv_is_written_by(self._flight)
        tokens = flight.tokens(list(found.values()))
        if self._flight is not None:
            self._flight.learn(tokens)
        return [[tokens[found[index]]] if index in found else [] for index in range(len(steps))]

    def _following(self, steps: Sequence[SequenceStep], found: dict[int, int]) -> list[SequenceStep]:
        """Behind the step that answers `found` (index: row): what these go on with, and what it does not answer."""
        size, longest = self.layout.block_size, self.max_model_len
        going_on = (
            next_step(step, found[index], size, longest) if index in found else step for index, step in enumerate(steps)
        )
        return [step for step in going_on if step is not None]

    def _take_off(self, steps: Sequence[SequenceStep], prior: Tensor | None) -> Flight:
        if self._broadcast is not None:
            self._broadcast(pack_plan("decode", steps))
        with torch.inference_mode(), self._edge.queue():
            if prior is not None and all(step.tokens[0] >= 0 for step in steps):
                prior = None
            if prior is not None:
                self._group.share(prior)
            logits, _ = self._queue.put(steps, prior)
            return Flight(steps, drawn(self._edge, steps, logits), self.layout.block_size)

    def _kv_is_written_by(self, flight: Flight) -> None:
        with self._edge.queue():
            self.kv.runs_ahead(flight.written, self._edge.mark())

    def warm_up(self) -> float:
        """See Runner; also compiles the kernels of prefill and captures steps of every size that the pool has room for.

        Only rank 0 of a worker calls it; the others take part as in any step.
        """
        size = self.layout.block_size
        room = min(self.blocks * size, self.max_model_len)
        chunk = min(2 * size, room)
        self._lead("prefill", self._chunks(chunk, chunk), None)
        layers, heads = (0, self.layout.layers), (0, self.kv.data.shape[3])
        self.kv.scatter([0], layers, heads, (0, 1), self.kv.gather([0], layers, heads, (0, 1)))
        if self._edge.captures:
            for tokens in token_sizes():
                self._lead("prefill", self._chunks(tokens, room), None)
            for rows, longest in product(row_sizes(), context_sizes(self.max_model_len)):
                self._lead("decode", self._padding(rows, min(longest, room)), None)
        step = SequenceStep("", 0, 0, [0], 0, [0], DRAWN_BY_LEADER)
        self.decode([step])
        started = time.perf_counter()
        self.decode([step])
        return time.perf_counter() - started

    def _chunks(self, tokens: int, room: int) -> list[SequenceStep]:
        """Chunks with so many tokens together, each of at most `room`, all in the same blocks."""
        lengths = [*[room] * (tokens // room), *([tokens % room] if tokens % room else [])]
        blocks = [list(range(block_count(length, self.layout.block_size))) for length in lengths]
        return [SequenceStep("", 0, 0, [0] * n, 0, own, None) for n, own in zip(lengths, blocks, strict=True)]

    def _padding(self, rows: int, context: int) -> list[SequenceStep]:
        """Steps of one token each that all end at `context` in the same blocks."""
        blocks = [0] * block_count(context, self.layout.block_size)
        return [SequenceStep("", 0, 0, [0], context - 1, blocks, DRAWN_BY_LEADER)] * rows

    def _lead(self, kind: Kind, steps: Sequence[SequenceStep], on_layers: OnLayers | None) -> list[list[SampledToken]]:
        self._flight = None
        allowed = self.guide.begin(steps)
        if self._broadcast is not None:
            self._broadcast(pack_plan(kind, steps))
        with torch.inference_mode(), self._edge.queue():
            logits, groups = self._queue.put(steps, None)
            logits = take_scores(steps, logits)  # waits for the device where a prompt is to be scored
            draws = drawn(self._edge, steps, logits, allowed.result() if allowed else {})
            over = self._edge.mark()
        _announce(groups, on_layers)
        over.wait()
        return draws.tokens()


def make_device_runner(
    params: EngineParams,
    group: RankGroup,
    progress: Callable[[int, int], None],
    broadcast: Callable[[bytes], None] | None,
) -> DeviceRunner:
    """The runner of `device: cuda`. Raises ConfigError where there is no GPU."""
    check_device(params.device)
    return DeviceRunner(params, group, progress, broadcast, CudaEdge())


def _announce(groups: Sequence[LayerGroup], on_layers: OnLayers | None) -> None:
    """Say of each group that its KV is in the pool, as soon as it is."""
    if on_layers is not None:
        for low, high, mark in groups:
            mark.wait()
            on_layers(low, high)
