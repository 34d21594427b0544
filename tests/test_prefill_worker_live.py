"""Live workers against the monolithic engine: the same tokens, and empty pools after every test (O-eq, O-pool)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from baton.proto import failpoints
from baton.proto import worker_pb2 as pb
from baton.proto.leg import key_of, ref_of
from baton.tests.harness.monolithic import Monolithic, sampling
from baton.tests.harness.worker_rig import decode_params, engine_params, prefill_params
from baton.tests.harness.worker_router import Answer, leg_message, pair

LENGTHS = (1, 3, 4, 5, 8, 15, 16, 17, 33, 60)


def prompt_of(length: int, start: int = 7) -> list[int]:
    return [(start * (length + 1) + 13 * index) % 250 for index in range(length)]


@pytest.fixture(scope="module")
def alone(tiny_dir: Path) -> Monolithic:
    """The oracle."""
    return Monolithic(tiny_dir)


def check(alone: Monolithic, prompt: Sequence[int], answer: Answer, **changes: Any) -> None:
    """The answer is that of the monolithic run, to the last choice, token and reason."""
    expected = alone.run(prompt, **changes)
    assert [answer.ids(choice) for choice in sorted(answer.tokens)] == [choice.token_ids for choice in expected]
    assert answer.reasons == [choice.finish_reason for choice in expected]


ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # prefill engine, decode engine, chunk
    "1-to-1": ({}, {}, 16),
    "blocks-4-to-8": ({}, {"block_size": 8, "kv_blocks": 32}, 64),
    "blocks-16-to-4": ({"block_size": 16, "kv_blocks": 16}, {}, 7),
    "tp-1-to-2": ({}, {"tensor_parallel": 2}, 16),
    "tp-2-to-1": ({"tensor_parallel": 2}, {}, 16),
    "tp-2-to-2-blocks-4-to-16": ({"tensor_parallel": 2}, {"tensor_parallel": 2, "block_size": 16, "kv_blocks": 16}, 16),
    "one-layer-group": ({"layer_group": 2}, {}, 512),
    "no-prefix-cache": ({"prefix_cache": False}, {"prefix_cache": False}, 16),
}


@pytest.mark.parametrize("row", ROWS)
async def test_answers_equal_the_monolithic_run(tiny_dir: Path, alone: Monolithic, row: str) -> None:
    prefill, decode, chunk = ROWS[row]
    prefill_side = prefill_params(engine_params(tiny_dir, **prefill), max_batch_tokens=chunk)
    async with pair(prefill_side, decode_params(engine_params(tiny_dir, **decode))) as router:
        prompts = [prompt_of(length) for length in LENGTHS]
        params = sampling(max_tokens=12)
        answers = await asyncio.gather(*(router.generate(prompt, params) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        check(alone, prompt, answer, max_tokens=12)


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 10},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.3, "max_tokens": 10},
        {"n": 2, "temperature": 1.0, "seed": 5, "logprobs": 4, "max_tokens": 5},
        {"max_tokens": 2},
        {"max_tokens": 3, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    ],
    ids=["n3", "sampled", "logprobs", "two", "penalties"],
)
@pytest.mark.parametrize(
    "length", [pytest.param(5, marks=pytest.mark.slow), 8, pytest.param(21, marks=pytest.mark.slow)]
)
async def test_sampling_equals_the_monolithic_run(
    tiny_dir: Path, alone: Monolithic, changes: dict[str, Any], length: int
) -> None:
    async with pair(prefill_params(engine_params(tiny_dir)), decode_params(engine_params(tiny_dir))) as router:
        answer = await router.generate(prompt_of(length), sampling(**changes))
    check(alone, prompt_of(length), answer, **changes)
    for choice, expected in zip(sorted(answer.tokens), alone.run(prompt_of(length), **changes), strict=True):
        for token, local in zip(answer.tokens[choice], expected.tokens, strict=True):
            assert (token.HasField("logprob"), len(token.top_logprobs)) == (local.logprob is not None, len(local.top))
            assert local.logprob is None or token.logprob == pytest.approx(local.logprob, abs=1e-5)


async def test_prefix_hits_on_either_side_change_nothing(tiny_dir: Path, alone: Monolithic) -> None:
    prompt, longer = prompt_of(33), [*prompt_of(33), 1, 2, 3, 4, 5, 6, 7]
    params = sampling(max_tokens=6)
    async with pair(prefill_params(engine_params(tiny_dir)), decode_params(engine_params(tiny_dir))) as router:
        await router.generate(prompt, sampling(max_tokens=1))  # on P only
        for asked in (prompt, prompt, longer):  # then a hit on P, on both, and on both for a part
            check(alone, asked, await router.generate(asked, params), max_tokens=6)
        assert router.prefill.load.prefix_hit_tokens >= 32 + 32 + 32
        assert router.decode.load.prefix_hit_tokens >= 32 + 32
        salted = await router.generate(prompt, params, cache_salt="another tenant")
        check(alone, prompt, salted, max_tokens=6)
        assert router.prefill.load.prefix_hit_tokens < 200


async def test_st_02_one_token_takes_no_decode_worker(tiny_dir: Path, alone: Monolithic) -> None:
    async with pair(prefill_params(engine_params(tiny_dir)), decode_params(engine_params(tiny_dir))) as router:
        check(alone, prompt_of(9), await router.generate(prompt_of(9), sampling(max_tokens=1)), max_tokens=1)
        assert router.decode.load.steps == 0


async def test_st_01_a_first_token_that_ends_the_request_frees_the_reservation(
    tiny_dir: Path, alone: Monolithic
) -> None:
    first = alone.run(prompt_of(9), max_tokens=1)[0].token_ids[0]
    params = sampling(stop_token_ids=frozenset({first}))
    async with pair(prefill_params(engine_params(tiny_dir)), decode_params(engine_params(tiny_dir))) as router:
        answer = await router.generate(prompt_of(9), params)
        assert (answer.ids(), answer.reasons) == ([first], ["stop"])
        await router.decode.wait_idle()
        assert [event.WhichOneof("event") for event in router.decode.events] == ["ticket"]
        on = await router.generate(prompt_of(9), sampling(stop_token_ids=frozenset({first}), min_tokens=4))
        assert len(on.ids()) >= 4


async def test_a_prompt_as_long_as_the_context_and_one_token_too_long(tiny_dir: Path, alone: Monolithic) -> None:
    async with pair(prefill_params(engine_params(tiny_dir)), decode_params(engine_params(tiny_dir))) as router:
        answer = await router.generate(prompt_of(256), sampling(max_tokens=1))
        assert len(answer.ids()) == 1
        for leg, field in (
            (leg_message(prompt_of(257), sampling(max_tokens=1)), "prompt"),
            (leg_message([], sampling()), "prompt"),
            (leg_message([5, 320], sampling()), "token_ids"),
        ):
            await router.prefill.send(pb.RouterCommand(prefill=pb.Prefill(leg=leg)))
            failed = await router.prefill.failed(key_of(leg))
            assert (failed.code, failed.field) == ("invalid_request", field)
        leg = leg_message(prompt_of(200), sampling(max_tokens=58))
        await router.decode.send(pb.RouterCommand(reserve=pb.Reserve(leg=leg)))
        failed = await router.decode.failed(key_of(leg))
        assert (failed.code, failed.field) == ("invalid_request", "max_tokens")


async def test_lc_06_a_cancelled_prompt_stops_within_one_chunk(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_RULES", failpoints.parse("prefill.chunk=sleep(0.4)"))
    slow = prefill_params(engine_params(tiny_dir), max_batch_tokens=8)
    async with pair(slow, decode_params(engine_params(tiny_dir))) as router:
        leg = leg_message(prompt_of(200), sampling(max_tokens=5))
        ticket = await router.reserve(leg)
        await router.prefill.send(pb.RouterCommand(prefill=pb.Prefill(leg=leg, ticket=ticket.ticket)))
        await router.prefill.until(lambda: router.prefill.load.computed_prompt_tokens >= 16)
        cancel = pb.RouterCommand(cancel=pb.Cancel(leg=ref_of(key_of(leg))))
        await router.prefill.send(cancel)
        await router.decode.send(cancel)
        computed = router.prefill.load.computed_prompt_tokens
        await router.prefill.wait_idle()
        assert router.prefill.load.computed_prompt_tokens <= computed + 16  # the chunk in flight, and one unreported
        assert router.prefill.of(key_of(leg), "first") == []


@pytest.mark.parametrize("point", ["prefill.chunk", "prefill.after_prefill", "prefill.done", "decode.admit"])
async def test_cf_03_a_leg_that_fails_at_a_gate_keeps_its_reason_and_its_neighbours(
    tiny_dir: Path, alone: Monolithic, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    async with pair(prefill_params(engine_params(tiny_dir)), decode_params(engine_params(tiny_dir))) as router:
        monkeypatch.setattr(failpoints, "_RULES", failpoints.parse(f"{point}=raise"))
        leg = leg_message(prompt_of(9), sampling(max_tokens=5))
        ticket = await router.reserve(leg)
        await router.prefill.send(pb.RouterCommand(prefill=pb.Prefill(leg=leg, ticket=ticket.ticket)))
        side = router.prefill if point.startswith("prefill") else router.decode
        failed = await side.failed(key_of(leg))
        assert (failed.code, failed.message) == ("internal", f"failpoint {point}")
        monkeypatch.setattr(failpoints, "_RULES", {})
        for session in (router.prefill, router.decode):
            await session.send(pb.RouterCommand(cancel=pb.Cancel(leg=ref_of(key_of(leg)))))
        check(alone, prompt_of(9), await router.generate(prompt_of(9), sampling(max_tokens=5)), max_tokens=5)
