"""All ranks of one worker under one incarnation: the leader first, the followers when its channel is open; the end of
any rank is the end of all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .child import Report
from .launcher import Launcher, PlacementFailed, Rank, S
from .spec import WorkerSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a group ended. `reason` is "" when it was asked to."""

    reason: str
    config_error: bool = False


class _Over(Exception):
    """Internal: the group is to end now."""


class WorkerGroup(Generic[S]):
    """One incarnation. `build(rank, leader_address)` makes a rank's specification; `on_report` sees rank 0's."""

    def __init__(
        self,
        launcher: Launcher[S],
        name: str,
        ranks: int,
        device: str,
        build: Callable[[int, str], WorkerSpec],
        on_report: Report,
    ) -> None:
        self._launcher = launcher
        self._name = name
        self._count = ranks
        self._device = device
        self._build = build
        self._on_report = on_report
        self._ranks: list[Rank] = []
        self._watchers: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        self._channel: asyncio.Future[str] = loop.create_future()
        self._ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._over: asyncio.Future[Any] = loop.create_future()
        self._grace_s = 0.0

    def stop(self, grace_s: float) -> None:
        """End all ranks: asked first, killed after `grace_s`. `run` returns when they have ended.

        Ranks that still load serve nobody, and are killed at once.
        """
        self._grace_s = grace_s if self._ready.done() else 0.0
        self._end(Ended(""))

    async def run(self, timeout_s: float, on_ready: Callable[[dict[str, Any]], Awaitable[None]]) -> Ended:
        """Start the ranks, call `on_ready` with the leader's report, and wait for the end.

        `on_ready` may raise to end the group. `timeout_s` bounds the way to readiness.
        """
        try:
            slot = await self._launcher.reserve(self._name, self._count, self._device)
        except PlacementFailed as error:
            return Ended(str(error))
        try:
            async with asyncio.timeout(timeout_s):
                await self._start(slot, 0, "")
                if self._count > 1:
                    address = await self._until(self._wait(self._channel))
                    for rank in range(1, self._count):
                        await self._start(slot, rank, address)
                report = await self._until(self._wait(self._ready))
                await self._until(_call(on_ready, report))
            await asyncio.wait([self._over])
        except TimeoutError:
            self._end(Ended(f"{self._name} was not ready within {timeout_s:g} s"))
        except _Over:
            pass
        except Exception as error:
            self._end(Ended(str(error) or repr(error)))
        finally:
            await self._stop_ranks()
            for watcher in self._watchers:
                watcher.cancel()
            await self._launcher.release(slot)
        ended: Ended = self._over.result()
        return ended

    async def _stop_ranks(self) -> None:
        """The leader first: it tells the others to end, and would take their going before it for a failure."""
        leader, others = self._ranks[:1], self._ranks[1:]
        if self._grace_s == 0:
            leader, others = [], self._ranks
        for ranks in (leader, others):
            await asyncio.gather(*(rank.stop(self._grace_s) for rank in ranks), return_exceptions=True)

    def _end(self, ended: Ended) -> None:
        if not self._over.done():
            self._over.set_result(ended)

    async def _start(self, slot: S, rank: int, leader: str) -> None:
        if self._over.done():
            raise _Over

        def on_report(kind: str, fields: dict[str, Any]) -> None:
            self._take(rank, kind, fields)

        started = await self._launcher.start(slot, self._build(rank, leader), on_report)
        self._ranks.append(started)
        self._watchers.append(asyncio.create_task(self._watch(rank, started)))

    async def _watch(self, rank: int, started: Rank) -> None:
        reason = await started.wait()
        where = f"{self._name} rank {rank}" if self._count > 1 else self._name
        self._end(Ended(f"{where}: {reason or 'ended by itself'}", started.config_error))

    def _take(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        if rank == 0 and kind == "channel" and not self._channel.done():
            self._channel.set_result(str(fields["address"]))
        if rank == 0 and kind == "ready" and not self._ready.done():
            self._ready.set_result(fields)
        if rank == 0 or kind in ("log", "failed"):
            self._on_report(kind, fields)

    @staticmethod
    async def _wait(future: asyncio.Future[T]) -> T:
        return await asyncio.shield(future)

    async def _until(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or _Over when the group ends first."""
        task: asyncio.Future[Any] = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if self._over.done():
            raise _Over
        result: T = task.result()
        return result


async def _call(on_ready: Callable[[dict[str, Any]], Awaitable[None]], report: dict[str, Any]) -> None:
    await on_ready(report)
