"""The bare engine beside other engines, in turns on the same prompts and cores; used by benchmarks/engine.py.

Every side is a call that generates for a batch of prompts and returns the seconds. Prefill is the call that makes one
token; decode is what the call that makes `NEW` tokens takes longer, so both contain scheduling and sampling. Sides take
turns within each repeat, so that what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from baton.engine.block_pool import BlockPool
from baton.engine.local import LocalEngine
from baton.engine.runner import Runner
from baton.engine.step import DRAWN_BY_LEADER

Side = Callable[[Sequence[list[int]], int], float]

PREFILLS = ((1, 128), (1, 1024))  # sequences, prompt tokens
DECODES = ((1, 128), (8, 128), (32, 128), (64, 128), (1, 1024), (8, 1024))
CHUNK = 512  # prompt tokens of one of our steps, as in a prefill worker; a batch is prefilled at once, so that all of
# its sequences decode side by side from the first token on
NEW = 32
CORE = 0


def ours(runner: Runner) -> Side:
    """The engine without transfer."""
    size = runner.layout.block_size
    engine = LocalEngine(runner, BlockPool(runner.blocks, size, False), runner.kv.copy_blocks)

    def generate(prompts: Sequence[list[int]], new: int) -> float:
        sampling = replace(DRAWN_BY_LEADER.params, max_tokens=new)
        chunk = CHUNK if len(prompts) == 1 else sum(map(len, prompts))
        started = time.perf_counter()
        engine.generate([(prompt, sampling) for prompt in prompts], chunk, len(prompts))
        return time.perf_counter() - started

    return generate


@contextmanager
def peer(python: str, model: str) -> Iterator[tuple[str, Side]]:
    """vLLM in the Python `python`, its compute on core CORE: its name and the call. Raises RuntimeError."""
    sequences, tokens = max(batch for batch, _ in DECODES), max(length for _, length in DECODES) + NEW
    script = Path(__file__).with_name("engine_peers.py")
    process = subprocess.Popen(
        [python, str(script), model, str(sequences), str(tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "", "VLLM_CPU_OMP_THREADS_BIND": str(CORE)},
    )

    def answer(key: str) -> str:
        if process.stdout is None or not (line := process.stdout.readline()):
            raise RuntimeError(f"{python}: the peer ended; what it said is above")
        return str(json.loads(line)[key])

    def generate(prompts: Sequence[list[int]], new: int) -> float:
        if process.stdin is not None:
            process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
            process.stdin.flush()
        return float(answer("seconds"))

    try:
        yield answer("ready"), generate
    finally:
        process.communicate()  # the end of its input is its end


def random_prompts(batch: int, length: int) -> list[list[int]]:
    """Ids of words, drawn anew at each call: no cache helps anybody."""
    return [[random.randrange(1000, 40000) for _ in range(length)] for _ in range(batch)]


def prefill_rates(sides: Sequence[Side], batch: int, length: int, repeats: int) -> list[float]:
    """Prompt tokens a second of each side: medians, after a call that does not count."""
    _warm_up(sides, batch, length)
    rounds: list[list[float]] = []
    for _ in range(repeats):
        prompts = random_prompts(batch, length)
        rounds.append([side(prompts, 1) for side in sides])
    return [batch * length / statistics.median(times) for times in zip(*rounds, strict=True)]


def decode_rates(sides: Sequence[Side], batch: int, length: int, repeats: int) -> list[float]:
    """Tokens a second of each side, likewise."""
    _warm_up(sides, batch, length)
    rounds: list[list[float]] = []
    for _ in range(repeats):
        first, whole = random_prompts(batch, length), random_prompts(batch, length)
        rounds.append([side(whole, NEW) - side(first, 1) for side in sides])
    return [batch * (NEW - 1) / statistics.median(times) for times in zip(*rounds, strict=True)]


def _warm_up(sides: Sequence[Side], batch: int, length: int) -> None:
    for side in sides:
        side(random_prompts(batch, length), 2)


def against_peer(runner: Runner, python: str, model: str, repeats: int) -> None:
    """Prints one row for each case: ours, the peer's, the ratio. This process computes on core CORE meanwhile."""
    with peer(python, model) as (name, theirs), on_core(CORE):
        print(f"beside {name}, one core each, tokens/s:")
        sides = (ours(runner), theirs)
        for batch, length in PREFILLS:
            _row(f"prefill {length:5} tokens", prefill_rates(sides, batch, length, repeats))
        for batch, length in DECODES:
            _row(f"decode batch {batch:3} after {length:5}", decode_rates(sides, batch, length, repeats))


def against_llama(runner: Runner, program: str, model: str, repeats: int) -> None:
    """Prints one row: decode at batch 1 of `runner` beside llama.cpp with as many threads on a GGUF file."""
    threads = str(_threads())
    command = [program, "-m", model, "-p", "0", "-n", str(NEW), "-t", threads, "-r", str(repeats), "-o", "json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=_beside(program)).stdout
    (row,) = json.loads(found)
    print(f"beside llama.cpp, {row['model_type']}, {threads} threads, tokens/s:")
    (rate,) = decode_rates((ours(runner),), 1, 1, repeats)
    _row("decode batch   1 after     1", [rate, statistics.median(row["samples_ts"])])


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _beside(program: str) -> dict[str, str]:
    """An environment in which a program finds the libraries in its own folder."""
    paths = [str(Path(program).resolve().parent), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}


def _row(case: str, rates: Sequence[float]) -> None:
    mine, other = rates
    print(f"  {case}: ours {mine:6.0f}, peer {other:6.0f}, ratio {mine / other:4.2f}", flush=True)


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """This thread on one core only, and afterwards where it was."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
