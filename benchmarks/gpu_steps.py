"""Whole steps of the engine: decode by batch and context, prefill by length, and what the host adds to a step."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from baton.engine.device_steps import varlen_batch
from baton.engine.step import DRAWN_BY_LEADER, Draw, SequenceStep
from baton.proto.kv_layout import block_count

from .gpu_model import RandomRunner
from .gpu_setup import Row, Setup, each

_TARGETS = {1: 0.65, 64: 0.75}  # of the copy bandwidth, by batch
_GREEDY = dataclasses.replace(DRAWN_BY_LEADER.params, max_tokens=1 << 30)
_WARM = 3  # steps before those that are timed: the first is captured, with the second two are under way
_CHUNK = 256  # tokens of a prompt's chunk that the host could not launch in time


def steps(at: Setup) -> Iterator[Row]:
    """All rows; one model for all of them."""
    longest = max(*at.sizes.contexts, *at.sizes.prompts) + 16
    runner = RandomRunner(at, block_count(at.sizes.pool_tokens, 16), longest)
    parts: list[tuple[str, Callable[[], Iterable[Row]]]] = [
        (f"decode, {batch} x {context}", partial(_decode, at, runner, batch, context))
        for context in at.sizes.contexts
        for batch in at.sizes.batches
        if batch * (context + 16) <= at.sizes.pool_tokens
    ]
    parts += [(f"prefill, {tokens}", partial(_prefill, at, runner, tokens)) for tokens in at.sizes.prompts]
    parts += [("host", partial(_host, at, runner)), ("pieces", partial(_pieces, at, runner))]
    return each("steps", parts)


def _batch(batch: int, context: int, said: Sequence[Sequence[int]] = ()) -> list[SequenceStep]:
    """One new token each, behind `context` - 1 and what was said since, in blocks of its own."""
    each_has = block_count(context, 16) + 1
    prompt = [0] * (context - 1)
    rows = said or [[7 + index] for index in range(batch)]
    return [
        SequenceStep(
            *(str(index), 0, 0, [row[-1]], context - 2 + len(row)),
            blocks=range(index * each_has, (index + 1) * each_has),
            draw=Draw(_GREEDY, (0,), prompt, row),
        )
        for index, row in enumerate(rows)
    ]


def _wall(at: Setup, run: Callable[[], object]) -> float:
    """Seconds of a step as the engine sees it: from the plan to the tokens."""

    def timed() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    for _ in range(_WARM):
        run()
    return statistics.median(timed() for _ in range(at.sizes.repeats))


def _going_on(at: Setup, runner: RandomRunner, batch: int, context: int) -> float:
    """Seconds of a step of a batch that goes on: the next one is queued before this one's tokens are there."""
    said = [[7 + index] for index in range(batch)]
    context -= min(context // 2, _WARM + at.sizes.repeats)  # where it ends

    def run() -> None:
        for row, tokens in zip(said, runner.decode_ahead(_batch(batch, context, said)), strict=True):
            row.append(tokens[0].token_id)

    return _wall(at, run)


def _decode(at: Setup, runner: RandomRunner, batch: int, context: int) -> Iterator[Row]:
    seconds = _going_on(at, runner, batch, context)
    shape = at.sizes.model
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * at.model_dtype.itemsize
    moved = runner.weight_bytes + batch * context * kv
    # a copy's figure counts bytes both ways, and a step only reads: the same bytes a second are the same share
    share = moved / seconds / at.bandwidth
    yield Row(
        "decode", "step", f"{batch} x {context}", seconds, batch / seconds, "tokens/s", share, _TARGETS.get(batch)
    )


def _prefill(at: Setup, runner: RandomRunner, tokens: int) -> Iterator[Row]:
    seconds = _wall(at, lambda: runner.prefill([_prompt(tokens)], lambda low, high: None))
    shape = at.sizes.model
    head = shape.vocab * shape.hidden
    work = 2.0 * (runner.weights - head) * tokens + 2.0 * head
    work += 2.0 * tokens * tokens * shape.heads * shape.head_dim * shape.layers
    rate = work / seconds
    yield Row("prefill", "step", f"{tokens} tokens", seconds, rate / 1e12, "TFLOP/s", rate / at.flops, None)


def _prompt(tokens: int) -> SequenceStep:
    draw = Draw(_GREEDY, (0,), [0] * tokens, [])
    ids = [index % 300 for index in range(tokens)]
    return SequenceStep("p", 0, 0, ids, 0, range(block_count(tokens, 16)), draw)


def _host(at: Setup, runner: RandomRunner) -> Iterator[Row]:
    """A graph alone, the same launches one by one, and what the engine's step takes beside the graph: where the host
    waits for each step, and where the next one is queued before."""
    context = min(at.sizes.contexts)
    batch = _batch(1, context - 1)
    step = _wall(at, lambda: runner.decode(batch))
    going_on = _going_on(at, runner, 1, context)
    (inputs, run) = next(entry for bucket, entry in runner._queue.captured.items() if bucket.rows == 1)
    with at.edge.queue():
        inputs.load(batch)
        graph = at.seconds(run)
        eager = at.seconds(lambda: runner.model.forward(inputs.batch, runner.kv, None))
    yield Row("host", "step as a graph", "1", graph, 1e6 * graph, "us")
    yield Row("host", "step by launches", "1", eager, 1e6 * eager, "us")
    yield Row("host", "beside the graph, step by step", "1", step - graph, 1e6 * (step - graph), "us")
    yield Row("host", "beside the graph, running ahead", "1", going_on - graph, 1e6 * (going_on - graph), "us")


def _pieces(at: Setup, runner: RandomRunner) -> Iterator[Row]:
    """A chunk in pieces, and the same by launches."""
    tokens = min(_CHUNK, *at.sizes.prompts)
    step = _prompt(tokens)

    def launches() -> None:
        with at.edge.queue(), torch.inference_mode():
            runner.model.forward(varlen_batch(at.edge, [step], 16), runner.kv, None)
        at.wait()

    pieces, eager = _wall(at, lambda: runner.prefill([step], None)), _wall(at, launches)
    yield Row("host", "chunk in pieces", f"{tokens} tokens", pieces, 1e6 * pieces, "us")
    yield Row("host", "chunk by launches", f"{tokens} tokens", eager, 1e6 * eager, "us")
