"""Streams over gRPC in numbers: cancelled, forgotten, slow, side by side (API-02 to API-04, API-07 to API-09)."""

from __future__ import annotations

import ast
import asyncio
import gc
import logging
import math
import pickle
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from baton.cluster.config import Config, ModelSection
from baton.proto import baton_pb2 as api
from baton.tests.harness.router_rig import CONTEXT, RouterRig, router_rig

ROOT = Path(__file__).resolve().parent.parent
LONG = api.GenerateRequest(prompt="x", max_tokens=200)


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path, "prefill-0", "decode-0", max_inflight=512) as rig:
        rig.cluster.script = lambda leg, choice, index: ord("a")
        yield rig


async def cancel_many(rig: RouterRig, count: int) -> None:
    """Streams that are cancelled after their first tokens, 20 at a time; none comes to its end by itself."""
    rig.cluster["decode-0"].most_tokens = 3

    async def one() -> None:
        call = rig.stub.Generate(LONG)
        async for message in call:
            if message.HasField("tokens"):
                break
        call.cancel()

    for _ in range(count // 20):
        await asyncio.gather(*(one() for _ in range(20)))
    await rig.cluster.settled()
    rig.cluster["decode-0"].most_tokens = math.inf


async def test_api_02_cancelled_and_forgotten_streams_leave_nothing(rig: RouterRig) -> None:
    await cancel_many(rig, 200)
    assert await rig.metric("baton_requests_cancelled_total") == 200
    rig.cluster["decode-0"].most_tokens = 3
    forgotten: Any = rig.stub.Generate(LONG, timeout=1.0)
    await forgotten.read()
    del forgotten  # the client reads one message and forgets the call: its deadline ends it
    gc.collect()
    await rig.cluster.settled()
    await rig.reconcile()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_api_02_5000_cancelled_streams_do_not_grow(rig: RouterRig) -> None:
    await cancel_many(rig, 1000)
    gc.collect()
    before = psutil.Process().memory_info().rss
    await cancel_many(rig, 5000)
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    assert grown < 5000 * 4096, f"{grown / 5000:.0f} bytes a stream"  # client, router and workers share this process
    await rig.reconcile()


def test_api_03_processes_are_made_by_exec_and_have_one_loop_each() -> None:
    """A fork after gRPC began hangs, and so do its objects in a second event loop."""
    forks, loops = [], []
    for path in sorted(ROOT.glob("[a-z]*/**/*.py")):
        room = path.relative_to(ROOT).parts[0]
        if room in ("tests", "benchmarks", "build") or "_pb2" in path.name:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                forks += [f"{path}:{node.lineno}" for name in names if name.split(".")[0] == "multiprocessing"]
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.fork", "os.forkpty"):
                forks.append(f"{path}:{node.lineno}")
            elif isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.new_event_loop":
                loops.append(f"{path}:{node.lineno}")
    assert (forks, loops) == ([], [])


async def test_api_04_a_huge_prompt_delays_no_stream_over_grpc(rig: RouterRig) -> None:
    """5 MB that will be refused, while eight streams run and health is asked."""
    rig.cluster["decode-0"].step_s = 0.01
    lates: list[float] = []

    async def stream() -> None:
        last = used = 0.0
        async for message in rig.stub.Generate(LONG):
            now, computed = time.monotonic(), time.process_time()
            if last and message.HasField("tokens"):
                lates.append(min(now - last, computed - used))  # what other processes took does not count
            last, used = now, computed

    streams = [asyncio.create_task(stream()) for _ in range(8)]
    await asyncio.sleep(0.2)
    # the largest text that is tokenised before it can be refused, and one that is refused by its size
    for size in (1 << 20, 5 << 20):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.generate(prompt="word " * (size // 5))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await asyncio.gather(*streams)
    assert max(lates) < 1.0  # an event loop that tokenises itself stands still for seconds


async def test_api_07_150_slow_streams_at_once_over_one_connection(rig: RouterRig) -> None:
    rig.cluster["decode-0"].most_tokens = 2
    request = api.GenerateRequest(prompt="x", max_tokens=8)

    async def one() -> int:
        return sum([len(m.tokens.token_ids) async for m in rig.stub.Generate(request, timeout=60)])

    running = [asyncio.create_task(one()) for _ in range(150)]
    await rig.counts("baton_router_inflight_requests", 150)
    rig.cluster["decode-0"].most_tokens = math.inf
    assert await asyncio.gather(*running) == [8] * 150


async def test_api_08_a_pickle_on_a_port_is_never_opened(rig: RouterRig, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "touched",)

    data = pickle.dumps(Touch())
    for name in ("grpc", "http"):
        host, _, port = rig.addresses[name].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data * 20 + b"\r\n\r\n")
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 30)
        writer.close()
    call: Any = rig.channel.unary_unary("/baton.v1.Baton/ListModels")
    with pytest.raises(grpc.aio.AioRpcError):
        await call(data)
    assert not (tmp_path / "touched").exists()
    assert (await rig.generate(prompt="x", max_tokens=2)).ids == {0: [97, 97]}
    router = Config(model=ModelSection(path="x")).router
    assert {address.rpartition(":")[0] for address in (router.grpc, router.http, router.admin)} == {"127.0.0.1"}


async def test_api_09_cancelled_streams_leave_clean_logs(rig: RouterRig, caplog: pytest.LogCaptureFixture) -> None:
    """With asyncio's own checks on: no task that nobody awaits, no exception that nobody saw."""
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    try:
        with caplog.at_level(logging.ERROR):
            await cancel_many(rig, 40)
            batch = rig.stub.GenerateBatch(api.GenerateBatchRequest(requests=[LONG] * 6, parallelism=3))
            await batch.read()
            batch.cancel()
            for wrong in (0, CONTEXT + 1):
                with pytest.raises(grpc.aio.AioRpcError):
                    await rig.generate(prompt="x", max_tokens=wrong)
            rig.cluster["decode-0"].most_tokens = 3
            for timeout in (0.02, 0.03, 0.05, 0.05, 0.05):
                with pytest.raises(grpc.aio.AioRpcError):
                    await rig.generate(prompt="x", max_tokens=200, timeout=timeout)
            await rig.cluster.settled()
            gc.collect()
            await asyncio.sleep(0.05)
    finally:
        loop.set_debug(False)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
