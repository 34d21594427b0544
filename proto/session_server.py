"""The worker's end of Worker.Session: greeting, heartbeats, silence detection, and one message per event-loop turn.

A session is one router's stream to this worker. Every leg belongs to the session that brought it, so when a session
ends (stream closed, router silent) the worker hears of it once and drops all that session's legs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from . import worker_pb2 as pb
from . import worker_pb2_grpc
from .peer_tls import PeerTLS

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20  # many prompts may travel in one message
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a taken port is an error, never shared in silence
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),  # routers ping a quiet session every second
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


MAX_PENDING_PREFIXES = 1 << 16  # digests that wait to be written to one router, a snapshot aside


@dataclass(frozen=True, slots=True)
class SessionParams:
    """Clocks of a session, in seconds, and who may open one."""

    heartbeat_s: float  # this end sends something at least this often
    dead_after_s: float  # the other end's silence after which the session is over
    tls: PeerTLS | None  # None: whoever reaches the port


class _Session:
    """What waits to be written, and whether the router has been heard."""

    def __init__(self, router_id: str, welcome: pb.Welcome, load: pb.Load) -> None:
        self.router_id = router_id
        self.pending: list[pb.WorkerEvent] = [pb.WorkerEvent(welcome=welcome)]
        self.pending_prefixes = 0
        self.load = load
        self.wake = asyncio.Event()
        self.wake.set()
        self.heard = True

    def add(self, events: Sequence[pb.WorkerEvent]) -> None:
        self.pending += [event for event in events if not event.HasField("prefixes") or self._keep(event.prefixes)]
        self.wake.set()

    def _keep(self, changes: pb.PrefixChanges) -> bool:
        """A router that does not read misses changes of the prefix cache, and asks anew when it sees the gap."""
        if not changes.snapshot:
            self.pending_prefixes += len(changes.added) + len(changes.removed)
        return changes.snapshot or self.pending_prefixes <= MAX_PENDING_PREFIXES

    def take(self) -> pb.WorkerMessage:
        message = pb.WorkerMessage(events=self.pending, load=self.load)
        self.pending, self.pending_prefixes = [], 0
        self.wake.clear()
        return message


class SessionServer(worker_pb2_grpc.WorkerServicer):
    """The Worker service. `on_commands(session, commands)` and `on_end(session)` are called on the event loop.

    `welcome` says who we are; a Hello that means another worker or incarnation is refused (FAILED_PRECONDITION).
    """

    def __init__(
        self,
        params: SessionParams,
        welcome: pb.Welcome,
        on_commands: Callable[[int, Sequence[pb.RouterCommand]], None],
        on_end: Callable[[int], None],
    ) -> None:
        self._params = params
        self._welcome = welcome
        self._on_commands = on_commands
        self._on_end = on_end
        self._sessions: dict[int, _Session] = {}
        self._next = 1
        self._load = pb.Load()  # the latest: who comes during a long step must not take the worker for idle

    @property
    def sessions(self) -> list[int]:
        """Ids of the sessions that are open."""
        return list(self._sessions)

    def deliver(self, events: Mapping[int, Sequence[pb.WorkerEvent]], load: pb.Load) -> None:
        """Queue events by session, and remember the load. On the event loop only. Ended sessions are skipped."""
        self._load = load
        for session in self._sessions.values():
            session.load = load
        for number, batch in events.items():
            if (known := self._sessions.get(number)) is not None:
                known.add(batch)

    async def flush(self, limit_s: float) -> None:
        """Wait until everything delivered was handed to gRPC, at most `limit_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while any(session.pending for session in self._sessions.values()):
                    await asyncio.sleep(0.005)

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.RouterMessage],
        context: grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage],
    ) -> None:
        """One router's stream, from its Hello to its end."""
        del request_iterator  # the read and write calls are used instead
        first = await self._read_hello(context)
        session = _Session(first.commands[0].hello.router_id, self._welcome, self._load)
        number, self._next = self._next, self._next + 1
        self._sessions[number] = session
        log.info("session %d with router %s begins", number, session.router_id)
        tasks = [
            asyncio.ensure_future(self._read(number, session, context, first.commands[1:])),
            asyncio.ensure_future(self._write(session, context)),
            asyncio.ensure_future(self._watch(session)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reasons = [str(task.exception() or task.result()) for task in done]
        finally:
            for task in tasks:
                task.cancel()
            del self._sessions[number]
            log.info("session %d with router %s ends", number, session.router_id)
            self._on_end(number)
        if tasks[2] in done:
            await context.abort(grpc.StatusCode.UNAVAILABLE, reasons[0])

    async def _read_hello(self, context: Any) -> pb.RouterMessage:
        try:
            async with asyncio.timeout(self._params.dead_after_s):
                first = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no Hello")
            raise
        refusal = self._refusal(first)
        if refusal:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        assert isinstance(first, pb.RouterMessage)
        return first

    def _refusal(self, first: object) -> str:
        if not isinstance(first, pb.RouterMessage) or not first.commands or not first.commands[0].HasField("hello"):
            return "a session begins with Hello"
        hello, us = first.commands[0].hello, self._welcome
        if (hello.worker_id, hello.worker_incarnation) != (us.worker_id, us.incarnation):
            return (
                f"this is {us.worker_id} incarnation {us.incarnation}, "
                f"not {hello.worker_id} incarnation {hello.worker_incarnation}"
            )
        return ""

    async def _read(self, number: int, session: _Session, context: Any, rest: Sequence[pb.RouterCommand]) -> str:
        commands = rest
        while True:
            if commands:
                self._on_commands(number, commands)
            message = await context.read()
            if message is grpc.aio.EOF:
                return "the router closed the session"
            session.heard = True
            commands = message.commands

    async def _write(self, session: _Session, context: Any) -> str:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._params.heartbeat_s):
                    await session.wake.wait()
            await context.write(session.take())

    async def _watch(self, session: _Session) -> str:
        """Counts silent beats instead of comparing times: a process that was stopped itself does not blame its peer."""
        beat, silent = self._params.heartbeat_s, 0
        while silent * beat < self._params.dead_after_s:
            await asyncio.sleep(beat)
            silent = 0 if session.heard else silent + 1
            session.heard = False
        return f"router {session.router_id} was silent for {silent * beat:g} s"
