"""What the router does when scripted workers refuse, fail, fall silent or come back (LC-*, CF-*, API-05)."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from baton.proto import baton_pb2 as api
from baton.proto import worker_pb2 as pb
from baton.tests.harness.router_rig import (
    EOS_ID,
    Collected,
    FakeWorker,
    RouterRig,
    key_of,
    ref_of,
    router_rig,
    say,
    until,
)

LONG = "abcdefghijklmnopqrstuvwxyz"


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        yield rig


@pytest_asyncio.fixture
async def wide(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path, "prefill-0", "prefill-1", "decode-0", "decode-1") as rig:
        yield rig


async def status(rig: RouterRig, **fields: Any) -> tuple[grpc.StatusCode, str]:
    """How a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.generate(**fields)
    return caught.value.code(), caught.value.details() or ""


# ---- LC-02 ---------------------------------------------------------------------------------------------------------


async def test_lc_02_cancel_between_prefill_done_and_decode_told(rig: RouterRig) -> None:
    """The client leaves in the gap in which only prefill holds something: the router ends that hold itself."""
    prefill = rig.cluster["prefill-0"]

    async def first_and_hold(leg: pb.Leg, ticket: bytes) -> None:
        tokens = [prefill.token(leg, choice, 0) for choice in leg.choices]
        prefill.emit(first=pb.FirstTokens(leg=ref_of(leg), tokens=tokens))

    prefill.on_prefill = first_and_hold
    for _ in range(30):
        call = rig.stub.Generate(api.GenerateRequest(prompt="x"))
        async for message in call:
            if message.HasField("tokens"):
                break
        call.cancel()
        await rig.cluster.settled()
    assert await rig.metric("baton_cancellations_total", phase="handover") == 30


# ---- LC-08 ---------------------------------------------------------------------------------------------------------


