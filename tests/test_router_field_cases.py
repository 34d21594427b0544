"""Cases of the field reports that concern the router: faults and metrics, readiness, load numbers, probes, ids."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from baton.proto import baton_pb2 as api
from baton.proto import worker_pb2 as pb
from baton.router.stall import Stall
from baton.tests.harness.router_rig import RouterRig, key_of, ref_of, router_rig, say
from baton.text.tokenizer import Tokenizer

Fault = Callable[[RouterRig], Awaitable[None]]


async def _generate(rig: RouterRig, prompt: str = "x", **fields: Any) -> str:
    try:
        return (await rig.generate(prompt=prompt, **fields)).texts[0]
    except grpc.aio.AioRpcError as error:
        return error.code().name


def _prefill_fails(code: str) -> Fault:
    async def fault(rig: RouterRig) -> None:
        worker = rig.cluster["prefill-0"]

        async def fail(leg: pb.Leg, ticket: bytes) -> None:
            worker.fail(leg, code)

        worker.on_prefill = fail
        await _generate(rig)

    return fault


async def _client_leaves(rig: RouterRig) -> None:
    rig.cluster["decode-0"].most_tokens = 3
    call = rig.stub.Generate(api.GenerateRequest(prompt="x"))
    async for message in call:
        if message.HasField("tokens") and message.tokens.offset == 1:  # from decode
            break
    call.cancel()
    await rig.cluster.settled()


async def _deadline(rig: RouterRig) -> None:
    rig.cluster["decode-0"].step_s = 10
    await _generate(rig, timeout=0.2)
    await rig.cluster.settled()


async def _bad_field(rig: RouterRig) -> None:
    await rig.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "n": 0})


async def _decode_dies(rig: RouterRig) -> None:
    rig.cluster.script = say("x" * 30)
    call = await rig.streaming(3, prompt="x", max_tokens=30)
    await rig.cluster["decode-0"].kill()
    await rig.cluster.add("decode-0", "2")
    await call


FAULTS: list[tuple[Fault, dict[tuple[str, str, str], float]]] = [
    (_prefill_fails("internal"), {("baton_requests_failed_total", "code", "internal"): 1}),
    (
        _prefill_fails("unavailable"),
        {("baton_retries_total", "leg", "first"): 2, ("baton_requests_failed_total", "code", "unavailable"): 1},
    ),
    (
        _client_leaves,
        {("baton_requests_cancelled_total", "", ""): 1, ("baton_cancellations_total", "phase", "decoding"): 1},
    ),
    (_bad_field, {("baton_rejections_total", "reason", "invalid_request"): 1}),
    (
        _decode_dies,
        {("baton_retries_total", "leg", "resumed"): 1, ("baton_migrations_total", "kind", "ongoing"): 1},
    ),
]


@pytest.mark.parametrize(("fault", "moved"), FAULTS)
async def test_ob_01_each_fault_moves_its_counters_and_by_how_much(
    tmp_path: Path, fault: Fault, moved: dict[tuple[str, str, str], float]
) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:

        async def values() -> dict[tuple[str, str, str], float]:
            return {key: await rig.metric(key[0], **({key[1]: key[2]} if key[1] else {})) for key in moved}

        before = await values()
        await fault(rig)
        after = await values()
        assert {key: after[key] - before[key] for key in moved} == moved


async def test_ob_02_three_preemptions_between_two_scrapes_are_three(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        worker, left = rig.cluster["decode-0"], [3]
        decode = worker.decode

        async def preempting(leg: pb.Leg) -> None:
            if left[0]:
                left[0] -= 1
                worker.held.pop(key_of(leg), None)
                worker.emit(preempted=pb.Preempted(leg=ref_of(leg), choice=leg.choices[0]))
            else:
                await decode(leg)

        worker.on_decode = preempting
        assert await _generate(rig) == "hello"
        assert await rig.metric("baton_preemptions_total") == 3


def test_ob_03_a_stall_needs_requests_and_time_without_progress() -> None:
    stall = Stall(5.0, 0.0)
    assert stall.seconds(1, 0, 100.0) == 0  # nobody waits
    assert stall.seconds(1, 3, 104.0) == 0
    assert stall.seconds(1, 3, 106.0) == 6.0
    assert stall.seconds(2, 3, 107.0) == 0  # something moved
    assert stall.seconds(2, 3, 113.0) == 6.0
    assert stall.seconds(2, 0, 114.0) == 0  # all have left


async def test_ob_03_sp_03_a_cluster_that_stands_still_is_alive_and_not_ready(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0", stall_s=0.3) as rig:

        async def never(leg: pb.Leg) -> None:
            await asyncio.Event().wait()

        rig.cluster["decode-0"].on_reserve = never
        call = rig.stub.Generate(api.GenerateRequest(prompt="x"))
        reading = asyncio.create_task(call.read())
        assert "1 requests are in flight, and no worker has gone on for" in await rig.not_ready()
        assert (await rig.http.get("/live")).status_code == 200
        await reading
        call.cancel()
        await rig.cluster.settled()
        await rig.ready()


async def test_lc_11_a_pool_that_is_full_of_nothing_is_not_ready(tmp_path: Path) -> None:
    """No request is in flight here, and no block of the pool is free: what was forgotten, whoever forgot it."""
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        rig.cluster["decode-0"].used_blocks = 64
        for _ in range(500):
            ready = await rig.http.get("/ready")
            if ready.status_code == 503:
                break
            await asyncio.sleep(0.02)
        assert "every decode pool is full, and no worker has gone on for" in ready.json()["reason"]
        assert (await rig.http.get("/live")).status_code == 200
        rig.cluster["decode-0"].used_blocks = 0
        await rig.ready()
        assert await _generate(rig) == "hello"


@pytest.mark.parametrize("way", ["grpc", "http"])
async def test_lc_05_a_client_that_leaves_while_its_prompt_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def held(self: Tokenizer, text: str, **options: Any) -> list[int]:
        if text == "slow":
            reached.set()
            go_on.wait(20)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", held)
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        rig.cluster.script = say("undisturbed")
        running = await rig.streaming(2, prompt="x", max_tokens=11)
        if way == "grpc":
            call = rig.stub.Generate(api.GenerateRequest(prompt="slow", max_tokens=4))
            reading = asyncio.ensure_future(call.read())
            assert await asyncio.to_thread(reached.wait, 20)
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        else:
            _, writer = await asyncio.open_connection(*rig.addresses["http"].split(":"))
            body = json.dumps({"prompt": "slow", "max_tokens": 4}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            assert await asyncio.to_thread(reached.wait, 20)
            writer.close()
            await writer.wait_closed()
        await asyncio.sleep(0.1)  # the router hears of it first, as a rule; the other order must be as clean
        go_on.set()
        assert (await running).texts == {0: "undisturbed"}
        assert await _generate(rig, max_tokens=11) == "undisturbed"
        await rig.cluster.settled()
        await rig.reconcile()
        assert await rig.metric("baton_requests_completed_total") == 2


async def test_ob_05_one_id_in_the_answer_the_legs_the_log_and_the_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="baton")
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        answer = await rig.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
        request_id = answer.headers["x-request-id"]
        for worker in rig.cluster.workers.values():
            assert {key.request_id for _, key in worker.commands} == {request_id}
        story = (await rig.http.get(f"/debug/requests/{request_id}")).json()["story"]
        for part in ("prefill-0", "decode-0", "committed", "completed"):
            assert any(part in line for line in story), part
        lines = [record.getMessage() for record in caplog.records if request_id in record.getMessage()]
        assert any("accepted" in line for line in lines)
        assert any("completed" in line and "KV bytes" in line for line in lines)
        timing = (await rig.generate(prompt="hi")).finished[-1].timing
        for name in ("prefill_queue_s", "prefill_s", "transfer_s", "kv_bytes", "reserve_s", "first_gap_s"):
            assert getattr(timing, name) > 0, name


async def test_sp_06_the_slow_worker_gets_less_and_what_ended_counts_no_more(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0", "decode-1", decode_placement="least_loaded") as rig:
        rig.cluster.script = say("x" * 30)
        rig.cluster["decode-0"].step_s, rig.cluster["decode-1"].step_s = 0.002, 0.05
        served: Counter[str] = Counter()

        async def client() -> None:
            for _ in range(12):
                answer = await rig.generate(prompt="x", max_tokens=30)
                served[answer.finished[-1].timing.decode_worker] += 1

        async def probe() -> None:
            while True:
                await rig.http.get("/health")
                await asyncio.sleep(0.05)

        probing = asyncio.create_task(probe())
        await asyncio.gather(*(client() for _ in range(4)))
        probing.cancel()
        assert served.total() == 48
        assert served["decode-0"] > 2 * served["decode-1"] > 0
        assert await rig.metric("baton_router_inflight_requests") == 0


async def test_sp_07_probes_change_no_placement(tmp_path: Path) -> None:
    async def placed(folder: Path, probes: bool) -> list[str]:
        async with router_rig(folder, "prefill-0", "decode-0", "decode-1", decode_placement="round_robin") as rig:
            found = []
            for _ in range(10):
                for path in ("/health", "/ready", "/live", "/v1/models", "/metrics", "/version") if probes else ():
                    await rig.http.get(path)
                found.append((await rig.generate(prompt="x")).finished[-1].timing.decode_worker)
            assert await rig.metric("baton_time_to_first_token_seconds_count") == 10
            return found

    quiet, probed = await placed(tmp_path / "quiet", False), await placed(tmp_path / "probed", True)
    assert [a != b for a, b in itertools.pairwise(quiet)] == [True] * 9
    assert [a != b for a, b in itertools.pairwise(probed)] == [True] * 9
