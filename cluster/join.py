"""`baton join`: one more router, on whatever host, for a cluster that runs elsewhere. It follows the same membership
and has sessions of its own with every worker, block events included, as the cluster's own routers have."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from . import router_command, spec
from .config import Config
from .failures import CommandFailed
from .model_check import ModelFacts
from .output import say
from .progress import StartProgress


async def join(config: Config, facts: ModelFacts, admin: str, verbose: bool) -> int:
    """Serve until cancelled, which is the regular end. admin: of the cluster. Raises CommandFailed when the router ends
    by itself; whoever started this starts it again."""
    progress = StartProgress(verbose, config.cluster.logs == "json")
    serving = asyncio.Event()
    at: dict[str, Any] = {}

    def on_report(kind: str, fields: dict[str, Any]) -> None:
        progress.report("router", kind, fields)
        if kind == "ready":
            at.update(fields)
        if kind == "serving":
            serving.set()

    params = spec.router_params(config, facts.name, admin)
    router = await router_command.spawn(params, on_report)
    ended, up = asyncio.create_task(router.wait()), asyncio.create_task(serving.wait())
    try:
        with progress:
            await asyncio.wait([ended, up], return_when=asyncio.FIRST_COMPLETED, timeout=config.cluster.start_timeout)
        if up.done():
            say(f"ready: {facts.name} at grpc {at['grpc']}, http {at['http']}, a router of the cluster at {admin}")
        elif not ended.done():
            print(f"baton: no worker of {admin} can be reached yet", file=sys.stderr, flush=True)
        raise CommandFailed(f"router: {await asyncio.shield(ended) or 'ended by itself'}")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        return 0
    finally:
        up.cancel()
        await router.stop(config.cluster.stop_grace)
