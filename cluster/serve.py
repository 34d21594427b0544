"""`baton serve`: one cluster, until interrupted."""

from __future__ import annotations

import asyncio
import sys

from . import spec
from .config import Config
from .deployment import Deployment, running
from .model_check import ModelFacts
from .output import say
from .progress import StartProgress


async def serve(config: Config, facts: ModelFacts, verbose: bool) -> int:
    """Start the cluster, print the ready line, and wait to be cancelled: then this is a success."""
    progress = StartProgress(verbose, config.cluster.logs == "json")
    with progress:
        async with running(config, facts.name, progress.report) as deployment:
            progress.stop()
            print(spec.threads_line(config), file=sys.stderr)
            say(ready_line(deployment, facts.name))
            await _interrupt()
            print("stopping (again: at once)", file=sys.stderr, flush=True)
    print("stopped", file=sys.stderr, flush=True)
    return 0


async def _interrupt() -> None:
    """Returns when this task is cancelled: that is how a server is asked to end."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()


def ready_line(deployment: Deployment, name: str) -> str:
    """What is served where, and how much of it."""
    at = deployment.endpoints
    tokens, sequences = deployment.capacity()
    return (
        f"ready: {name} at grpc {at['grpc']}, http {deployment.url}, admin {at['admin']}; "
        f"KV capacity {tokens:,} tokens, at most {sequences} sequences at a time"
    )
