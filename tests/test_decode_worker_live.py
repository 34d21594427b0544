"""Live decode workers under pressure and loss: preemption, cancels, sessions that end, ranks and engines that break."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from baton.engine.channel import RankLost
from baton.engine.runner import Runner
from baton.proto import failpoints
from baton.proto import worker_pb2 as pb
from baton.proto.leg import key_of, ref_of
from baton.tests.harness.monolithic import Monolithic, sampling
from baton.tests.harness.worker_rig import WorkerProcess, decode_params, engine_params, prefill_params, session
from baton.tests.harness.worker_router import Router, leg_message, pair


def prompt_of(length: int, start: int = 7) -> list[int]:
    return [(start * (length + 1) + 13 * index) % 250 for index in range(length)]


@pytest.fixture(scope="module")
def alone(tiny_dir: Path) -> Monolithic:
    """The oracle."""
    return Monolithic(tiny_dir)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
async def test_a_pool_that_holds_a_third_finishes_all(tiny_dir: Path, alone: Monolithic, tensor_parallel: int) -> None:
    """Waiting reservations and preemption: everybody ends with the right tokens."""
    rng = random.Random(5)
    asked = [(prompt_of(rng.randint(1, 30), index), rng.randint(2, 30)) for index in range(24)]
    decode = engine_params(tiny_dir, kv_blocks=20, tensor_parallel=tensor_parallel)
    async with pair(prefill_params(engine_params(tiny_dir)), decode_params(decode, reserve_wait_s=60.0)) as router:
        answers = await asyncio.gather(*(router.generate(prompt, sampling(max_tokens=most)) for prompt, most in asked))
        assert router.decode.load.preemptions > 0
    for (prompt, most), answer in zip(asked, answers, strict=True):
        assert answer.ids() == alone.run(prompt, max_tokens=most)[0].token_ids
        assert answer.legs <= 2  # nobody is preempted twice


async def test_choices_that_are_preempted_go_on_one_by_one(tiny_dir: Path, alone: Monolithic) -> None:
    changes = {"n": 3, "temperature": 1.0, "seed": 9, "max_tokens": 24}
    decode = decode_params(engine_params(tiny_dir, kv_blocks=14))
    async with pair(prefill_params(engine_params(tiny_dir)), decode) as router:
        answers = await asyncio.gather(*(router.generate(prompt_of(9, s), sampling(**changes)) for s in (1, 2, 3)))
        assert router.decode.load.preemptions > 0
    for start, answer in zip((1, 2, 3), answers, strict=True):
        expected = [choice.token_ids for choice in alone.run(prompt_of(9, start), **changes)]
        assert [answer.ids(choice) for choice in range(3)] == expected


async def test_lc_07_a_cancel_in_any_phase_frees_both_sides(tiny_dir: Path) -> None:
    rng = random.Random(3)
    roomy = engine_params(tiny_dir, kv_blocks=256)  # nobody is preempted: the legs of those that are have other names
    async with pair(prefill_params(engine_params(tiny_dir)), decode_params(roomy)) as router:

        async def one(number: int) -> None:
            leg = leg_message(prompt_of(rng.randint(1, 60), number), sampling(max_tokens=40))
            await router.run_and_cancel(leg, rng.random() * 0.3)

        for wave in range(3):
            await asyncio.gather(*(one(10 * wave + number) for number in range(8)))
            await router.prefill.wait_idle()
            await router.decode.wait_idle()
        assert len((await router.generate([1, 2, 3], sampling(max_tokens=3))).ids()) == 3


async def test_a_session_that_breaks_takes_its_legs_with_it(tiny_dir: Path) -> None:
    prefill, decode = prefill_params(engine_params(tiny_dir)), decode_params(engine_params(tiny_dir))
    async with pair(prefill, decode) as watching:
        workers = watching.workers
        async with session(workers[0]) as one, session(workers[1]) as two:
            other = Router(one, two, workers)
            leg = leg_message(prompt_of(20), sampling(max_tokens=200))
            ticket = await other.reserve(leg)
            await one.send(pb.RouterCommand(prefill=pb.Prefill(leg=leg, ticket=ticket.ticket)))
            await two.until(lambda: len(two.tokens(key_of(leg))) > 3)
            await other.reserve(leg_message(prompt_of(20), sampling(max_tokens=20)))
            await watching.decode.until(lambda: watching.decode.load.held_legs and watching.prefill.load.held_legs)
        await watching.prefill.wait_idle()
        await watching.decode.wait_idle()


async def test_a_router_that_falls_silent_loses_its_session(tiny_dir: Path) -> None:
    prefill, decode = prefill_params(engine_params(tiny_dir)), decode_params(engine_params(tiny_dir), dead_after_s=2.0)
    async with pair(prefill, decode) as watching, session(watching.workers[1], beats=False) as mute:
        await mute.send(pb.RouterCommand(reserve=pb.Reserve(leg=leg_message(prompt_of(9), sampling()))))
        await watching.decode.until(lambda: watching.decode.load.held_legs == 1)
        async with asyncio.timeout(30):
            while mute.broken is None:
                await asyncio.sleep(0.05)
        assert "silent" in str(mute.broken.details())
        await watching.decode.wait_idle()


async def test_lc_10_a_prompt_that_prefill_refuses_is_never_decoded(tiny_dir: Path) -> None:
    prefill = prefill_params(engine_params(tiny_dir, kv_blocks=4))
    async with pair(prefill, decode_params(engine_params(tiny_dir))) as router:
        leg = leg_message(prompt_of(20), sampling(max_tokens=5))
        ticket = await router.reserve(leg)
        await router.prefill.send(pb.RouterCommand(prefill=pb.Prefill(leg=leg, ticket=ticket.ticket)))
        failed = await router.prefill.failed(key_of(leg))
        assert (failed.code, failed.field) == ("invalid_request", "prompt")
        await router.decode.send(pb.RouterCommand(cancel=pb.Cancel(leg=ref_of(key_of(leg)))))
        await router.decode.wait_idle()
        assert router.decode.load.steps == 0


async def test_a_broken_engine_fails_every_leg_and_ends_the_worker(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = WorkerProcess(prefill_params(engine_params(tiny_dir)))
    await asyncio.to_thread(worker.wait_ready)

    def broken(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Runner, "prefill", broken)
    async with session(worker) as side:
        legs = [leg_message(prompt_of(20), sampling(max_tokens=1)) for _ in range(3)]
        await side.send(*(pb.RouterCommand(prefill=pb.Prefill(leg=leg)) for leg in legs))
        for leg in legs:
            failed = await side.failed(key_of(leg))
            assert (failed.code, "out of memory" in failed.message) == ("unavailable", True)
        await asyncio.to_thread(worker.join)
    assert isinstance(worker.failure, RuntimeError)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_cf_07_a_lost_rank_ends_the_worker(tiny_dir: Path, role: str) -> None:
    engine = engine_params(tiny_dir, tensor_parallel=2)
    worker = WorkerProcess(prefill_params(engine) if role == "prefill" else decode_params(engine))
    await asyncio.to_thread(worker.wait_ready)
    async with session(worker):
        worker.lose_followers()
        await asyncio.to_thread(worker.join)
    assert isinstance(worker.failure, RankLost)


async def test_a_decode_worker_keeps_beating_while_a_step_is_slow(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(prefill_params(engine_params(tiny_dir)), decode_params(engine_params(tiny_dir))) as router:
        monkeypatch.setattr(failpoints, "_RULES", failpoints.parse("decode.step=sleep(1.0)"))
        before = len(router.decode.messages)
        await router.generate(prompt_of(5), sampling(max_tokens=4))  # three steps
        assert len(router.decode.messages) - before >= 10
