"""Where a step of the bare engine stands against this machine, all measured in the same run on one thread.

    .venv/bin/python benchmarks/engine_limits.py [--model smollm2-135m-instruct] [--dtype bfloat16] [--repeats 5]
        [--plot docs/step_time.svg]

- a decode step against its linear layers, timed alone in the order of the step, plus its KV at the read bandwidth;
- the linear layers of a prefill against the rate of one large matrix product;
- decode attention at a context of 8,192 tokens, keys and values out of memory, against the read bandwidth;
- the step time's law: least squares of a + b * batch + c * tokens of context over a grid, with the worst deviation.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from pathlib import Path

import torch
from baton.benchmarks.engine import (
    BATCHES,
    PROMPTS,
    kernels,
    layer_weights,
    load,
    product_rate,
    read_bandwidth,
    seconds,
    steps,
)
from baton.benchmarks.engine_plot import step_time_svg
from baton.engine.paged_kv import DTYPES
from baton.engine.runner import Runner
from baton.kernels.cpu_attention import plan_attention
from baton.kernels.memory import prefer_huge_pages

LONG = 8192
POOL_BYTES = 256 << 20  # more than the caches hold: each repeat reads keys and values from memory
GRID_BATCHES = (1, 4, 8, 16, 32, 64)
GRID_CONTEXTS = (64, 256, 1024)


def linears(runner: Runner, rows: int, logit_rows: int, repeats: int) -> float:
    """Seconds of a step's linear layers without anything between them."""
    model, config = runner._model, runner.config
    dtype = model._embedding.dtype
    hidden = torch.randn(rows, config.hidden).to(dtype)
    attended = torch.randn(rows, config.heads * config.head_dim).to(dtype)
    gated = torch.randn(rows, config.intermediate).to(dtype)

    def run() -> None:
        for index, layer in enumerate(model._layers):
            kept = logit_rows if index + 1 == len(model._layers) else rows
            layer.qkv(hidden)
            layer.output(attended[:kept])
            layer.gate_up(hidden[:kept])
            layer.down(gated[:kept])
        model._head(hidden[:logit_rows])

    with torch.inference_mode():
        return seconds(run, repeats)


def against_linears(runner: Runner, kv_token: int, bandwidth: float, repeats: int) -> None:
    """A row for each decode case."""
    for batch, context in BATCHES:
        step = seconds(partial(runner.decode, steps(batch, context - 1, 1)), repeats)
        alone = linears(runner, batch, batch, repeats)
        kv = batch * context * kv_token / bandwidth
        print(
            f"decode batch {batch:3}, context {context:5}: {step * 1e3:6.1f} ms = {step / (alone + kv):.2f} x "
            f"(linears {alone * 1e3:.1f} ms + KV {kv * 1e3:.1f} ms)"
        )


def prefill_linears(runner: Runner, product: float, repeats: int) -> None:
    """A row for each prompt length."""
    config = runner.config
    for tokens in PROMPTS:
        step = seconds(partial(runner.prefill, steps(1, 0, tokens), lambda low, high: None), repeats)
        alone = linears(runner, tokens, 1, repeats)
        one_layer = layer_weights(runner) / config.layers
        mixing = 2 * config.hidden * config.kv_heads * config.head_dim + config.hidden * config.heads * config.head_dim
        numbers = (config.layers - 1) * one_layer + mixing  # the last layer's rest runs for one row
        rate = 2 * numbers * tokens / alone
        print(
            f"prefill {tokens:5} tokens: {step * 1e3:6.1f} ms, of that linears {alone * 1e3:6.1f} ms "
            f"at {rate / 1e9:.0f} GFLOP/s, {rate / product:4.0%} of the product rate"
        )


def long_attention(runner: Runner, dtype: torch.dtype, bandwidth: float, repeats: int) -> None:
    """One row: the model's heads over blocks in random order."""
    config = runner.config
    blocks = LONG // 16
    page = config.kv_heads * 16 * config.head_dim
    layers = max(2, POOL_BYTES // (2 * blocks * page * dtype.itemsize))
    pool = torch.empty(layers, 2, blocks, config.kv_heads, 16, config.head_dim, dtype=dtype)
    prefer_huge_pages(pool).normal_()
    query = torch.randn(1, config.heads, config.head_dim).to(dtype)
    out = torch.empty_like(query)
    plan = plan_attention([0, 1], [LONG], [torch.randperm(blocks).tolist()], pool[0, 0])

    def run() -> None:
        for keys, values in pool:
            plan.attend(query, keys, values, 0.125, out)

    rate = pool.nbytes / seconds(run, repeats)
    print(f"decode attention at {LONG} tokens: {rate / 1e9:.1f} GB/s, {rate / bandwidth:4.0%} of the read bandwidth")


def law(runner: Runner, repeats: int, plot: Path | None) -> None:
    """Coefficients of the step time and the worst deviation from them; `plot`: where to draw both."""
    room = runner.blocks * 16
    cases = [(b, c) for b, c in itertools.product(GRID_BATCHES, GRID_CONTEXTS) if b * c <= room]
    times = [seconds(partial(runner.decode, steps(b, c - 1, 1)), repeats) for b, c in cases]
    facts = torch.tensor([[1.0, b, b * c] for b, c in cases], dtype=torch.float64)
    measured = torch.tensor(times, dtype=torch.float64)
    weight = 1 / measured  # relative deviations count
    found = torch.linalg.lstsq(facts * weight[:, None], (measured * weight)[:, None]).solution[:, 0]
    off = ((facts @ found - measured) / measured).abs()
    a, b, c = (found * torch.tensor([1e3, 1e6, 1e9], dtype=torch.float64)).tolist()
    print(
        f"step = {a:.2f} ms + {b:.0f} us * batch + {c:.0f} ns * tokens over {len(cases)} cases: "
        f"mean deviation {float(off.mean()):.1%}, worst {float(off.max()):.1%}"
    )
    if plot is not None:
        points = [(b, c, 1e3 * time) for (b, c), time in zip(cases, times, strict=True)]
        plot.write_text(step_time_svg(points, [1e3 * float(number) for number in found]))


def main() -> None:
    """Prints the limits and every comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="an SVG file for the law and what it was found from")
    args = parser.parse_args()
    runner, dtype = load(args.model, args.dtype, "none"), DTYPES[args.dtype]
    config = runner.config
    product, bandwidth = product_rate(runner, dtype, args.repeats), read_bandwidth(args.repeats)
    print(
        f"{args.model} {args.dtype}, 1 thread, {kernels()}: product {product / 1e9:.0f} GFLOP/s, "
        f"read {bandwidth / 1e9:.1f} GB/s"
    )
    against_linears(
        runner, 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize, bandwidth, args.repeats
    )
    prefill_linears(runner, product, args.repeats)
    long_attention(runner, dtype, bandwidth, args.repeats)
    law(runner, args.repeats, args.plot)


if __name__ == "__main__":
    main()
