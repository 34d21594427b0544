"""Several routers on the same workers and ports; a loop that nothing holds up; deadlines that are over."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from baton.benchmarks.router_workers import Simulation, simulated
from baton.proto import baton_pb2 as api
from baton.router import main
from baton.tests.harness.loop_gaps import gaps
from baton.tests.harness.router_rig import LIMITS, FakeCluster, RouterRig, router_params, router_rig, write_model
from prometheus_client.parser import text_string_to_metric_families


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


async def test_a_router_joins_the_ports_of_others_when_it_can_serve(
    tmp_path: Path, membership: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "_PATIENCE_S", 60.0)  # not the clock, but the workers let it in
    first = await _router(tmp_path, membership, "router-0", share_ports=True)
    cluster = FakeCluster()  # without workers
    await cluster.start()
    params = dataclasses.replace(
        router_params(tmp_path / "model", cluster.address),
        router_id="router-1",
        share_ports=True,
        joins=True,
        **{f"{name}_address": first.addresses[name] for name in ("grpc", "http")},
    )
    second = RouterRig(cluster, params)
    starting = asyncio.create_task(second.start())
    try:
        await _all_ready(first.addresses["http"])  # nobody meets the one that cannot serve
        assert not starting.done()
        for name in ("prefill-0", "decode-0"):
            await cluster.add(name)
        await starting
        await _all_ready(first.addresses["http"])
    finally:
        await starting
        await second.close()
        await cluster.stop()
        await first.close()


def _sum(text: str, name: str) -> dict[str, float]:
    """The values of a series by router, "" for what belongs to none."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels.get("router", "")] = sample.value
    return found


async def test_one_scrape_has_the_sum_of_all_routers_and_what_workers_say_once(tmp_path: Path, membership: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="baton-"))  # a short path, as sockets need it
    (folder / "router-9").touch()  # of one that died
    names = ("router", "router-1")
    rigs = [await _router(tmp_path, membership, name, metrics_socket=str(folder / name)) for name in names]
    try:
        await _counted(rigs[0], 20)
        for _ in range(2):
            await _counted(rigs[1], 20)
        for rig in rigs:
            text = (await rig.http.get("/metrics")).text
            assert _sum(text, "baton_requests_completed_total") == {"router": 1, "router-1": 2}
            assert _sum(text, "vllm:generation_tokens_total") == {"router": 20, "router-1": 40}
            assert set(_sum(text, "baton_time_to_first_token_seconds_count")) == set(names)
            assert set(_sum(text, "vllm:num_requests_running")) == {""}
            assert text.count("# TYPE baton_requests_completed_total ") == 1
        await rigs[1].close()
        alone = (await rigs[0].http.get("/metrics")).text
        assert _sum(alone, "baton_requests_completed_total") == {"router": 1}
    finally:
        for rig in rigs:
            await rig.close()
    assert not any((folder / name).exists() for name in names)
    shutil.rmtree(folder)


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