async def test_lc_08_decode_port_closed(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and never listening: connections are refused
        async with router_rig(tmp_path, "prefill-0") as rig:
            worker = await rig.cluster.add("decode-0")
            await worker.kill()
            worker.address = f"127.0.0.1:{taken.getsockname()[1]}"
            await rig.cluster.set_state("decode-0", "ready")
            await asyncio.sleep(0.5)
            await rig.not_ready()
            calls = [status(rig, prompt="x") for _ in range(50)]
            results = await asyncio.wait_for(asyncio.gather(*calls), 20)
            assert {code for code, _ in results} == {grpc.StatusCode.UNAVAILABLE}
            assert rig.cluster["prefill-0"].commands == []


async def test_lc_08_decode_accepts_then_resets(rig: RouterRig) -> None:
    """Those that were let in wait for its successor."""
    decode = rig.cluster["decode-0"]

    async def silent(leg: pb.Leg) -> None:
        pass

    decode.on_reserve = silent
    calls = [asyncio.create_task(rig.generate(prompt="x")) for _ in range(50)]
    while await rig.metric("baton_router_inflight_requests") < 50:
        await asyncio.sleep(0.02)
    await decode.kill()
    while not await rig.metric("baton_retries_total", leg="first"):
        await asyncio.sleep(0.02)
    await rig.cluster.add("decode-0", "2")
    answers = await asyncio.gather(*calls)
    assert {answer.texts[0] for answer in answers} == {"hello"}
    assert {answer.finished[-1].timing.attempts for answer in answers} <= {1, 2}  # 1: it was not told of it yet


async def test_lc_08_prefill_raises_after_accepting(rig: RouterRig) -> None:
    prefill = rig.cluster["prefill-0"]

    async def fail(leg: pb.Leg, ticket: bytes) -> None:
        prefill.fail(leg, "unavailable", "the engine stopped")

    prefill.on_prefill = fail
    results = await asyncio.wait_for(asyncio.gather(*(status(rig, prompt="x") for _ in range(50))), 20)
    assert set(results) == {(grpc.StatusCode.UNAVAILABLE, "the engine stopped")}
    await rig.cluster.settled()  # the sibling leg was cancelled
    assert await rig.metric("baton_retries_total", leg="first") == 100
    assert await rig.metric("baton_requests_failed_total", code="unavailable") == 50


async def test_lc_10_prefill_refuses_after_decode_reserved(rig: RouterRig) -> None:
    prefill = rig.cluster["prefill-0"]

    async def fail(leg: pb.Leg, ticket: bytes) -> None:
        prefill.fail(leg, "invalid_request", "too long")

    prefill.on_prefill = fail
    assert await status(rig, prompt="x") == (grpc.StatusCode.INVALID_ARGUMENT, "too long")
    assert await rig.metric("baton_generation_tokens_total") == 0


# ---- refusals and retries ------------------------------------------------------------------------------------------


async def test_a_full_decode_pool_is_exhausted_with_a_hint(rig: RouterRig) -> None:
    decode = rig.cluster["decode-0"]

    async def full(leg: pb.Leg) -> None:
        decode.held.pop(key_of(leg))
        failed = pb.Failed(leg=ref_of(leg), code="exhausted", message="no blocks", retry_after_s=2.5)
        decode.emit(failed=failed)

    decode.on_reserve = full
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.generate(prompt="x")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "2500"
    response = await rig.http.post("/v1/completions", json={"prompt": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_refused_by_one_decode_worker_the_other_serves(wide: RouterRig) -> None:
    decode = wide.cluster["decode-0"]

    async def full(leg: pb.Leg) -> None:
        decode.fail(leg, "exhausted")

    decode.on_reserve = full
    answers = await asyncio.gather(*(wide.generate(prompt="x") for _ in range(10)))
    assert {answer.texts[0] for answer in answers} == {"hello"}
    assert {answer.finished[-1].timing.decode_worker for answer in answers} == {"decode-1"}


async def test_a_failed_transfer_is_repeated_with_the_same_prefill_worker(wide: RouterRig) -> None:
    broken: list[str] = []

    def breaker(prefill: FakeWorker) -> None:
        async def fail_once(leg: pb.Leg, ticket: bytes) -> None:
            if not broken:
                broken.append(prefill.worker_id)
                decode, reserved = wide.cluster.tickets[ticket]
                decode.fail(reserved, "transfer_failed", "checksum")
            else:
                assert prefill.worker_id == broken[0]
                await prefill.prefill(leg, ticket)

        prefill.on_prefill = fail_once

    breaker(wide.cluster["prefill-0"])
    breaker(wide.cluster["prefill-1"])
    answer = await wide.generate(prompt="x")
    assert answer.texts == {0: "hello"}
    assert answer.finished[-1].timing.attempts == 2
    assert await wide.metric("baton_kv_transfers_total", outcome="failed") == 1


# ---- workers lost --------------------------------------------------------------------------------------------------


async def test_decode_lost_in_mid_answer_goes_on_elsewhere_without_gap_or_duplicate(wide: RouterRig) -> None:
    wide.cluster.script = say(LONG)
    call = await wide.streaming(5, prompt="xyz", n=2)
    await wide.serving("decode").kill()
    answer = await call
    assert answer.texts == {0: LONG, 1: LONG}
    assert answer.finished[-1].usage.completion_tokens == 2 * (len(LONG) + 1)
    assert answer.finished[-1].timing.attempts == 2
    assert await wide.metric("baton_migrations_total", kind="ongoing") == 2


async def test_prefill_lost_before_commit_starts_a_new_pair(wide: RouterRig) -> None:
    hanging = asyncio.Event()

    async def hang(leg: pb.Leg, ticket: bytes) -> None:
        hanging.set()
        await asyncio.Event().wait()

    for name in ("prefill-0", "prefill-1"):
        wide.cluster[name].on_prefill = hang
    call = asyncio.create_task(wide.generate(prompt="x"))
    await hanging.wait()
    lost = wide.serving("prefill")
    for name in ("prefill-0", "prefill-1"):
        wide.cluster[name].on_prefill = wide.cluster[name].prefill
    await lost.kill()
    assert (await call).texts == {0: "hello"}


async def test_prefill_lost_after_commit_is_no_event(wide: RouterRig) -> None:
    wide.cluster.script = say(LONG)
    call = await wide.streaming(5, prompt="x")
    for name in ("prefill-0", "prefill-1"):
        await wide.cluster[name].kill()
    answer = await call
    assert answer.texts == {0: LONG}
    assert answer.finished[-1].timing.attempts == 1


async def lost_in_mid_answer(rig: RouterRig, **fields: Any) -> asyncio.Task[Collected]:
    """A call whose only decode worker has gone after some tokens, and which waits for another."""
    rig.cluster.script = say(LONG)
    call = await rig.streaming(3, prompt="x", **fields)
    await rig.cluster["decode-0"].kill()
    while not await rig.metric("baton_retries_total", leg="resumed"):
        await asyncio.sleep(0.02)
    return call


async def test_an_answer_waits_for_a_worker_and_goes_on(rig: RouterRig) -> None:
    """A request that comes meanwhile is refused at once: somebody else may be able to serve it."""
    call = await lost_in_mid_answer(rig)
    assert (await status(rig, prompt="x"))[0] is grpc.StatusCode.UNAVAILABLE
    await rig.cluster.add("decode-0", "2")
    answer = await call
    assert answer.texts == {0: LONG}
    assert answer.finished[-1].timing.attempts == 2


async def test_who_waits_for_a_worker_may_leave(rig: RouterRig) -> None:
    call = await lost_in_mid_answer(rig)
    call.cancel()
    while not await rig.metric("baton_requests_cancelled_total"):
        await asyncio.sleep(0.02)
    await rig.cluster.add("decode-0", "2")
    await rig.ready()
    assert rig.cluster["decode-0"].commands == []


async def test_api_05_an_answer_that_no_worker_can_end_ends_with_its_deadline(tmp_path: Path) -> None:
    """An error, and never a stop."""
    async with router_rig(tmp_path, "prefill-0", "decode-0", request_deadline_s=4.0) as rig:
        call = await lost_in_mid_answer(rig)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("stream", [True, False])
async def test_api_05_failure_after_the_first_event_is_in_band_over_http(rig: RouterRig, stream: bool) -> None:
    decode, said = rig.cluster["decode-0"], say(LONG)
    decode.step_s = 0.05

    def script(leg: pb.Leg, choice: int, index: int) -> int:
        if index == 5:
            decode.fail(leg, "internal", "the engine stopped")
        return said(leg, choice, index)

    rig.cluster.script = script
    response = await rig.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 50, "stream": stream})
    if not stream:
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        return
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]
    assert response.status_code == 200
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert (events[-1]["error"]["code"], "[DONE]" in response.text) == ("internal", False)


