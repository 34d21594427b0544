"""Streams over HTTP in numbers: left, forgotten, slow (API-01, API-02, API-07, API-09); readiness by cause (OB-03)."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from baton.tests.harness.router_rig import CONTEXT, RouterRig, router_rig, say

TEXT = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 200, "stream": True}


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path, "prefill-0", "decode-0", max_inflight=512) as rig:
        rig.cluster.script = lambda leg, choice, index: ord("a")
        rig.cluster["decode-0"].step_s = 0.01
        yield rig


async def leave(http: httpx.AsyncClient, path: str = TEXT, **body: Any) -> None:
    """Reads the first event of a stream, and goes."""
    async with http.stream("POST", path, json={**LONG, **body}) as answer:
        assert answer.status_code == 200
        await anext(answer.aiter_lines())


async def test_api_01_streams_that_are_left_stop_and_the_next_request_is_served(rig: RouterRig) -> None:
    async with httpx.AsyncClient(base_url=rig.http.base_url, timeout=30, trust_env=False) as http:
        await asyncio.gather(*(leave(http) for _ in range(32)))
    await rig.cluster.settled()  # long before 200 tokens of 10 ms
    assert await rig.metric("baton_requests_cancelled_total") == 32
    assert (await rig.http.post(TEXT, json={"prompt": "x", "max_tokens": 2})).json()["choices"][0]["text"] == "aa"


async def test_api_02_left_and_forgotten_streams_leave_nothing(rig: RouterRig) -> None:
    async with httpx.AsyncClient(base_url=rig.http.base_url, timeout=30, trust_env=False) as http:
        for _ in range(10):
            await asyncio.gather(*(leave(http) for _ in range(20)))
        await rig.cluster.settled()
        assert await rig.metric("baton_requests_cancelled_total") == 200
        # a client that reads one event and forgets the call: its own deadline ends it
        kept = await http.send(http.build_request("POST", TEXT, json={**LONG, "timeout": 0.5}), stream=True)
        await anext(kept.aiter_raw())
        await rig.cluster.settled()
        await kept.aclose()
    await rig.reconcile()


async def test_api_07_a_stream_with_long_gaps_is_cut_by_no_hidden_limit(tmp_path: Path) -> None:
    """Gaps many times what a session, a heartbeat or readiness waits for; `timeout` is the one limit of the whole."""
    async with router_rig(tmp_path, "prefill-0", "decode-0", stall_s=0.1) as rig:
        rig.cluster.script = say("slow")
        rig.cluster["decode-0"].step_s = 1.5  # sessions are dead after one second of silence
        async with rig.http.stream("POST", TEXT, json={"prompt": "x", "stream": True}) as answer:
            events = [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == "slow"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        late = await rig.http.post(TEXT, json={"prompt": "x", "timeout": 0.4})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_api_09_streams_that_are_left_leave_clean_logs(rig: RouterRig, caplog: pytest.LogCaptureFixture) -> None:
    """With asyncio's own checks on: no task that nobody awaits, no exception that nobody saw."""
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    try:
        with caplog.at_level(logging.ERROR):
            async with httpx.AsyncClient(base_url=rig.http.base_url, timeout=30, trust_env=False) as http:
                await asyncio.gather(*(leave(http) for _ in range(10)))
                await asyncio.gather(*(leave(http, prompt=["x", "y", "z"], n=2) for _ in range(4)))
                body = {"text_input": "x", "max_tokens": 200}
                async with http.stream("POST", "/v2/models/tiny/generate_stream", json=body) as answer:
                    await anext(answer.aiter_lines())
                for wrong in (-1, CONTEXT + 1):
                    assert (await http.post(TEXT, json={"prompt": "x", "max_tokens": wrong})).status_code == 400
                for timeout in (0.02, 0.05):
                    assert (
                        await http.post(TEXT, json={**LONG, "stream": False, "timeout": timeout})
                    ).status_code == 504
            await rig.cluster.settled()
            gc.collect()
            await asyncio.sleep(0.05)
    finally:
        loop.set_debug(False)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("cause", ["loading", "dead decode", "frozen decode"])
async def test_ob_03_readiness_says_why_and_liveness_stays(tmp_path: Path, cause: str) -> None:
    workers = () if cause == "loading" else ("prefill-0", "decode-0")
    reason = f"no {'prefill and no ' if cause == 'loading' else ''}decode worker is ready"
    async with router_rig(tmp_path, *workers) as rig:
        if cause == "dead decode":
            await rig.cluster["decode-0"].kill()
        elif cause == "frozen decode":
            rig.cluster["decode-0"].muted = True  # as a process that SIGSTOP froze: its connection stays
        until = time.monotonic() + 10
        while (ready := await rig.http.get("/ready")).status_code == 200 and time.monotonic() < until:
            await asyncio.sleep(0.02)
        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
        assert ready.json()["reason"] == reason
        assert (await rig.http.get("/live")).status_code == 200
