"""The bare engine on one core against this machine's limits, measured in the same run; one row a case.

    .venv/bin/python benchmarks/engine.py [--model smollm2-135m-instruct] [--dtype bfloat16] [--repeats 5]
    .venv/bin/python benchmarks/engine.py --kv-dtype bfloat16 int8 fp8     decode beside each other, by the pool's type
    .venv/bin/python benchmarks/engine.py --invariance     the same for `engine.batch_invariant` true and false

Prefill is compared with the best matrix product of the model's largest layer (2 FLOPs per weight and token), decode
with reading every weight and the batch's KV once at the machine's read bandwidth. Medians after a warm-up.

Beside other engines in the same run (engine_compare.py), on the same weights and prompts:

    --peer-python VENV/bin/python --peer-model DIR   vLLM's CPU build on DIR, a Hugging Face directory, one core each
    --llama-bench PATH --llama-model FILE.gguf       llama.cpp's llama-bench, two threads each
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from baton.benchmarks import engine_compare
from baton.engine.paged_kv import DTYPES, KV_DTYPES, bytes_per_block
from baton.engine.params import EngineParams, Quantization
from baton.engine.ranks import SingleRank
from baton.engine.runner import Runner
from baton.engine.step import DRAWN_BY_LEADER, SequenceStep
from baton.kernels.native import library

BLOCK = 16
PROMPTS = (128, 512, 1024)
BATCHES = ((1, 128), (8, 128), (32, 128), (64, 128), (1, 1024), (8, 1024))  # sequences, context
READ_BYTES = 256 << 20


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` timings of a call, after one that does not count."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def load(
    model: str,
    dtype: str,
    quantization: Quantization,
    threads: int = 1,
    kv_dtype: str = "auto",
    batch_invariant: bool = True,
) -> Runner:
    """One rank, room for the largest case."""
    blocks = max(batch * (-(-(context + engine_compare.NEW) // BLOCK)) for batch, context in BATCHES)
    params = EngineParams(
        model_path=model,
        dtype=dtype,
        quantization=quantization,
        sparsity="auto",
        device="cpu",
        threads=threads,
        block_size=BLOCK,
        kv_blocks=blocks,
        kv_bytes=0,
        kv_dtype=kv_dtype,
        max_model_len=None,
        batch_invariant=batch_invariant,
        prefix_cache=False,
        layer_group=4,
        tensor_parallel=1,
    )
    return Runner(params, SingleRank(), lambda done, total: None, None)


def kernels() -> str:
    """Which ones run: our C library's, or torch's where there is none."""
    return "torch kernels" if library() is None else "C kernels"


def read_bandwidth(repeats: int) -> float:
    """Bytes a second that one core reads from memory."""
    data = torch.zeros(READ_BYTES // 4)
    return READ_BYTES / seconds(lambda: data.dot(data), repeats)


def product_rate(runner: Runner, dtype: torch.dtype, repeats: int) -> float:
    """FLOP/s of a plain product of 512 rows with the model's gate and up projection."""
    config = runner.config
    rows = torch.randn(512, config.hidden).to(dtype)
    weight = torch.randn(config.hidden, 2 * config.intermediate).to(dtype)
    flops = 2 * rows.shape[0] * weight.numel()
    return flops / seconds(lambda: rows @ weight, repeats)


def layer_weights(runner: Runner) -> int:
    """Numbers that every token is multiplied with, the head left out."""
    c = runner.config
    return c.layers * (2 * c.hidden * (c.heads + c.kv_heads) * c.head_dim + 3 * c.hidden * c.intermediate)


