"""The monolithic loop: the same tokens whatever the batch, chunk, cache and pool; no block is ever left over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from baton.engine.block_pool import BlockPool
from baton.engine.local import LocalChoice, LocalEngine, Request
from baton.engine.runner import Runner
from baton.proto.errors import InvalidRequest
from baton.proto.sampling import SamplingParams
from baton.tests.test_engine_runner import build

Generate = Callable[..., list[list[LocalChoice]]]


def sampling(**changes: Any) -> SamplingParams:
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "seed": 1,
        "n": 1,
        "max_tokens": 12,
        "min_tokens": 0,
        "stop_token_ids": frozenset(),
        "logprobs": None,
    }
    return SamplingParams(**{**values, **changes})


def run(
    runner: Runner,
    requests: list[Request],
    *,
    chunk: int = 64,
    sequences: int = 8,
    blocks: int | None = None,
    prefix_cache: bool = True,
) -> tuple[list[list[LocalChoice]], LocalEngine, BlockPool]:
    """Everything generated, and a pool that is empty again."""
    pool = BlockPool(blocks or runner.blocks, runner.layout.block_size, prefix_cache)
    engine = LocalEngine(runner, pool, runner.kv.copy_blocks)
    results = engine.generate(requests, chunk, sequences)
    pool.check()
    assert pool.used == 0
    return results, engine, pool


def ids(results: list[list[LocalChoice]]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in choices] for choices in results]


def mixed() -> list[Request]:
    """Requests that use every part of the sampler, of lengths around block edges."""
    lengths = (1, 3, 4, 5, 8, 13, 16, 17)
    prompts = [[(7 * i + 31 * n) % 300 for i in range(n)] for n in lengths]
    kinds: list[dict[str, Any]] = [
        {"seed": 3},
        {"top_k": 20, "seed": 4, "n": 2},
        {"top_p": 0.8, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"n": 3, "seed": 9, "logprobs": 1},
        {"min_p": 0.1, "presence_penalty": 0.4},
        {"temperature": 0.0, "n": 2},
    ]
    return [(prompt, sampling(**kind)) for prompt, kind in zip(prompts, kinds, strict=True)]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "bfloat16-int8", "bfloat16-fp8"])
def runner(tiny_dir: Path, request: pytest.FixtureRequest) -> Runner:
    """By the model's dtype, and the pool's where that is another."""
    dtype, _, kv_dtype = request.param.partition("-")
    return build(tiny_dir, dtype=dtype, kv_dtype=kv_dtype or "auto", kv_blocks=128)


@pytest.fixture(scope="module")
def alone(runner: Runner) -> list[list[LocalChoice]]:
    """Each request in a batch of its own."""
    return [run(runner, [request], prefix_cache=False)[0][0] for request in mixed()]


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("sequences", [2, 8])
def test_st_10_batch_and_chunk_do_not_matter(
    runner: Runner, alone: list[list[LocalChoice]], chunk: int, sequences: int
) -> None:
    results, _, _ = run(runner, mixed(), chunk=chunk, sequences=sequences)
    if runner.layout.dtype != "float32":
        assert results == alone  # log probabilities too: the same bits
    assert ids(results) == ids(alone)


def test_preemption_does_not_matter(runner: Runner, alone: list[list[LocalChoice]]) -> None:
    results, engine, _ = run(runner, mixed(), blocks=9, chunk=16)
    assert engine.preemptions > 0
    assert ids(results) == ids(alone)


def test_a_stream_has_the_same_tokens_and_leaves_no_block_behind_when_it_is_closed(runner: Runner) -> None:
    request = (list(range(40, 60)), sampling())
    ((whole,),), _, _ = run(runner, [request])
    pool = BlockPool(runner.blocks, runner.layout.block_size, prefix_cache=True)
    engine = LocalEngine(runner, pool, runner.kv.copy_blocks)
    assert [token.token_id for token in engine.stream(*request, chunk=7)] == whole.token_ids
    begun = engine.stream(*request, chunk=64)
    assert [next(begun).token_id for _ in range(3)] == whole.token_ids[:3]
    begun.close()
    pool.check()
    assert pool.used == 0
    assert [token.token_id for token in engine.stream(*request, chunk=64)] == whole.token_ids
    with pytest.raises(ValueError, match="one choice"):
        next(engine.stream(request[0], sampling(n=2), chunk=64))


def test_a_prefix_hit_does_not_matter(runner: Runner, alone: list[list[LocalChoice]]) -> None:
    pool = BlockPool(runner.blocks, 4, True)
    engine = LocalEngine(runner, pool, runner.kv.copy_blocks)
    assert ids(engine.generate(mixed(), 64, 8)) == ids(alone)
    before = pool.prefix_hit_tokens
    assert ids(engine.generate(mixed(), 64, 8)) == ids(alone)
    assert pool.prefix_hit_tokens - before >= 4 + 4 + 12 + 12 + 16


def test_kv_13_recycled_blocks_are_not_mistaken_for_an_old_prompt(runner: Runner) -> None:
    prompt, flood = list(range(24)), [list(range(s, s + 24)) for s in (100, 200, 150)]
    pool = BlockPool(8, 4, True)
    engine = LocalEngine(runner, pool, runner.kv.copy_blocks)
    greedy = sampling(temperature=0.0, max_tokens=4)
    first = engine.generate([(prompt, greedy)], 64, 1)
    for other in flood:
        engine.generate([(other, greedy)], 64, 1)
    assert engine.generate([(prompt, greedy)], 64, 1) == first


def test_choices_differ_and_repeat_with_their_seed(runner: Runner) -> None:
    request = (list(range(10)), sampling(n=3, max_tokens=20))
    (choices,), _, _ = run(runner, [request])
    (again,), _, _ = run(runner, [request])
    assert choices == again
    assert len({tuple(choice.token_ids) for choice in choices}) == 3
    (other,), _, _ = run(runner, [(request[0], sampling(n=3, max_tokens=20, seed=2))])
    assert ids([other]) != ids([choices])


def test_a_stop_id_ends_a_choice_and_min_tokens_delays_it(runner: Runner) -> None:
    prompt = list(range(9))
    ((free,),), _, _ = run(runner, [(prompt, sampling(temperature=0.0))])
    stop = frozenset({free.token_ids[2]})
    first = free.token_ids.index(free.token_ids[2])
    ((stopped,),), _, _ = run(runner, [(prompt, sampling(temperature=0.0, stop_token_ids=stop))])
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: first + 1], "stop")
    ((late,),), _, _ = run(runner, [(prompt, sampling(temperature=0.0, stop_token_ids=stop, min_tokens=6))])
    assert not stop & set(late.token_ids[:6])
    assert free.finish_reason == "length"


def test_one_token_and_its_logprobs(runner: Runner) -> None:
    ((one,),), _, _ = run(runner, [([5], sampling(max_tokens=1, temperature=0.0, logprobs=2))])
    assert (len(one.token_ids), one.finish_reason) == (1, "length")
    assert one.tokens[0].top[0] == (one.token_ids[0], one.tokens[0].logprob)


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [(0, 5, "0 prompt tokens"), (250, 7, "context of 256"), (30, 4, "33 tokens in a pool of 8 x 4")],
)
def test_sp_01_what_can_never_fit_is_refused(runner: Runner, length: int, max_tokens: int, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        run(runner, [([1] * length, sampling(max_tokens=max_tokens))], blocks=8)


def test_sp_03_random_loads_in_small_pools_always_end(tiny_dir: Path) -> None:
    runner, generator = build(tiny_dir), torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    for _ in range(12):
        blocks = number(8, 17)
        requests: list[Request] = []
        for _ in range(12):
            length = number(1, 4 * blocks - 10)
            prompt = [number(0, 3) for _ in range(length)]
            requests.append((prompt, sampling(n=number(1, 4), max_tokens=number(1, 10), seed=number(0, 99))))
        results, engine, _ = run(runner, requests, blocks=blocks, chunk=number(1, 30), sequences=number(1, 6))
        assert [len(choices) for choices in results] == [params.n for _, params in requests]
        assert engine.steps < 4000
