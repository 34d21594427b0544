"""`baton join`: a router in a process of its own, with a cluster that it did not start."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import httpx
import yaml
from baton.tests.harness.router_rig import FakeCluster

BATON = (sys.executable, "-m", "baton.cluster.main", "join")


async def test_a_router_elsewhere_serves_the_clusters_workers(tmp_path: Path, tiny_dir: Path) -> None:
    cluster = FakeCluster()
    await cluster.start()
    for name in ("prefill-0", "decode-0"):
        await cluster.add(name)
    ports = dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0")
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": str(tiny_dir), "name": "tiny"}, "router": ports}))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*BATON, str(file), "--admin", cluster.address, stdout=pipe)
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert line.startswith("ready: tiny at grpc 127.0.0.1:"), line
        http = line.partition("http ")[2].partition(",")[0]
        async with httpx.AsyncClient(base_url=f"http://{http}", timeout=20, trust_env=False) as client:
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert answer.json()["choices"][0]["text"] == "hello"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
        await cluster.settled()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await cluster.stop()


async def test_an_address_that_is_none_is_refused_at_once(tmp_path: Path, tiny_dir: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": str(tiny_dir)}}))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*BATON, str(file), "--admin", "there", stderr=pipe)
    _, said = await process.communicate()
    assert (process.returncode, b"--admin: there" in said) == (2, True), said
