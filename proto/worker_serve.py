"""A worker leader's main thread: its gRPC service beside the engine thread, until it is stopped or broken."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

import grpc

from . import worker_pb2 as pb
from . import worker_pb2_grpc
from .peer_tls import add_port
from .session_server import SERVER_OPTIONS, SessionParams, SessionServer
from .worker_loop import Commands, Engine, SessionEnded, WorkerLoop

_SWITCH_S = (
    0.0005  # a thread waits so long for another that computes in Python: links and the engine wait for each other
)
_POLL_S = 0.1  # how often `stop` is looked at
_LAST_WORDS_S = 1.0  # for the Failed events of a broken engine
_GRACE_S = 0.2  # for what was handed to gRPC to leave
_LAST_STEP_S = 30.0


Beside = Callable[[Callable[[], None]], Coroutine[Any, Any, object]]  # runs until cancelled; says when it serves


class Stop(Protocol):
    """A threading.Event, or anything that answers as one."""

    def is_set(self) -> bool:
        """Whether the worker shall end."""
        ...


async def serve_worker(
    engine: Engine,
    inbox: queue.SimpleQueue[object],
    sessions: SessionParams,
    welcome: pb.Welcome,
    host: str,
    port: int,
    report: Callable[[str, dict[str, Any]], None],
    stop: Stop,
    beside: Beside | None = None,
) -> None:
    """Serve until `stop`. Reports "ready" with the address. `beside` runs in the same event loop for as long.

    Raises what broke the engine or ended `beside`, and RuntimeError when the port is taken.
    """
    service = SessionServer(
        sessions,
        welcome,
        on_commands=lambda session, commands: inbox.put(Commands(session, commands)),
        on_end=lambda session: inbox.put(SessionEnded(session)),
    )
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    place = f"[{host}]" if ":" in host else host
    bound = add_port(server, f"{place}:{port}", sessions.tls)
    loop = WorkerLoop(engine, inbox, asyncio.get_running_loop(), service.deliver)
    await server.start()
    sys.setswitchinterval(_SWITCH_S)
    loop.start()
    extra, serving = _begin(beside)
    try:
        await asyncio.wait([extra, serving], return_when=asyncio.FIRST_COMPLETED)
        if not extra.done():
            report("ready", {"address": f"{place}:{bound}", "pid": os.getpid()})
        while not stop.is_set() and not loop.ended.is_set() and not extra.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await loop.ended.wait()
        if loop.failure is not None:
            await service.flush(_LAST_WORDS_S)
    finally:
        serving.cancel()
        extra.cancel()
        await asyncio.wait([extra, serving])
        await server.stop(0 if loop.failure is None else _GRACE_S)
        await asyncio.to_thread(loop.stop, _LAST_STEP_S)
    if loop.failure is not None:
        raise loop.failure
    if not extra.cancelled():
        extra.result()


def _begin(beside: Beside | None) -> tuple[asyncio.Future[object], asyncio.Future[object]]:
    """(`beside` as it runs, what is done when it serves); without one, nothing that ends and something that is done."""
    up = asyncio.Event()
    if beside is None:
        up.set()
    extra = asyncio.ensure_future(beside(up.set) if beside is not None else asyncio.Event().wait())
    return extra, asyncio.ensure_future(up.wait())
