"""Ten times what the workers can do: goodput stays, the rest is told at once, nothing grows.

Router, clients and workers (simulated: no model) are processes of their own, so that what is seen is the router's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from baton.benchmarks.router import child, says
from baton.benchmarks.router_workers import Simulation
from baton.cluster.spec import router_to_json
from baton.tests.harness import oracles
from baton.tests.harness.overload_clients import Offer
from baton.tests.harness.router_rig import router_params, write_model

SECONDS = float(os.environ.get("BATON_OVERLOAD_S", "120"))
BEST_S = 10.0
SEATS, TOKENS, STEP_S = 16, 20, 0.02  # 40 requests a second
PYTHON = (sys.executable, "-m")


@contextlib.asynccontextmanager
async def _router(tmp_path: Path) -> AsyncIterator[tuple[str, psutil.Process]]:
    """The URL and the process of a router that is ready, in front of one pair of workers."""
    simulation = Simulation(1, STEP_S, SEATS, 0.0, str(tmp_path / "clock"))
    async with child(asdict(simulation), None, *PYTHON, "baton.benchmarks.router_workers") as workers:
        membership = (await says(workers, "membership"))["membership"]
        params = router_params(write_model(tmp_path / "model"), membership)
        values = router_to_json(dataclasses.replace(params, max_inflight=2 * SEATS, dead_after_s=5.0))
        async with child(values, None, *PYTHON, "baton.cluster.router_process") as router:
            url = f"http://{(await says(router, 'http'))['http']}"
            drain = asyncio.create_task(router.stdout.read())  # its log
            async with httpx.AsyncClient(trust_env=False) as http:
                while (await http.get(f"{url}/ready")).status_code != 200:
                    await asyncio.sleep(0.05)
            yield url, psutil.Process(router.pid)
        await drain  # to its end: it was killed


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ten_times_the_capacity_for_two_minutes(tmp_path: Path) -> None:
    async with _router(tmp_path) as (url, router):
        offer = Offer(url, 2 * SEATS, TOKENS, BEST_S, SECONDS, 10.0)
        async with child(asdict(offer), None, *PYTHON, "baton.tests.harness.overload_clients") as clients:
            best: dict[str, Any] = await says(clients, "best")
            used = sum(router.cpu_times()[:2])
            await says(clients, "quarter")
            memory = router.memory_info().rss
            await says(clients, "end")
            grown = router.memory_info().rss - memory
            used = sum(router.cpu_times()[:2]) - used
            over = await says(clients, "goodput")
        await asyncio.to_thread(oracles.check_pool, url)
        await asyncio.to_thread(oracles.check_accounts, url)
    print(f"best {best['best']:.1f}/s, then {over}")
    print(f"memory grew by {grown / 2**20:.1f} MiB; the router used {used / (0.75 * SECONDS):.0%} of a core")
    assert best["best_others"] == over["others"] == {}
    assert over["goodput"] >= 0.9 * best["best"]
    assert over["p99"] < 0.05
    assert grown < 32 << 20
