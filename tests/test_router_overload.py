"""Ten times what the workers can do: goodput stays, the rest is told at once, nothing grows."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path

import httpx
import psutil
import pytest
from baton.benchmarks.router_workers import Simulation, simulated
from baton.tests.harness.router_rig import FakeCluster, RouterRig, router_params, write_model

SECONDS = float(os.environ.get("BATON_OVERLOAD_S", "120"))
SEATS, TOKENS, STEP_S = 8, 20, 0.02


class Load:
    """What became of the requests of one load."""

    def __init__(self) -> None:
        self.served = 0
        self.refusals: list[float] = []
        self.others: list[int] = []

    async def one(self, http: httpx.AsyncClient) -> None:
        body = {"model": "tiny", "prompt": [5] * 16, "max_tokens": TOKENS, "ignore_eos": True}
        begun = time.monotonic()
        answer = await http.post("/v1/completions", json=body)
        if answer.status_code == 200:
            self.served += 1
        elif answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1:
            self.refusals.append(time.monotonic() - begun)
        else:
            self.others.append(answer.status_code)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ten_times_the_capacity_for_two_minutes(tmp_path: Path) -> None:
    simulation = Simulation(1, STEP_S, SEATS, 0.0, str(tmp_path / "clock"))
    async with simulated(simulation) as membership:
        params = dataclasses.replace(router_params(write_model(tmp_path / "model"), membership), max_inflight=2 * SEATS)
        rig = RouterRig(FakeCluster(), params)
        await rig.start()
        await rig.ready()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(base_url=rig.http.base_url, trust_env=False, timeout=60, limits=limits) as http:
            best = Load()
            begun = time.monotonic()

            async def client() -> None:
                while time.monotonic() - begun < 10:
                    await best.one(http)

            await asyncio.gather(*(client() for _ in range(2 * SEATS)))
            capacity = best.served / (time.monotonic() - begun)
            over, tasks, process = Load(), set(), psutil.Process()
            begun, memory, sent = time.monotonic(), 0, 0
            while (passed := time.monotonic() - begun) < SECONDS:
                while sent < passed * capacity * 10:
                    task = asyncio.create_task(over.one(http))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    sent += 1
                if not memory and passed > SECONDS / 4:
                    memory = process.memory_info().rss
                await asyncio.sleep(0.01)
            grown = process.memory_info().rss - memory
            goodput = over.served / SECONDS
            await asyncio.gather(*tasks)
        await rig.reconcile()
        await rig.close()
    refusals = sorted(over.refusals)
    p99 = refusals[int(0.99 * len(refusals))]
    print(
        f"capacity {capacity:.1f}/s, goodput {goodput:.1f}/s of {sent / SECONDS:.0f}/s; refused in {p99 * 1e3:.1f} ms"
    )
    print(f"memory grew by {grown / 2**20:.1f} MiB")
    assert over.others == []
    assert goodput >= 0.9 * capacity
    assert p99 < 0.05
    assert grown < 32 << 20
