"""The driver's frame: under a warden, with signals that cancel the work, so that every `finally` runs."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine
from typing import Any

from . import early, output, warden


def supervise_if_needed() -> int | None:
    """In the first process: be the warden of a driver with the same arguments, and return its exit code.

    In the driver: attach to the warden and return None; the command goes on.
    """
    if warden.supervised():
        warden.attach()
        output.keep_stdout()
        return None
    return warden.supervise([sys.executable, "-m", "baton.cluster.main", *sys.argv[1:]])


def run(work: Coroutine[Any, Any, int]) -> int:
    """Run `work` to its exit code. The first SIGINT, SIGTERM or SIGHUP cancels it, and the code is 1 unless it takes
    that for its regular end."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="baton: %(message)s")
    return asyncio.run(_run(work))


async def _run(work: Coroutine[Any, Any, int]) -> int:
    task = asyncio.create_task(work)
    stopped = asyncio.Event()

    def on_signal() -> None:
        if not stopped.is_set():
            stopped.set()
            task.cancel()

    loop = asyncio.get_running_loop()
    for kind in early.handled():
        loop.add_signal_handler(kind, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        if not stopped.is_set():
            raise
        print("baton: interrupted", file=sys.stderr, flush=True)
        return 1