def steps(batch: int, start: int, tokens: int) -> list[SequenceStep]:
    """`batch` sequences with `tokens` new tokens at `start`, each in blocks of its own."""
    per = -(-(start + tokens) // BLOCK)
    return [
        SequenceStep(f"s{i}", 0, 0, [(7 * t + i) % 30000 for t in range(tokens)], start, tables, DRAWN_BY_LEADER)
        for i in range(batch)
        for tables in [list(range(i * per, (i + 1) * per))]
    ]


def against_limits(runner: Runner, model: str, dtype_name: str, repeats: int) -> None:
    """Prints the limits, then one row for each case."""
    dtype, config = DTYPES[dtype_name], runner.config
    weights = layer_weights(runner)
    flops, bandwidth = product_rate(runner, dtype, repeats), read_bandwidth(repeats)
    limits = f"product {flops / 1e9:.0f} GFLOP/s, read {bandwidth / 1e9:.1f} GB/s"
    print(f"{model} {dtype_name}, 1 thread, {kernels()}: {limits}")

    def ignore(low: int, high: int) -> None:
        """Nobody waits for the layers."""

    for tokens in PROMPTS:
        took = seconds(partial(runner.prefill, steps(1, 0, tokens), ignore), repeats)
        rate, limit = tokens / took, flops / (2 * weights)
        print(f"prefill {tokens:5} tokens: {rate:7.0f} tokens/s, {rate / limit:4.0%} of the product rate")
    kv_token = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize
    for batch, context in BATCHES:
        plan = steps(batch, context - 1, 1)
        took = seconds(partial(runner.decode, plan), repeats)
        read = (weights + config.hidden * config.vocab_size) * dtype.itemsize + batch * context * kv_token
        print(
            f"decode batch {batch:3}, context {context:5}: {batch / took:6.0f} tokens/s, {took * 1e3:6.1f} ms a step, "
            f"{read / took / bandwidth:4.0%} of the read bandwidth"
        )


def beside_each_other(runners: dict[str, Runner], repeats: int) -> None:
    """Prints prefill and decode of several runners, in turns: one row for each case."""
    sizes = ", ".join(f"{kind} {bytes_per_block(runner.layout, 0) // BLOCK}" for kind, runner in runners.items())
    print(f"bytes of KV a token: {sizes}; 1 thread, {kernels()}")
    for tokens in PROMPTS:
        prompt = steps(1, 0, tokens)
        took = in_turns({kind: partial(runner.prefill, prompt, None) for kind, runner in runners.items()}, repeats)
        print(f"prefill {tokens:5} tokens: {_rates(took, tokens)}")
    for batch, context in BATCHES:
        plan = steps(batch, context - 1, 1)
        took = in_turns({kind: partial(runner.decode, plan) for kind, runner in runners.items()}, repeats)
        print(f"decode batch {batch:3}, context {context:5}: {_rates(took, batch)}")


def in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each call."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            took[name].append(seconds(call, 3))
    return {name: statistics.median(times) for name, times in took.items()}


def _rates(took: dict[str, float], tokens: int) -> str:
    return ", ".join(f"{name} {tokens / one:6.0f}" for name, one in took.items()) + " tokens/s"


def main() -> None:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--quantization", default="none", choices=("none", "w8a8", "int4"), help="of our weights")
    parser.add_argument("--kv-dtype", nargs="+", choices=tuple(KV_DTYPES), help="pools to measure decode with, only")
    parser.add_argument("--invariance", action="store_true", help="what `engine.batch_invariant` costs, only")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-python")
    parser.add_argument("--peer-model")
    parser.add_argument("--llama-bench")
    parser.add_argument("--llama-model")
    args = parser.parse_args()
    if (args.peer_python is None) != (args.peer_model is None):
        parser.error("--peer-python and --peer-model go together")
    if (args.llama_bench is None) != (args.llama_model is None):
        parser.error("--llama-bench and --llama-model go together")
    if args.kv_dtype:
        kinds = {kind: load(args.model, args.dtype, args.quantization, kv_dtype=kind) for kind in args.kv_dtype}
        beside_each_other(kinds, args.repeats)
        return
    if args.invariance:
        ways = {"invariant": True, "free": False}
        both = {name: load(args.model, args.dtype, args.quantization, batch_invariant=on) for name, on in ways.items()}
        beside_each_other(both, args.repeats)
        return
    runner = load(args.model, args.dtype, args.quantization)
    against_limits(runner, args.model, args.dtype, args.repeats)
    if args.peer_python:
        engine_compare.against_peer(runner, args.peer_python, args.peer_model, args.repeats)
    if args.llama_bench:
        two = load(args.model, args.dtype, args.quantization, threads=2)
        engine_compare.against_llama(two, args.llama_bench, args.llama_model, args.repeats)


if __name__ == "__main__":
    main()
