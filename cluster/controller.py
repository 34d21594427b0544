"""The controller's asyncio edge: runs what reconcile.py decides, restarts workers under new incarnations, and publishes
the membership view.

A worker becomes `ready` when it has passed a self-test with every ready worker of the other pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic

from ..proto.errors import ConfigError
from ..proto.peer_tls import PeerTLS
from . import worker_probe
from .failures import Refused, StartFailed
from .launcher import Launcher, S
from .membership import EMPTY, Member, View
from .reconcile import Backoff, Drain, Forget, Observed, Start, Stop, enter, members, pool_of, reconcile, scaled
from .spec import WorkerSpec
from .worker_group import Ended, WorkerGroup

_log = logging.getLogger(__name__)
_END_SHOWS_S = 2.0
MOST_REPLICAS = 1024
Build = Callable[[str, str, int, str], WorkerSpec]  # worker id, incarnation, rank, leader's address ("" for rank 0)
OnReport = Callable[[str, str, dict[str, Any]], None]  # worker id, kind, fields


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Times in seconds."""

    ranks: dict[str, int]  # per worker, by pool
    devices: dict[str, str]  # by pool
    start_timeout_s: float
    self_test_timeout_s: float
    stop_grace_s: float
    drain_timeout_s: float
    heartbeat_s: float
    backoff: Backoff
    tls: PeerTLS | None  # of sessions with workers


class Feed:
    """The current view, and a wake-up for everybody who follows it."""

    def __init__(self) -> None:
        self.view = EMPTY
        self._next = asyncio.Event()

    def publish(self, view: View) -> None:
        """Replace the view; followers see it unless nothing changed."""
        if view is not self.view:
            self.view = view
            self._next.set()
            self._next = asyncio.Event()

    async def follow(self) -> AsyncIterator[View]:
        """The current view, then each later one; a slow follower skips to the latest."""
        while True:
            view, upcoming = self.view, self._next
            yield view
            if view is self.view:
                await upcoming.wait()


@dataclass
class _Worker(Generic[S]):
    observed: Observed
    group: WorkerGroup[S]
    task: asyncio.Task[None]
    restarts: int = 0


