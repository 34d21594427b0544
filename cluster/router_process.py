"""The router as a plain process: `python -m baton.cluster.router_process`, parameters on stdin (child.py)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from typing import Any

from ..proto import failpoints
from .child import Report, run_child
from .processes import settle
from .spec import router_from_json

_COLLECT_AFTER = 20_000  # objects; a stream makes a dozen for each token and leaves no circles


def main(values: dict[str, Any], report: Report, stop: threading.Event) -> None:
    """Serves until `stop`."""
    import uvloop

    from ..router import main as router

    failpoints.identify("router")
    gc.freeze()  # what the imports made stays; a collection then goes through requests only
    gc.set_threshold(_COLLECT_AFTER)

    def tell(kind: str, fields: dict[str, Any]) -> None:
        if kind == "ready":
            settle()
        report(kind, fields)

    async def run() -> None:
        stopping, loop = asyncio.Event(), asyncio.get_running_loop()

        def relay() -> None:
            stop.wait()
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(stopping.set)

        threading.Thread(target=relay, daemon=True, name="stop-relay").start()
        await router.run(router_from_json(values), tell, stopping)

    uvloop.run(run())


if __name__ == "__main__":
    run_child(main)
