"""Queues and batches of a running cluster over time, from the router's /metrics: as a simulation's timeline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from prometheus_client.parser import text_string_to_metric_families

from .http_client import Broken, HttpConnection, Unreachable
from .simulator.timeline import Row


class Watch:
    """`rows`: one for each look that succeeded; seconds since `began`, of the monotonic clock. `blocks`: of a worker of
    each pool, once they are known."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.rows: list[Row] = []
        self.blocks: dict[str, int] = {}
        self.prefix_hit_tokens = self.prefix_query_tokens = 0.0

    def take(self, text: str, now: float) -> None:
        """What the router says now."""
        sums: dict[tuple[str, str], float] = {}
        workers = {"prefill": 0, "decode": 0}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                role = sample.labels.get("role", "")
                sums[sample.name, role] = sums.get((sample.name, role), 0.0) + sample.value
                if sample.name == "baton_kv_total_blocks" and role in workers:
                    workers[role] += 1
                    self.blocks[role] = round(sample.value)
        self.rows.append(_row(sums, workers, now - self.began))
        self.prefix_hit_tokens = sums.get(("baton_prefix_hit_tokens_total", "prefill"), 0.0)
        self.prefix_query_tokens = sums.get(("baton_prefix_query_tokens_total", "prefill"), 0.0)


def _row(sums: dict[tuple[str, str], float], workers: dict[str, int], at: float) -> Row:
    def of(name: str, role: str = "") -> float:
        return sums.get((f"baton_{name}", role), 0.0)

    def share(role: str) -> float:
        return of("kv_used_blocks", role) / max(1.0, of("kv_total_blocks", role))

    at_workers = of("worker_waiting", "prefill") + of("worker_running", "prefill") + of("worker_waiting", "decode")
    return Row(
        at,
        max(0, round(of("router_queued_requests") - at_workers)),
        round(of("worker_waiting", "prefill")),
        round(of("worker_running", "prefill")),
        round(of("worker_waiting", "decode")),
        round(of("worker_running", "decode")),
        share("prefill"),
        share("decode"),
        workers["prefill"],
        workers["decode"],
    )


@contextlib.asynccontextmanager
async def watching(connection: HttpConnection, every_s: float) -> AsyncIterator[Watch]:
    """Looks every so often while the block runs, and once before; a look that fails is left out. Closes the
    connection."""
    watch = Watch()

    async def look() -> None:
        with contextlib.suppress(Unreachable, Broken):
            reply = await connection.request("GET", "/metrics")
            if reply.status == 200:
                watch.take(reply.body.decode(), time.monotonic())

    async def keep_looking() -> None:
        while True:
            await asyncio.sleep(every_s)
            await look()

    await look()
    task = asyncio.create_task(keep_looking())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        connection.close()
