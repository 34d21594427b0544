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
    """Start the cluster, print the ready line, and wait to be cancelled."""
    progress = StartProgress(verbose)
    with progress:
        async with running(config, facts.name, progress.report) as deployment:
            progress.stop()
            print(spec.threads_line(config), file=sys.stderr)
            say(ready_line(deployment, facts.name))
            await asyncio.Event().wait()
    print("stopped", file=sys.stderr)
    return 0


def ready_line(deployment: Deployment, name: str) -> str:
    """What is served where, and how much of it."""
    at = deployment.endpoints
    tokens, sequences = deployment.capacity()
    return (
        f"ready: {name} at grpc {at['grpc']}, http http://{at['http']}, admin {at['admin']}; "
        f"KV capacity {tokens:,} tokens, at most {sequences} sequences at a time"
    )
