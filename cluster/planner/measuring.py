"""Runs grids of steps on a live engine and takes their times: what `baton calibrate` fits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...proto.kv_layout import block_count
from ...proto.sampling import SamplingParams
from ...proto.step_time import Features, decode_features, prefill_features

if TYPE_CHECKING:
    from ...engine.runner import Runner
    from ...engine.step import SequenceStep

_CHUNKS = (16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
_STARTS = (0, 64, 256, 1024, 2048, 4096)
_BATCHES = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256)
_CONTEXTS = (32, 256, 1024, 4096)
_MOST_S = 3.0  # a step that is expected to take longer is left out


@dataclass(frozen=True, slots=True)
class Timed:
    """One cell of a grid."""

    features: Features  # of proto/step_time.py
    size: int  # tokens of a chunk, or sequences
    context: int  # end of the chunk, or KV tokens of all sequences
    seconds: float  # median


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells to run: chunks (start, stop) and batches (sequences, tokens of each)."""

    chunks: tuple[tuple[int, int], ...]
    batches: tuple[tuple[int, int], ...]

    @property
    def cells(self) -> int:
        """In all."""
        return len(self.chunks) + len(self.batches)


def grid(max_tokens: int, max_sequences: int, max_model_len: int, pool_tokens: int, block_size: int) -> Grid:
    """What fits the engine's limits. Each sequence has blocks of its own, so that no cache holds what would not be."""
    longest = min(max_model_len, pool_tokens) - 1
    sizes = sorted({size for size in _CHUNKS if size < max_tokens} | {max_tokens})
    chunks = [(start, start + size) for start in _STARTS for size in sizes if start + size <= longest]
    batches = [
        (count, context)
        for count in sorted({count for count in _BATCHES if count < max_sequences} | {max_sequences})
        for context in _CONTEXTS
        if context < longest and count * block_count(context + 1, block_size) * block_size <= pool_tokens
    ]
    return Grid(tuple(chunks), tuple(batches))


def run(
    runner: Runner, cells: Grid, repeats: int, seed: int, told: Callable[[], None]
) -> tuple[list[Timed], list[Timed]]:
    """(prefill, decode). Rounds go through all cells in another order each, so that a slow minute touches all alike.

    `told` is called after each step. The pool must not be in use.
    """
    order = random.Random(seed)
    chunks = [(cell, _chunk(runner, *cell)) for cell in cells.chunks]
    batches = [(cell, _batch(runner, *cell)) for cell in cells.batches]
    every: list[tuple[Any, list[SequenceStep]]] = [*chunks, *batches]
    times: dict[tuple[bool, Any], list[float]] = {}
    for number in range(repeats + 1):
        order.shuffle(every)
        for cell, steps in every:
            prefill = any(step.draw is not None and not step.draw.generated for step in steps)
            if times.get((prefill, cell), [0.0])[0] > _MOST_S:
                continue
            started = time.perf_counter()
            runner.prefill(steps, None) if prefill else runner.decode(steps)
            took = time.perf_counter() - started
            if number:  # the first round warms up
                times.setdefault((prefill, cell), []).append(took)
            told()
    return list(_prefills(cells, times)), list(_decodes(cells, times))


def _prefills(cells: Grid, times: dict[tuple[bool, Any], list[float]]) -> Iterator[Timed]:
    for start, stop in cells.chunks:
        if taken := times.get((True, (start, stop))):
            yield Timed(prefill_features([(start, stop)]), stop - start, stop, _median(taken))


def _decodes(cells: Grid, times: dict[tuple[bool, Any], list[float]]) -> Iterator[Timed]:
    for count, context in cells.batches:
        if taken := times.get((False, (count, context))):
            yield Timed(decode_features([context] * count), count, count * context, _median(taken))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _chunk(runner: Runner, start: int, stop: int) -> list[SequenceStep]:
    from ...engine.step import Draw, SequenceStep

    size = runner.layout.block_size
    ids = [number % (runner.vocab_size - 1) + 1 for number in range(start, stop)]
    draw = Draw(_greedy(), (0,), ids, [])
    return [SequenceStep("calibrate", 0, 0, ids, start, list(range(block_count(stop, size))), draw)]


def _batch(runner: Runner, count: int, context: int) -> list[SequenceStep]:
    from ...engine.step import Draw, SequenceStep

    each = block_count(context + 1, runner.layout.block_size)
    draw = Draw(_greedy(), (0,), [1], [1])
    return [
        SequenceStep(f"calibrate-{i}", 0, 0, [1], context, list(range(i * each, (i + 1) * each)), draw)
        for i in range(count)
    ]


def _greedy() -> SamplingParams:
    neutral: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1, "min_tokens": 0, "logprobs": None}
    return SamplingParams(**neutral, temperature=0.0, seed=0, max_tokens=2**20, stop_token_ids=frozenset())
