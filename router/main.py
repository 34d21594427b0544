"""The router process: binds its ports, follows the membership, serves until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..proto.errors import ConfigError
from . import loop_lag, membership
from .batches import Batches
from .core import Core
from .front_door import FrontDoor
from .grpc_frontend import GrpcFrontend
from .http_frontend import HttpFrontend
from .metrics_peers import MetricsPeers
from .params import RouterParams
from .tenants import Tenants
from .text_service import TextService

_PATIENCE_S = 5.0  # that a router waits for workers before it joins others on their ports
_LOOK_S = 0.02


async def run(params: RouterParams, report: Callable[[str, dict[str, Any]], None], stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then lets live streams finish for params.stop_grace_s.

    Calls report("ready", {"grpc", "http", "pid"}) once both ports answer; the addresses have the real ports. Then
    report("serving", {}) whenever requests can be served that could not before.
    Raises AddressTaken, before anything is loaded unless it joins others; ConfigError for a model whose tokenizer
    cannot be read.
    """
    async with contextlib.AsyncExitStack() as stack:
        tenants = Tenants(params.tenants, time.monotonic())
        front = None if params.joins else await _bind(params, tenants, stack)
        text = await asyncio.to_thread(TextService.load, params.model_path, params.max_inflight)
        stack.callback(text.close)
        rng = random.Random()
        core = Core(params, text.tokenizer, rng, tenants)
        stack.push_async_callback(core.sessions.close)
        if core.tracer is not None:
            stack.push_async_callback(asyncio.to_thread, core.tracer.close)
        door = FrontDoor(params, core, text, rng)
        follow = membership.follow(params.membership_address, params.router_id, core.view_changed, params.peer_tls)
        background = [asyncio.create_task(follow)]
        stack.push_async_callback(_cancel, background)
        if front is None:  # those that share the port serve meanwhile
            await _until_ready(core, stop)
            front = await _bind(params, tenants, stack)
        grpc_frontend, http_frontend = front
        await grpc_frontend.start(door)
        health = grpc_frontend.follow_health(core, lambda: report("serving", {}))
        background += [asyncio.create_task(work) for work in (health, loop_lag.watch(core.metrics.loop_lag.observe))]
        batches = await asyncio.to_thread(_batches, params, door, rng)
        if batches is not None:
            background.append(asyncio.create_task(batches.run()))
        peers = MetricsPeers(params.metrics_socket, core.metrics)
        await peers.start()
        stack.push_async_callback(peers.stop)
        http = asyncio.create_task(http_frontend.serve(door, batches, peers))
        stack.push_async_callback(_end_http, http_frontend, http)
        report("ready", {"grpc": grpc_frontend.address, "http": http_frontend.address, "pid": os.getpid()})
        await _until(stop, [*background, http])
        core.leave()
        await asyncio.sleep(params.lame_duck_s)
        await core.stop(params.stop_grace_s)


async def _bind(
    params: RouterParams, tenants: Tenants, stack: contextlib.AsyncExitStack
) -> tuple[GrpcFrontend, HttpFrontend]:
    """Both ports, freed with `stack`. Raises AddressTaken, ConfigError."""
    grpc_frontend = await GrpcFrontend.bind(params, tenants)
    stack.push_async_callback(grpc_frontend.stop)
    http_frontend = HttpFrontend(params.http_address, params.share_ports)
    stack.callback(http_frontend.stop)
    return grpc_frontend, http_frontend


async def _until_ready(core: Core, stop: asyncio.Event) -> None:
    """Waits until requests can be served, for a while: a router that can serve none says why to whoever asks."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            while core.not_ready() and not stop.is_set():
                await asyncio.sleep(_LOOK_S)


def _batches(params: RouterParams, door: FrontDoor, rng: random.Random) -> Batches | None:
    """None where they are off. Raises ConfigError for a folder that cannot be used."""
    options = params.batches
    if options.folder is None:
        return None
    try:
        return Batches(door, options, Path(options.folder), rng)
    except OSError as error:
        raise ConfigError(f"router.batches.folder: {options.folder}: {error.strerror or error}") from None


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _end_http(frontend: HttpFrontend, serving: asyncio.Task[None]) -> None:
    frontend.stop()
    await asyncio.gather(serving, return_exceptions=True)


async def _until(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Waits for `stop`; a service task that ends before it is a failure, which is raised."""
    waiting = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    for task in tasks:
        if task.done():
            task.result()
            raise RuntimeError("a service of the router ended by itself")
