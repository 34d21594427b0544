"""The thread that owns a worker's scheduler state: commands and transfer events in, events by session out.

Everything that happens to a worker becomes an item in one queue; the thread hands the items to an `Engine`, lets it
schedule and run a step, and posts what came out: the step's events in one message, and what was known before the step
(tickets, commits) ahead of it. With nothing to do it blocks on the queue. An exception in the queue means that
something the whole worker depends on is gone: it ends the thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from . import worker_pb2 as pb
from .errors import BatonError, Unavailable

log = logging.getLogger(__name__)

# Gives the core up once, without the GIL. Where the event loop's thread has no other core, a step would else keep it
# waiting: milliseconds of C code in which Linux does not preempt a thread for one that has just woken.
_SCHED_YIELD = ctypes.CDLL(None).sched_yield

Events = dict[int, list[pb.WorkerEvent]]  # by session


@dataclass(frozen=True, slots=True)
class Commands:
    """Queue item: what a router wants."""

    session: int
    commands: Sequence[pb.RouterCommand]


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Queue item: drop every leg of this session."""

    session: int


class Engine(Protocol):
    """What the thread drives; called from that thread only. An exception from any method ends the worker."""

    def handle(self, item: object) -> None:
        """Take in one item of the queue."""
        ...

    def schedule(self) -> bool:
        """Decide what runs next; False when there is nothing to run."""
        ...

    def run(self) -> None:
        """Run what was scheduled, and book the results."""
        ...

    def wake_in(self) -> float | None:
        """Seconds until a clock of ours needs `schedule` although nothing happens; None: never."""
        ...

    def take_events(self) -> Events:
        """Events for routers since the last call."""
        ...

    def load(self) -> pb.Load:
        """The worker's state in numbers."""
        ...

    def fail_all(self, error: BatonError) -> None:
        """The engine is broken: Failed events for all legs."""
        ...


class WorkerLoop:
    """Runs an engine in its own thread. `put` is safe from any thread; `post` is called on `loop`."""

    def __init__(
        self,
        engine: Engine,
        inbox: queue.SimpleQueue[object],
        loop: asyncio.AbstractEventLoop,
        post: Callable[[Mapping[int, Sequence[pb.WorkerEvent]], pb.Load], None],
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._loop = loop
        self._post = post
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.failure: BaseException | None = None
        self.ended = asyncio.Event()  # on the loop: the thread is over; `failure` says why, None: it was stopped

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, limit_s: float) -> bool:
        """End after the current step. Whether the thread ended within `limit_s`. Blocks: not on the event loop."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            if self._stopping:  # at the end the ranks leave in any order
                log.info("the engine ended: %s", error)
            else:
                log.exception("the engine is broken")
                self.failure = error
            self._engine.fail_all(Unavailable(f"the worker's engine failed: {error}"))
        self._flush()
        self._call(self.ended.set)

    def _run(self) -> None:
        busy = False
        while True:
            for item in self._drain(wait=not busy):
                self._engine.handle(item)
            if self._stopping:
                return
            busy = self._engine.schedule()
            if busy:
                self._flush(only_news=True)
                self._engine.run()
            self._flush()

    def _drain(self, wait: bool) -> list[object]:
        items: list[object] = []
        try:
            if wait:
                items.append(self._inbox.get(timeout=self._engine.wake_in()))
            while True:
                items.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        for item in items:
            if isinstance(item, BaseException):
                raise item
        return [item for item in items if item is not None]

    def _flush(self, only_news: bool = False) -> None:
        events = self._engine.take_events()
        if only_news and not events:
            return
        load = self._engine.load()
        self._call(lambda: self._post(events, load))
        let_others_run()

    def _call(self, action: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # the event loop is closed: nobody listens any more
            log.debug("event loop closed")


def let_others_run() -> None:
    """Threads that this one has just woken come first: they would wait for the interpreter until it sleeps."""
    _SCHED_YIELD()


def drain_into(inbox: queue.SimpleQueue[object], engine: Engine) -> None:
    """Hand over what came during a step, before its results are used: a cancel in flight drops its result."""
    while True:
        try:
            item = inbox.get_nowait()
        except queue.Empty:
            return
        if isinstance(item, BaseException):
            raise item
        if item is not None:
            engine.handle(item)


def seconds_until(moment: float | None) -> float | None:
    """From now to a moment of the monotonic clock; never negative."""
    return None if moment is None else max(0.0, moment - time.monotonic())