class Controller(Generic[S]):
    """Keeps the wanted workers running. All methods belong to one event loop."""

    def __init__(
        self,
        settings: ControllerSettings,
        launcher: Launcher[S],
        build: Build,
        wanted: Iterable[str],
        on_report: OnReport,
    ) -> None:
        self._settings = settings
        self._launcher = launcher
        self._build = build
        self._on_report = on_report
        self.wanted = frozenset(wanted)
        self.feed = Feed()
        self.welcomes: dict[str, Any] = {}  # worker id -> its last Welcome
        self._workers: dict[str, _Worker[S]] = {}
        self._changed = asyncio.Event()
        self._admission = asyncio.Lock()  # one worker at a time is tested and becomes ready
        self._tasks: set[asyncio.Task[None]] = set()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop_task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start all wanted workers; returns when all are ready. Raises StartFailed, or ConfigError."""
        self._loop_task = asyncio.create_task(self._run())
        await asyncio.shield(self._started)

    async def close(self) -> None:
        """Stop every worker."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        if self._started.done():
            self._started.exception()  # seen
        for task in self._tasks:
            task.cancel()
        for worker in self._workers.values():
            worker.group.stop(self._settings.stop_grace_s)
        await asyncio.gather(*(worker.task for worker in self._workers.values()), *self._tasks, return_exceptions=True)

    # ---- what administrators ask --------------------------------------------------------------------------------

    async def drain(self, worker_id: str) -> str:
        """Stop placing on the worker, wait until it is idle, stop it; its pool gets smaller. Raises Refused."""
        if worker_id not in self.wanted:
            raise Refused(f"there is no worker {worker_id}; there are {', '.join(sorted(self.wanted))}")
        pool = pool_of(worker_id)
        staying = self.wanted - {worker_id}
        if not [member for member in self.feed.view.ready(pool) if member.worker_id in staying]:
            raise Refused(f"{worker_id} is the only ready {pool} worker; scale {pool} up first")
        self._want(staying)
        async for view in self.feed.follow():
            if worker_id not in view.members:
                break
        return f"{worker_id} is drained and stopped; {pool} has {len(members(pool, self.wanted))} workers"

    def scale(self, pool: str, replicas: int) -> str:
        """Another number of workers; those that leave drain first. Raises Refused."""
        if pool not in self._settings.ranks:
            raise Refused(f"there is no pool {pool!r}; there are prefill and decode")
        if replicas < 1:
            raise Refused(f"a pool has at least 1 worker, not {replicas}")
        if replicas > MOST_REPLICAS:
            raise Refused(f"a pool has at most {MOST_REPLICAS} workers, not {replicas}")
        before = len(members(pool, self.wanted))
        self._want(scaled(self.wanted, self._workers, pool, replicas))
        return f"{pool}: {before} -> {replicas} workers ({', '.join(members(pool, self.wanted))})"

    def _want(self, wanted: frozenset[str]) -> None:
        self.wanted = wanted
        self._changed.set()

    # ---- the loop -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            now = time.monotonic()
            observed = {key: worker.observed for key, worker in self._workers.items()}
            actions, wake = reconcile(self.wanted, observed, now, self._settings.backoff)
            for action in actions:
                self._act(action)
            if not self._started.done() and all(
                key in self._workers and self._workers[key].observed.state == "ready" for key in self.wanted
            ):
                self._started.set_result(None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wake is None else max(0.0, wake - time.monotonic())):
                    await self._changed.wait()

    def _act(self, action: Start | Drain | Stop | Forget) -> None:
        worker_id = action.worker_id
        if isinstance(action, Start):
            self._start(worker_id)
        elif isinstance(action, Drain):
            self._enter(worker_id, "draining")
            task = asyncio.create_task(self._drain(worker_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(action, Stop):
            self._enter(worker_id, "stopping")
            self._workers[worker_id].group.stop(self._settings.stop_grace_s)
        else:
            del self._workers[worker_id]
            self.welcomes.pop(worker_id, None)
            self.feed.publish(self.feed.view.drop(worker_id))

    def _enter(self, worker_id: str, state: Any) -> None:
        worker = self._workers[worker_id]
        worker.observed = enter(worker.observed, state, time.monotonic())
        shown = "draining" if state == "stopping" else state
        self.feed.publish(self.feed.view.change(worker_id, shown))
        self._changed.set()

    def _start(self, worker_id: str) -> None:
        pool, incarnation = pool_of(worker_id), secrets.token_hex(8)
        before = self._workers.get(worker_id)
        restarts = before.restarts + 1 if before is not None else 0
        group = WorkerGroup(
            self._launcher,
            worker_id,
            self._settings.ranks[pool],
            self._settings.devices[pool],
            lambda rank, leader: self._build(worker_id, incarnation, rank, leader),
            lambda kind, fields: self._on_report(worker_id, kind, fields),
        )
        ranks = self._settings.ranks[pool]
        member = Member(worker_id, incarnation, pool, "", "starting", 0, "", ranks, restarts)
        failures = before.observed.failures if before is not None else 0
        observed = Observed("starting", time.monotonic(), failures)
        task = asyncio.create_task(self._live(worker_id, group, member))
        self._workers[worker_id] = _Worker(observed, group, task, restarts)
        self.feed.publish(self.feed.view.put(member))

    async def _live(self, worker_id: str, group: WorkerGroup[S], member: Member) -> None:
        async def on_ready(report: dict[str, Any]) -> None:
            await self._admit(
                Member(
                    worker_id,
                    member.incarnation,
                    member.role,
                    str(report["address"]),
                    "ready",
                    int(report.get("pid", 0)),
                    str(report.get("node", "")),
                    member.tensor_parallel,
                    member.restarts,
                )
            )

        ended = await group.run(self._settings.start_timeout_s, on_ready)
        worker = self._workers[worker_id]
        worker.observed = self._settings.backoff.died(worker.observed, time.monotonic())
        self.feed.publish(self.feed.view.change(worker_id, "dead"))
        self._changed.set()
        if ended.reason:
            self._fail(worker_id, ended, worker.observed.failures)

    def _fail(self, worker_id: str, ended: Ended, failures: int) -> None:
        if not self._started.done():
            error = ConfigError(ended.reason) if ended.config_error else StartFailed(ended.reason)
            self._started.set_exception(error)
        elif worker_id in self.wanted:
            delay = self._settings.backoff.delay(failures)
            _log.warning("%s; restarting in %.1f s", ended.reason, delay)

    async def _admit(self, member: Member) -> None:
        """Test the worker with every ready one of the other pool, then let routers use it. Raises ProbeFailed."""
        async with self._admission:
            await self._test(member)
            if self._workers[member.worker_id].observed.state == "starting":
                self.feed.publish(self.feed.view.put(member))
                self._enter(member.worker_id, "ready")

    async def _test(self, member: Member) -> None:
        beat, timeout, tls = self._settings.heartbeat_s, self._settings.self_test_timeout_s, self._settings.tls
        async with worker_probe.connect(member, beat, timeout, tls) as mine:
            self.welcomes[member.worker_id] = mine.welcome
            for other in self.feed.view.ready("decode" if member.role == "prefill" else "prefill"):
                try:
                    async with worker_probe.connect(other, beat, timeout, tls) as theirs:
                        pair = (mine, theirs) if member.role == "prefill" else (theirs, mine)
                        await worker_probe.self_test(*pair, timeout)
                except worker_probe.ProbeFailed as error:
                    if not await self._went_away(other):
                        raise
                    _log.info("%s went away during the self-test: %s", other.worker_id, error)

    async def _went_away(self, member: Member) -> bool:
        """Whether the worker's end, which a broken session foretells, shows in the view soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SHOWS_S):
                async for view in self.feed.follow():
                    if view.members.get(member.worker_id) != member:
                        return True
        return False

    async def _drain(self, worker_id: str) -> None:
        member = self.feed.view.members[worker_id]
        beat, limit_s = self._settings.heartbeat_s, self._settings.drain_timeout_s
        idle = await worker_probe.wait_idle(member, beat, limit_s, self._settings.tls)
        if not idle:
            _log.warning("%s is still busy after %g s; stopping it", worker_id, self._settings.drain_timeout_s)
        if worker_id in self._workers and self._workers[worker_id].observed.state == "draining":
            self._enter(worker_id, "stopping")
            self._workers[worker_id].group.stop(self._settings.stop_grace_s)
