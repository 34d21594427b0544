"""Where the router has a prompt computed: the policy alone, and legs without a prefill worker on scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from baton.proto import worker_pb2 as pb
from baton.proto.step_time import StepTime
from baton.router.life_messages import Peer
from baton.router.outstanding import Work
from baton.router.placement.disaggregation import POLICIES, conditional
from baton.router.placement.policy import Candidate, Demand
from baton.tests.harness.router_rig import RouterRig, router_rig, say, until

PREFILL, DECODE = StepTime(0.01, 1e-4, 0.0), StepTime(0.02, 1e-3, 0.0)
IDLE_P = Candidate(Peer("prefill-0", "a"), 0, law=PREFILL, step_tokens=512)
IDLE_D = Candidate(Peer("decode-0", "a"), 0, law=DECODE)
HERE = Candidate(Peer("decode-0", "a"), 0, step_tokens=128)


def streams(count: int) -> Candidate:
    """A decode worker with so many."""
    return IDLE_D._replace(works=[Work(1000, 0, 1)] * count, outstanding=1000 * count)


def queue(*tokens: int) -> Candidate:
    """A prefill worker with prompts to compute."""
    return IDLE_P._replace(works=[Work(count) for count in tokens], outstanding=sum(tokens))


def demand(tokens: int) -> Demand:
    return Demand(tokens, 100, 1, "")


def test_a_short_prompt_is_computed_here_when_prefill_is_busy_and_a_long_one_when_it_is_much_more() -> None:
    assert not conditional(demand(64), IDLE_P, streams(8), HERE, 0.0, None)
    assert conditional(demand(64), queue(4000, 4000, 100, 100, 100, 100), streams(2), HERE, 0.0, None)
    assert not conditional(demand(2000), queue(1000), streams(8), HERE, 0.0, None)
    assert conditional(demand(2000), queue(*[2000] * 20), streams(1), HERE, 0.0, None)


def test_what_is_cached_here_and_what_kv_is_late_speak_for_it() -> None:
    busy = streams(4)
    assert not conditional(demand(1000), IDLE_P, busy, HERE, 0.0, None)
    assert conditional(demand(1000), IDLE_P, busy, HERE._replace(cached=992), 0.0, None)
    assert conditional(demand(1000), IDLE_P, busy, HERE, 1.0, None)


def test_each_stream_that_runs_here_speaks_against_it() -> None:
    busy = queue(*[500] * 6)
    chosen = [conditional(demand(500), busy, streams(count), HERE, 0.0, None) for count in range(30)]
    assert chosen[0]
    assert not chosen[-1]
    assert chosen == sorted(chosen, reverse=True)


def test_a_chunk_leaves_the_objective_of_a_token_room() -> None:
    busy = queue(*[2000] * 20)
    assert conditional(demand(500), busy, streams(1), HERE, 0.0, 0.05)
    assert not conditional(demand(500), busy, streams(1), HERE, 0.0, 0.03)  # 22 ms of the batch, 12.8 of the chunk


def test_its_own_law_counts_where_it_has_one_and_without_laws_nothing_is_tried() -> None:
    busy = queue(*[500] * 6)
    assert conditional(demand(500), busy, streams(1), HERE, 0.0, None)
    assert not conditional(demand(500), busy, streams(1), HERE._replace(law=StepTime(0.0, 1e-2, 0.0)), 0.0, None)
    assert not conditional(demand(5), busy._replace(law=None), streams(1), HERE, 0.0, None)
    assert not conditional(demand(5), busy, IDLE_D._replace(law=None), HERE, 0.0, None)


def test_always_and_never() -> None:
    args = (demand(5), IDLE_P, IDLE_D, HERE, 0.0, None)
    assert (POLICIES["always"](*args), POLICIES["never"](*args)) == (False, True)


# ---- the router ----------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def never(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path, "prefill-0", "decode-0", "decode-1", disaggregation="never") as rig:
        yield rig


def kinds(rig: RouterRig, worker: str) -> list[str]:
    return [kind for kind, _ in rig.cluster[worker].commands]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_tokens", [1, 20])
async def test_a_leg_without_a_prefill_worker(never: RouterRig, n: int, max_tokens: int) -> None:
    answer = await never.generate(prompt="x", n=n, max_tokens=max_tokens)
    assert answer.texts == dict.fromkeys(range(n), "hello"[:max_tokens])
    assert kinds(never, "prefill-0") == []
    assert sorted(kinds(never, "decode-0") + kinds(never, "decode-1")) == ["reserve"]
    timing = answer.finished[-1].timing
    assert (timing.prefill_worker, timing.attempts, timing.kv_bytes) == ("", 1, 0)
    assert timing.decode_worker in ("decode-0", "decode-1")
    assert await never.metric("baton_prefilled_on_decode_total") == 1
    assert await never.metric("baton_kv_transfers_total", outcome="ok") == 0


async def test_a_stop_string_in_the_first_token_ends_it_at_the_worker(never: RouterRig) -> None:
    never.cluster.script = say("h")
    answer = await never.generate(prompt="x", stop=["h"])
    assert answer.reasons == {0: "stop"}
    assert "cancel" in kinds(never, "decode-0") + kinds(never, "decode-1")


@pytest.mark.parametrize("how", ["fails", "dies", "is full"])
async def test_a_worker_that_does_not_compute_it_is_replaced(never: RouterRig, how: str) -> None:
    failing = []

    async def first(leg: pb.Leg) -> None:
        worker = next(w for w in never.cluster.workers.values() if w.role == "decode" and w.held)
        for other in never.cluster.workers.values():
            other.on_compute = other.compute
        failing.append(worker.worker_id)
        if how == "dies":
            asyncio.get_running_loop().create_task(worker.kill())
        else:
            worker.fail(leg, "exhausted" if how == "is full" else "unavailable")

    for name in ("decode-0", "decode-1"):
        never.cluster[name].on_compute = first
    answer = await never.generate(prompt="x")
    assert answer.texts == {0: "hello"}
    timing = answer.finished[-1].timing
    assert timing.attempts == 2
    assert [timing.decode_worker] != failing
    if how == "dies":
        await never.cluster.set_state(failing[0], "")


async def test_a_choice_moves_off_a_draining_worker_and_keeps_its_kv(never: RouterRig) -> None:
    never.cluster.script = say("abcdefghij" * 8)
    call = await never.streaming(4, prompt="x", max_tokens=60)
    here = never.serving("decode")
    await never.cluster.set_state(here.worker_id, "draining")
    answer = await call
    assert answer.texts[0] == ("abcdefghij" * 8)[:60]
    assert kinds(never, here.worker_id) == ["reserve", "hold", "handover", "release"]
    assert kinds(never, "prefill-0") == []


async def test_conditional_goes_on_without_a_prefill_worker(tmp_path: Path) -> None:
    """While there is one and no law, that computes; when it is gone, decode does."""
    async with router_rig(tmp_path, "prefill-0", "decode-0", disaggregation="conditional") as rig:
        assert (await rig.generate(prompt="x")).finished[-1].timing.prefill_worker == "prefill-0"
        await rig.cluster.set_state("prefill-0", "draining")

        async def served_by(worker: str) -> bool:
            answer = await rig.generate(prompt="x")
            assert answer.texts == {0: "hello"}
            return answer.finished[-1].timing.prefill_worker == worker

        await until(lambda: served_by(""))
        await rig.cluster.set_state("prefill-0", "ready")
        await until(lambda: served_by("prefill-0"))
