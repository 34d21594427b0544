"""KV-04: a KV dtype that is not the model's, on prefill, on decode or on both, is a real conversion all the way.

The oracle is an engine with the same pool dtype whose KV is handed over by a naive copy. In bfloat16 models tokens and
log probabilities must be its own, bit for bit (attention over another dtype runs in float32); in float32 the tokens.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from baton.engine.paged_kv import KV_DTYPES
from baton.kv_transfer.params import Codec, TransferParams
from baton.proto.leg import key_of
from baton.tests.harness.handover import HandOver
from baton.tests.harness.model_rig import Rig, random_tokens
from baton.tests.harness.monolithic import Monolithic, sampling
from baton.tests.harness.rig import merged, running, tiny_config
from baton.tests.harness.worker_rig import decode_params, engine_params, prefill_params
from baton.tests.harness.worker_router import Answer, leg_message, pair

LENGTHS = (1, 4, 33)
COUNT = 8
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}


def prompt_of(length: int) -> list[int]:
    return [(length * 37 + 11 * index * index + index) % 250 for index in range(length)]


@pytest.mark.parametrize(
    ("dtype", "kv", "codec"),
    [
        ("bfloat16", ("float16", "float16"), "raw"),
        ("bfloat16", ("float16", "bfloat16"), "raw"),
        pytest.param("bfloat16", ("bfloat16", "float32"), "int8", marks=pytest.mark.slow),
        ("float32", ("bfloat16", "float32"), "raw"),
        ("float32", ("float32", "bfloat16"), "raw"),
        ("float32", ("float16", "bfloat16"), "fp8"),
        ("bfloat16", ("int8", "int8"), "raw"),
        ("bfloat16", ("bfloat16", "fp8"), "raw"),
        ("float32", ("int8", "float32"), "raw"),
        pytest.param("float32", ("fp8", "int8"), "raw", marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
async def test_kv_04_a_pair_equals_engines_with_these_pools(
    tiny_dir: Path, dtype: str, kv: tuple[str, str], codec: Codec
) -> None:
    engines = [engine_params(tiny_dir, dtype=dtype, kv_dtype=kind) for kind in kv]
    prefill, decode = prefill_params(engines[0]), decode_params(engines[1])
    transfer: TransferParams = dataclasses.replace(prefill.transfer, wire=codec)
    oracle = HandOver(tiny_dir, dtype, kv)
    async with pair(
        dataclasses.replace(prefill, transfer=transfer), dataclasses.replace(decode, transfer=transfer)
    ) as router:
        for length in LENGTHS:
            leg = leg_message(prompt_of(length), sampling(max_tokens=COUNT, logprobs=2))
            answer = Answer()
            await router.run(leg, answer)
            expected = oracle.run(prompt_of(length), COUNT, codec, logprobs=2)
            assert answer.ids() == [token.token_id for token in expected]
            if dtype == "bfloat16":
                scores = [pytest.approx(token.logprob, rel=1e-6) for token in expected]  # float32 on the wire
                assert [token.logprob for token in answer.tokens[0]] == scores
            width = min(WIDTH[kind] for kind in kv) if codec == "raw" else 1
            row = 16 * width + (4 if width == 1 else 0)
            (committed,) = router.decode.of(key_of(leg), "committed")
            assert committed.bytes == length * 2 * 2 * 2 * row  # layers x (k, v) x heads x row


async def test_kv_04_both_pools_bfloat16_equal_one_local_run(tiny_dir: Path) -> None:
    """float32 model, prefix caches on: the local engine's tokens with the same pool dtype, and not those without."""
    local = Monolithic(tiny_dir, kv_dtype="bfloat16")
    engine = engine_params(tiny_dir, kv_dtype="bfloat16")
    async with pair(prefill_params(engine), decode_params(engine)) as router:
        for length in (*LENGTHS, *LENGTHS):
            answer = await router.generate(prompt_of(length), sampling(max_tokens=COUNT, logprobs=0))
            (expected,) = local.run(prompt_of(length), max_tokens=COUNT, logprobs=0)
            assert answer.ids() == expected.token_ids
            scores = [token.logprob for token in expected.tokens]
            assert [token.logprob for token in answer.tokens[0]] == pytest.approx(scores, abs=2e-3)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