async def test_api_05_an_error_in_the_detokeniser_fails_the_request_alone(
    rig: RouterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton.text.detokenizer import Detokenizer

    push = Detokenizer.push

    def broken(self: Detokenizer, ids: list[int]) -> str:
        if ids == [ord("l")]:
            raise ValueError("broken")
        return push(self, ids)

    monkeypatch.setattr(Detokenizer, "push", broken)
    code, _ = await status(rig, prompt="x")
    assert code is grpc.StatusCode.INTERNAL
    monkeypatch.undo()
    assert (await rig.generate(prompt="x")).texts == {0: "hello"}


async def test_a_silent_worker_is_dead_within_its_bound(rig: RouterRig) -> None:
    rig.cluster.script = say(LONG)
    call = await rig.streaming(2, prompt="x")
    start = asyncio.get_running_loop().time()
    rig.cluster["decode-0"].muted = True
    while not await rig.metric("baton_retries_total", leg="resumed"):
        await asyncio.sleep(0.02)
    assert 0.5 < asyncio.get_running_loop().time() - start < 15
    rig.cluster["decode-0"].muted = False
    assert (await call).texts == {0: LONG}  # from its next session


async def test_cf_01_a_replaced_worker_behind_the_same_address(rig: RouterRig) -> None:
    """The old incarnation's session is refused by the new one; the next view brings the new session at once."""
    for incarnation in ("2", "3"):
        old = rig.cluster["decode-0"]
        await old.kill()
        await rig.not_ready()
        code, _ = await status(rig, prompt="x")
        assert code is grpc.StatusCode.UNAVAILABLE
        await rig.cluster.add("decode-0", incarnation, address=old.address)
        start = asyncio.get_running_loop().time()
        await rig.ready()
        assert asyncio.get_running_loop().time() - start < 2.5
        assert (await rig.generate(prompt="x")).texts == {0: "hello"}


async def test_cf_10_a_clients_mistakes_never_count_against_workers(rig: RouterRig) -> None:
    for _ in range(100):
        code, _ = await status(rig, prompt="x" * 300)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert {(await rig.generate(prompt="x")).texts[0] for _ in range(10)} == {"hello"}


# ---- preemption ----------------------------------------------------------------------------------------------------


async def test_a_preempted_choice_resumes_with_its_tokens_and_is_no_retry(rig: RouterRig) -> None:
    rig.cluster.script = say(LONG)
    decode = rig.cluster["decode-0"]
    resumed: list[pb.Leg] = []

    async def preempt(leg: pb.Leg) -> None:
        if leg.attempt > 1:
            resumed.append(leg)
            await decode.decode(leg)
            return
        for index in range(3):
            decode.step(leg, [decode.token(leg, choice, index) for choice in leg.choices])
        decode.held.pop(key_of(leg))
        for choice in leg.choices:
            decode.emit(preempted=pb.Preempted(leg=ref_of(leg), choice=choice))

    decode.on_decode = preempt
    answer = await rig.generate(prompt="xyz", n=2)
    assert answer.texts == {0: LONG, 1: LONG}
    timing = answer.finished[-1].timing
    assert (timing.attempts, timing.preemptions) == (1, 2)
    assert [list(leg.choices) for leg in resumed] == [[0], [1]]
    assert all(list(leg.prompt_token_ids) == [*b"xyz"] for leg in resumed)
    assert all(bytes(leg.generated_token_ids) == LONG[:3].encode() for leg in resumed)
    assert await rig.metric("baton_preemptions_total") == 2


# ---- the lookahead -------------------------------------------------------------------------------------------------


async def test_reservations_wait_for_the_lookahead(rig: RouterRig) -> None:
    """Prefill says 2 batches of 64 tokens: of ten prompts of 60, three are let through at first."""
    prefill, decode = rig.cluster["prefill-0"], rig.cluster["decode-0"]
    go = asyncio.Event()

    async def slow(leg: pb.Leg, ticket: bytes) -> None:
        await go.wait()
        await prefill.prefill(leg, ticket)

    prefill.on_prefill = slow
    calls = [asyncio.create_task(rig.generate(prompt="x" * 60)) for _ in range(10)]
    await rig.counts("baton_router_inflight_requests", 10)
    await until(lambda: len(prefill.held) == 3)
    await asyncio.sleep(0.3)
    assert len(decode.held) == len(prefill.held) == 3
    calls[9].cancel()  # one that waits in the router
    await asyncio.sleep(0.1)
    go.set()
    answers = await asyncio.gather(*calls[:9])
    assert {answer.texts[0] for answer in answers} == {"hello"}


async def test_commands_of_one_turn_travel_together(rig: RouterRig) -> None:
    decode = rig.cluster["decode-0"]
    rig.cluster.script = lambda leg, choice, index: EOS_ID if index else ord("a")
    await rig.generate(prompt="x")
    before = decode.messages
    prompts = ["x"] * 16
    response = await rig.http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 5})
    assert response.status_code == 200
    assert sum(kind == "reserve" for kind, _ in decode.commands) == 17
    assert decode.messages - before <= 8


# ---- stop ----------------------------------------------------------------------------------------------------------


async def test_cf_08_stop_lets_live_streams_finish_and_refuses_new_ones(rig: RouterRig) -> None:
    rig.cluster.script = say(LONG[:12])
    rig.cluster["decode-0"].most_tokens = 4
    call = await rig.streaming(2, prompt="x")
    rig.stop.set()
    assert await rig.not_ready() == "stopping"
    code, _ = await status(rig, prompt="x")
    assert code is grpc.StatusCode.UNAVAILABLE
    rig.cluster["decode-0"].most_tokens = math.inf
    assert (await call).texts == {0: LONG[:12]}


async def test_cf_08_after_the_grace_there_is_an_error_and_no_silence(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0", stop_grace_s=0.2) as rig:
        rig.cluster.script = lambda leg, choice, index: ord("a")
        call = await rig.streaming(2, prompt="x")
        rig.stop.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "stopped" in (caught.value.details() or "")
