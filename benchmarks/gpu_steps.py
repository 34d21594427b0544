"""Whole steps of the engine: decode by batch and context, prefill by length, and what the host adds to a step."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence

from baton.engine.step import DRAWN_BY_LEADER, Draw, SequenceStep
from baton.proto.kv_layout import block_count

from .gpu_model import RandomRunner
from .gpu_setup import Row, Setup

_TARGETS = {1: 0.65, 64: 0.75}  # of the copy bandwidth, by batch
_GREEDY = dataclasses.replace(DRAWN_BY_LEADER.params)


def steps(at: Setup) -> Iterator[Row]:
    """All rows; one model for all of them."""
    longest = max(*at.sizes.contexts, *at.sizes.prompts) + 16
    runner = RandomRunner(at, block_count(at.sizes.pool_tokens, 16), longest)
    for context in at.sizes.contexts:
        for batch in at.sizes.batches:
            if batch * (context + 1) <= at.sizes.pool_tokens:
                yield _decode(at, runner, batch, context)
    for tokens in at.sizes.prompts:
        yield _prefill(at, runner, tokens)
    yield from _host(at, runner)


def _batch(batch: int, context: int) -> list[SequenceStep]:
    """One new token each, behind `context` - 1, in blocks of its own."""
    each = block_count(context, 16)
    draw = Draw(_GREEDY, (0,), [0] * (context - 1), [0])
    return [
        SequenceStep(str(index), 0, 0, [7 + index], context - 1, range(index * each, (index + 1) * each), draw)
        for index in range(batch)
    ]


def _wall(at: Setup, runner: RandomRunner, batch: Sequence[SequenceStep], prefill: bool = False) -> float:
    """Seconds of a step as the engine sees it: from the plan to the tokens."""

    def run() -> float:
        started = time.perf_counter()
        if prefill:
            runner.prefill(batch, lambda low, high: None)
        else:
            runner.decode(batch)
        return time.perf_counter() - started

    run()
    run()  # the first was compiled, and captured
    return statistics.median(run() for _ in range(at.sizes.repeats))


def _decode(at: Setup, runner: RandomRunner, batch: int, context: int) -> Row:
    seconds = _wall(at, runner, _batch(batch, context))
    shape = at.sizes.model
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * at.model_dtype.itemsize
    moved = runner.weight_bytes + batch * context * kv
    # a copy's figure counts bytes both ways, and a step only reads: the same bytes a second are the same share
    share = moved / seconds / at.bandwidth
    return Row(
        "decode", "step", f"{batch} x {context}", seconds, batch / seconds, "tokens/s", share, _TARGETS.get(batch)
    )


def _prefill(at: Setup, runner: RandomRunner, tokens: int) -> Row:
    draw = Draw(_GREEDY, (0,), [0] * tokens, [])
    step = SequenceStep("p", 0, 0, [index % 300 for index in range(tokens)], 0, range(block_count(tokens, 16)), draw)
    seconds = _wall(at, runner, [step], prefill=True)
    shape = at.sizes.model
    head = shape.vocab * shape.hidden
    work = 2.0 * (runner.weights - head) * tokens + 2.0 * head
    work += 2.0 * tokens * tokens * shape.heads * shape.head_dim * shape.layers
    rate = work / seconds
    return Row("prefill", "step", f"{tokens} tokens", seconds, rate / 1e12, "TFLOP/s", rate / at.flops, None)


def _host(at: Setup, runner: RandomRunner) -> Iterator[Row]:
    """A graph alone, the same launches one by one, and what the engine's step takes beside the graph."""
    batch = _batch(1, min(at.sizes.contexts))
    step = _wall(at, runner, batch)
    (inputs, run) = next(entry for bucket, entry in runner._queue.captured.items() if bucket.rows == 1)
    with at.edge.queue():
        inputs.load(batch)
        graph = at.seconds(run)
        eager = at.seconds(lambda: runner.model.forward(inputs.batch, runner.kv, None))
    yield Row("host", "step as a graph", "1", graph, 1e6 * graph, "us")
    yield Row("host", "step by launches", "1", eager, 1e6 * eager, "us")
    yield Row("host", "beside the graph", "1", step - graph, 1e6 * (step - graph), "us")