async def test_kv_04_a_pair_with_quantised_pools_equals_one_local_run(tiny_dir: Path, kv_dtype: str) -> None:
    """Prefix caches on, blocks of unequal size: the codes themselves travel, so every token is the same."""
    local = Monolithic(tiny_dir, dtype="bfloat16", kv_dtype=kv_dtype)
    engines = [engine_params(tiny_dir, dtype="bfloat16", kv_dtype=kv_dtype, block_size=size) for size in (8, 16)]
    async with pair(prefill_params(engines[0]), decode_params(engines[1])) as router:
        for length in (*LENGTHS, 70, *LENGTHS, 70):
            answer = await router.generate(prompt_of(length), sampling(max_tokens=COUNT, logprobs=0))
            (expected,) = local.run(prompt_of(length), max_tokens=COUNT, logprobs=0)
            assert answer.ids() == expected.token_ids
            scores = [token.logprob for token in expected.tokens]
            assert [token.logprob for token in answer.tokens[0]] == pytest.approx(scores, rel=1e-6)


@pytest.mark.slow
def test_kv_04_the_configuration_reaches_the_pools_and_the_wire(tiny_dir: Path, tmp_path: Path) -> None:
    oracle = HandOver(tiny_dir, "bfloat16", ("float32", "float16"), chunk=64)
    changes = {"model.dtype": "bfloat16", "kv.wire": "int8", "kv.dtype": "float32", "pools.decode.kv_dtype": "float16"}
    with running(tmp_path / "rig", merged(tiny_config(tiny_dir), changes)) as rig:
        for length in LENGTHS:
            answer = rig.client.generate(token_ids=prompt_of(length), max_tokens=COUNT, temperature=0, ignore_eos=True)
            assert answer.token_ids == [token.token_id for token in oracle.run(prompt_of(length), COUNT, "int8")]
            assert answer.timing.kv_bytes == length * 2 * 2 * 2 * (16 + 4)


@pytest.mark.slow
def test_kv_04_a_cluster_with_int8_pools_equals_one_local_run(tiny_dir: Path, tmp_path: Path) -> None:
    """Blocks of unequal size, and prefix hits on both sides."""
    local = Monolithic(tiny_dir, dtype="bfloat16", kv_dtype="int8")
    changes = {"model.dtype": "bfloat16", "kv.dtype": "int8", "pools.decode.block_size": 8}
    with running(tmp_path / "rig", merged(tiny_config(tiny_dir), changes)) as rig:
        for length in (*LENGTHS, 70, 33, 70):
            (expected,) = local.run(prompt_of(length), max_tokens=COUNT)
            wanted = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
            answer = rig.client.generate(token_ids=prompt_of(length), **wanted)
            assert answer.token_ids == expected.token_ids
            assert answer.timing.kv_bytes % (2 * 2 * 2 * (16 + 4)) == 0  # layers x (k, v) x heads x row


# What rounding K and V costs in logits of the tiny model (they spread over +-10), by the pool's dtype.
TOLERANCE = {"float16": 0.05, "bfloat16": 0.4, "float32": 1e-4, "int8": 0.4, "fp8": 3.0}


@pytest.mark.parametrize("kv_dtype", TOLERANCE)
def test_kv_04_logits_are_those_of_the_model_within_the_pools_rounding(tiny_dir: Path, kv_dtype: str) -> None:
    tokens = random_tokens(90, 250)
    exact = Rig(tiny_dir).sequence(tokens)
    rounded = Rig(tiny_dir, kv_dtype=kv_dtype)
    assert rounded.pools[0].dtype == KV_DTYPES[kv_dtype]
    whole = rounded.sequence(tokens)
    torch.testing.assert_close(whole, exact, atol=TOLERANCE[kv_dtype], rtol=0)
    torch.testing.assert_close(rounded.sequence(tokens, chunk=7), whole, atol=TOLERANCE[kv_dtype], rtol=0)


def test_kv_04_a_bfloat16_model_gains_from_wider_pools(tiny_dir: Path) -> None:
    """Nothing is reinterpreted: the more exact the pool, the nearer to the float32 model; bits hold for any chunk."""
    tokens = random_tokens(90, 250)
    exact = Rig(tiny_dir).sequence(tokens)
    errors = {}
    for kv_dtype in ("bfloat16", "float16", "float32", "int8", "fp8"):
        rig = Rig(tiny_dir, dtype="bfloat16", kv_dtype=kv_dtype)
        whole = rig.sequence(tokens)
        errors[kv_dtype] = float((whole - exact).abs().mean())
        assert torch.equal(rig.sequence(tokens, chunk=7), whole)
        assert torch.equal(rig.sequence(tokens, chunk=1), whole)
    assert errors["float16"] < 1.1 * errors["bfloat16"]
    assert errors["float32"] < 1.1 * errors["bfloat16"]
    assert errors["bfloat16"] < errors["int8"] < errors["fp8"]
