"""Metrics: each event moves its counter (OB-01), the books balance (O-acct), and the names are the published ones."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest_asyncio
from baton.client.api import Client
from baton.cluster.bench import run_load
from baton.cluster.bench_plan import Plan
from baton.cluster.config_workload import Lengths, WorkloadSection
from baton.proto import baton_pb2 as api
from baton.proto import worker_pb2 as pb
from baton.tests.harness.router_rig import RouterRig, router_rig, say

NAMES = [
    "baton_requests_accepted_total",
    "baton_requests_completed_total",
    "baton_requests_cancelled_total",
    "baton_router_inflight_requests",
    "baton_router_queued_requests",
    "baton_prompt_tokens_total",
    "baton_generation_tokens_total",
    "baton_time_to_first_token_seconds_count",
    "baton_inter_token_latency_seconds_count",
    "baton_e2e_request_seconds_count",
    "baton_time_per_output_token_seconds_count",
    "baton_request_queue_seconds_count",
    "baton_request_prefill_seconds_count",
    "baton_request_decode_seconds_count",
    "baton_first_to_second_token_seconds_count",
    "baton_kv_alloc_wait_seconds_count",
    "baton_kv_transfer_seconds_count",
    "baton_kv_transfer_bytes_count",
    "baton_kv_transfers_total",
    "baton_kv_pool_use",
    "baton_kv_used_blocks",
    "baton_kv_total_blocks",
    "baton_prefill_waiting_requests",
    "baton_prefill_running_requests",
    "baton_prefill_prealloc_queue_requests",
    "baton_prefill_inflight_queue_requests",
    "baton_decode_prealloc_queue_requests",
    "baton_decode_transfer_queue_requests",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_decode_time_seconds_count",
]


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        yield rig


async def test_the_published_names_are_exported(rig: RouterRig) -> None:
    await rig.generate(prompt="x")
    text = (await rig.http.get("/metrics")).text
    exported = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    assert [name for name in NAMES if name not in exported] == []


async def test_one_request_is_measured_once(rig: RouterRig) -> None:
    await rig.generate(prompt="abc", n=2)
    expected = {
        "baton_requests_accepted_total": 1,
        "baton_requests_completed_total": 1,
        "baton_prompt_tokens_total": 3,
        "baton_prompt_tokens_cached_total": 3,
        "baton_generation_tokens_total": 12,
        "vllm:generation_tokens_total": 12,
        "vllm:request_success_total": 2,
        "baton_time_to_first_token_seconds_count": 1,
        "baton_first_to_second_token_seconds_count": 1,
        "baton_inter_token_latency_seconds_count": 10,
        "baton_time_per_output_token_seconds_count": 1,
        "baton_kv_alloc_wait_seconds_count": 1,
        "baton_kv_transfer_bytes_sum": 1000,
        "baton_kv_transfers_total": 1,
        "baton_kv_total_blocks": 128,
    }
    assert {name: await rig.metric(name) for name in expected} == expected


async def test_ob_04_first_token_and_first_text_are_two_values(rig: RouterRig) -> None:
    rig.cluster["decode-0"].step_s = 0.05
    await rig.generate(prompt="x", stop=["hellx"])
    token = await rig.metric("baton_time_to_first_token_seconds_sum")
    text = await rig.metric("baton_time_to_first_text_seconds_sum")
    assert text - token > 0.1


async def test_pb_04_the_router_and_its_client_agree_on_the_first_token(rig: RouterRig) -> None:
    worker, said = rig.cluster["prefill-0"], []

    async def slow(leg: pb.Leg, ticket: bytes) -> None:
        await asyncio.sleep(0.2)
        said.append(time.monotonic())
        await worker.prefill(leg, ticket)

    worker.on_prefill = slow
    workload = WorkloadSection(prompt_tokens=Lengths(mean=5.0, cv=0.0), output_tokens=Lengths(mean=4.0, cv=0.0))
    async with Client(rig.addresses["grpc"]) as client:
        (seen,) = await run_load(client, workload, Plan(1, 0, None, 1, 0))
    server_s = await rig.metric("baton_time_to_first_token_seconds_sum")
    assert seen.ttft_s is not None
    assert 0.2 <= server_s <= seen.ttft_s  # one message each way lies between them
    assert seen.arrivals[0][0] >= said[0]  # not with the message that only says that it was accepted


async def test_64_streams_a_third_cancelled_leave_nothing_and_the_books_balance(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "prefill-1", "decode-0", "decode-1") as rig:
        rng = random.Random(7)
        rig.cluster.script = say("the quick brown fox jumps over the lazy dog")
        ends: list[str] = []

        async def one(index: int) -> None:
            request = api.GenerateRequest(
                prompt="x" * rng.randrange(1, 200), max_tokens=rng.randrange(1, 40), n=1 + index % 3
            )
            call = rig.stub.Generate(request)
            leave_after = rng.randrange(60) if index % 3 == 0 else None
            finished = 0
            try:
                async for message in call:
                    finished += message.HasField("finished")
                    if leave_after is not None and (leave_after := leave_after - 1) < 0:
                        call.cancel()
                        ends.append("left")
                        return
                assert finished == request.n
                ends.append("done")
            except grpc.aio.AioRpcError as error:
                ends.append(error.code().name)

        for _ in range(3):
            await asyncio.gather(*(one(index) for index in range(64)))
        assert len(ends) == 192
        assert set(ends) <= {"done", "left"}
        await rig.cluster.settled()
        await rig.reconcile()
        for gauge in ("baton_router_queued_requests", "baton_prefill_prealloc_queue_requests"):
            assert await rig.metric(gauge) == 0
