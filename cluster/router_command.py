"""How the process of a router is started."""

from __future__ import annotations

import os
import sys

from ..router.params import RouterParams
from . import spec
from .child import Child, Report

COMMAND = (sys.executable, "-m", "baton.cluster.router_process")
# gRPC polls in the threads that wait for its events anyway, and not in others that hand each one on: a message to a
# stream takes a quarter less CPU (docs/performance.md). Read when gRPC is imported.
_POLLING = ",".join(
    f"-event_engine_{part}" for part in ("client", "listener", "for_all_other_endpoints", "callback_cq")
)


async def spawn(params: RouterParams, on_report: Report) -> Child:
    """Starts a router. Raises OSError."""
    return await Child.spawn(COMMAND, spec.router_to_json(params), on_report, environment())


def environment() -> dict[str, str]:
    """What it has beside ours; what a user has set goes first."""
    return {"GRPC_EXPERIMENTS": os.environ.get("GRPC_EXPERIMENTS", _POLLING)}
