"""KV-02: fewer KV heads than ranks. A head is then held by several ranks; each that needs it gets it once, the byte
counter says so, and the tokens are those of one local engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from baton.proto.leg import key_of
from baton.tests.harness.monolithic import Monolithic, sampling
from baton.tests.harness.tiny_model import write_tiny_model
from baton.tests.harness.worker_rig import decode_params, engine_params, prefill_params
from baton.tests.harness.worker_router import Answer, leg_message, pair

LAYERS, HEAD_DIM, COUNT = 2, 16, 8
LENGTHS = (1, 4, 21)


def prompt_of(length: int) -> list[int]:
    return [(length * 41 + 7 * index * index + 3 * index) % 250 for index in range(length)]


async def check(model: Path, kv_heads: int, tp: tuple[int, int]) -> None:
    """A pair with these degrees, on blocks of 8 and 4: tokens and bytes at every length."""
    alone = Monolithic(model)
    held = sum(  # heads over all decode ranks: each has its share, but at least one
        stop - start
        for start, stop in (
            (rank * kv_heads // tp[1], max((rank + 1) * kv_heads // tp[1], rank * kv_heads // tp[1] + 1))
            for rank in range(tp[1])
        )
    )
    prefill = engine_params(model, tensor_parallel=tp[0], block_size=8)
    decode = engine_params(model, tensor_parallel=tp[1])
    async with pair(prefill_params(prefill), decode_params(decode)) as router:
        for length in LENGTHS:
            leg = leg_message(prompt_of(length), sampling(max_tokens=COUNT))
            answer = Answer()
            await router.run(leg, answer)
            assert answer.ids() == alone.run(prompt_of(length), max_tokens=COUNT)[0].token_ids
            (committed,) = router.decode.of(key_of(leg), "committed")
            assert committed.bytes == length * LAYERS * 2 * held * HEAD_DIM * 4


@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (2, 2)], ids=["prefill only", "decode only", "both"])
async def test_kv_02_one_head_on_two_ranks(tmp_path: Path, tp: tuple[int, int]) -> None:
    await check(write_tiny_model(tmp_path / "model", kv_heads=1), 1, tp)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [(4, 1), (1, 4), (4, 2), (2, 4), (4, 4), (3, 4), (4, 3)])
async def test_kv_02_two_heads_on_four_ranks(tmp_path: Path, tp: tuple[int, int]) -> None:
    await check(write_tiny_model(tmp_path / "model", kv_heads=2), 2, tp)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)])
async def test_kv_01_degrees_and_heads(tmp_path: Path, tp: tuple[int, int], kv_heads: int) -> None:
    await check(write_tiny_model(tmp_path / "model", kv_heads=kv_heads), kv_heads, tp)
