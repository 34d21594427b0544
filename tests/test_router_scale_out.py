"""Several routers on the same workers and ports; a loop that nothing holds up; deadlines that are over."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from baton.benchmarks.router_workers import Simulation, simulated
from baton.proto import baton_pb2 as api
from baton.tests.harness.loop_gaps import gaps
from baton.tests.harness.router_rig import LIMITS, FakeCluster, RouterRig, router_params, router_rig, write_model


@pytest.fixture
async def membership(tmp_path: Path) -> AsyncIterator[str]:
    """Of one pair of simulated workers, which serve any number of routers."""
    async with simulated(Simulation(1, 0.01, 64, 0.0, str(tmp_path / "clock"))) as address:
        yield address


async def _router(tmp_path: Path, membership: str, router_id: str, **changes: Any) -> RouterRig:
    params = dataclasses.replace(
        router_params(write_model(tmp_path / "model"), membership), router_id=router_id, **changes
    )
    rig = RouterRig(FakeCluster(), params)
    await rig.start()
    await rig.ready()
    return rig


async def _counted(rig: RouterRig, tokens: int) -> int:
    return len((await rig.generate(token_ids=api.TokenIds(ids=[5] * 8), max_tokens=tokens, ignore_eos=True)).ids[0])


async def _all_ready(address: str) -> None:
    """Whichever router behind the port answers: new connections, of which each may have either, until all say so."""
    ready = 0
    for _ in range(500):
        async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as http:
            ready = ready + 1 if (await http.get("/ready")).status_code == 200 else 0
        if ready == 20:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a router is not ready")


async def test_routers_share_ports_and_workers(tmp_path: Path, membership: str) -> None:
    first = await _router(tmp_path, membership, "router-0", share_ports=True)
    ports = {f"{name}_address": first.addresses[name] for name in ("grpc", "http")}
    second = await _router(tmp_path, membership, "router-1", share_ports=True, **ports)
    assert [second.addresses[name] for name in ("grpc", "http")] == [first.addresses[name] for name in ("grpc", "http")]
    try:
        await _all_ready(first.addresses["http"])
        assert await asyncio.gather(*(_counted(rig, 20) for rig in (first, second) for _ in range(4))) == [20] * 8
    finally:
        await second.close()
        await first.close()


async def test_a_router_that_dies_takes_only_its_own_requests(tmp_path: Path, membership: str) -> None:
    first = await _router(tmp_path, membership, "router-0")
    second = await _router(tmp_path, membership, "router-1")
    others = [asyncio.create_task(_counted(second, 1000)) for _ in range(4)]
    ours = [asyncio.create_task(_counted(first, 60)) for _ in range(4)]
    await second.counts("baton_router_inflight_requests", 4)
    assert second.task is not None
    second.task.cancel()  # its sessions break, as they do when a process is killed
    await asyncio.gather(second.task, return_exceptions=True)
    assert await asyncio.gather(*ours) == [60] * 4
    lost = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(error, grpc.aio.AioRpcError) for error in lost)
    await first.counts("baton_worker_running", 0)  # the workers dropped what it left behind
    assert await _counted(first, 20) == 20
    second.addresses = {}
    await second.http.aclose()
    await second.channel.close()
    await first.close()


async def test_a_port_that_is_not_shared_is_taken(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        beside = dataclasses.replace(
            router_params(tmp_path / "model", rig.cluster.address), http_address=rig.addresses["http"]
        )
        other = RouterRig(rig.cluster, beside)
        with pytest.raises(Exception, match=r"router\.http: cannot listen on"):
            await other.start()


async def test_the_loop_has_no_gap_above_250_ms_under_a_prompt_of_5_mb(tmp_path: Path) -> None:
    limits = dataclasses.replace(LIMITS, prompt_bytes=6 << 20)
    async with router_rig(tmp_path, "prefill-0", "decode-0", limits=limits) as rig:
        async with gaps() as found:
            await asyncio.sleep(0.1)
            body = {"model": "tiny", "prompt": "word " * (1 << 20), "max_tokens": 4}
            answer = await rig.http.post("/v1/completions", json=body, timeout=60)
            assert answer.status_code == 400
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "word " * (1 << 20)}]}
            answer = await rig.http.post("/v1/chat/completions", json=chat, timeout=60)
            assert answer.status_code == 400
        assert found.beats > 10
        assert found.worst_s < 0.25
        assert await rig.metric("baton_event_loop_lag_seconds_count") > 0


async def test_a_deadline_that_is_over_before_the_request_begins_is_told(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "timeout": 1e-9}
        answer = await rig.http.post("/v1/completions", json=body)
        assert answer.status_code == 504
        assert "before the request began" in answer.json()["error"]["message"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in rig.stub.Generate(api.GenerateRequest(prompt="hi"), timeout=0.001):
                pass
        assert refused.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        for timeout in (0, -1, float("inf")):
            wrong = (await rig.http.post("/v1/completions", content=_json(body, timeout))).json()
            assert wrong["error"]["param"] == "timeout", wrong


def _json(body: dict[str, object], timeout: float) -> str:
    text = {0: "0", -1: "-1"}.get(int(timeout) if abs(timeout) < 2 else 2, "1e999")
    return f'{{"model": "tiny", "prompt": "{body["prompt"]}", "timeout": {text}}}'
