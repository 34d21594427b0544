"""One Worker.Session per worker incarnation: commands out, events in, heartbeats both ways.

A session that breaks or falls silent loses every leg that runs over it, at both ends. As long as the membership view
lists the incarnation, it is then opened anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import grpc

from ..proto import worker_pb2 as pb
from ..proto.failpoints import reach_async
from ..proto.peer_tls import PeerTLS
from ..proto.peer_tls import channel as channel_to
from ..proto.worker_pb2_grpc import WorkerStub
from .channels import CLIENT_OPTIONS
from .life_messages import Peer

_log = logging.getLogger(__name__)
_RECONNECT_S = 0.2


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as the membership view lists it. `state`: starting | ready | draining | dead."""

    peer: Peer
    role: str
    address: str
    state: str


class Listener(Protocol):
    """Who is told what happens on a session; always called on the event loop."""

    def session_up(self, peer: Peer, welcome: pb.Welcome) -> None: ...

    def session_event(self, peer: Peer, event: pb.WorkerEvent) -> None: ...

    def session_lost(self, member: Member) -> None: ...


class Session:
    """The session with one incarnation; `welcome` is set while it can be used."""

    def __init__(
        self,
        member: Member,
        router_id: str,
        heartbeat_s: float,
        dead_after_s: float,
        listener: Listener,
        tls: PeerTLS | None,
    ) -> None:
        self.member = member
        self.welcome: pb.Welcome | None = None
        self.load = pb.Load()
        self._router_id = router_id
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._listener = listener
        self._tls = tls
        self._outbox: list[pb.RouterCommand] = []
        self._wake = asyncio.Event()
        self._heard = 0.0
        self._task = asyncio.create_task(self._run(), name=f"session {member.peer.worker_id}")

    def send(self, command: pb.RouterCommand) -> None:
        """Queues a command; all that are queued in one turn of the loop leave in one message. Dropped when down."""
        if self.welcome is not None:
            self._outbox.append(command)
            self._wake.set()

    async def close(self) -> None:
        """Ends the session for good; its legs are lost."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            try:
                await self._serve()
            except grpc.aio.AioRpcError as error:
                _log.info("session with %s ended: %s %s", self.member.peer.worker_id, error.code(), error.details())
            except (ConnectionError, asyncio.InvalidStateError) as error:
                _log.info("session with %s ended: %s", self.member.peer.worker_id, error)
            except Exception:
                _log.exception("session with %s failed", self.member.peer.worker_id)
            finally:
                self._down()
            await asyncio.sleep(_RECONNECT_S)

    def _down(self) -> None:
        was_up, self.welcome = self.welcome is not None, None
        self._outbox.clear()
        self.load = pb.Load()
        if was_up:
            self._listener.session_lost(self.member)

    async def _serve(self) -> None:
        """One connection, from hello until it breaks (raises) or falls silent (ConnectionError)."""
        async with channel_to(self.member.address, self._tls, CLIENT_OPTIONS) as channel:
            call = WorkerStub(channel).Session()
            self._heard = time.monotonic()
            tasks = [asyncio.create_task(work) for work in (self._read(call), self._write(call), self._beat())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                call.cancel()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]) -> None:
        async for message in call:
            self._heard = time.monotonic()
            if message.HasField("load"):
                self.load = message.load
            for event in message.events:
                if event.HasField("welcome"):
                    self._welcomed(event.welcome)
                elif self.welcome is not None:
                    if event.HasField("first"):
                        await reach_async("router.handoff")
                    self._listener.session_event(self.member.peer, event)
        raise ConnectionError("the worker closed the session")

    def _welcomed(self, welcome: pb.Welcome) -> None:
        peer = Peer(welcome.worker_id, welcome.incarnation)
        if peer != self.member.peer or welcome.role != self.member.role:
            raise ConnectionError(f"expected {self.member.role} {self.member.peer}, found {welcome.role} {peer}")
        self.welcome = welcome
        self._listener.session_up(peer, welcome)

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]) -> None:
        peer = self.member.peer
        hello = pb.Hello(router_id=self._router_id, worker_id=peer.worker_id, worker_incarnation=peer.incarnation)
        await call.write(pb.RouterMessage(commands=[pb.RouterCommand(hello=hello)]))
        while True:
            await self._wake.wait()
            self._wake.clear()
            commands, self._outbox = self._outbox, []
            await call.write(pb.RouterMessage(commands=commands))

    async def _beat(self) -> None:
        """Heartbeats, and the watch for silence; a stall of our own loop is not held against the worker.

        All sessions beat at the same moments: the loop wakes up once for all of them.
        """
        beat_s = self._heartbeat_s
        while True:
            before = time.monotonic()
            pause_s = beat_s - before % beat_s
            pause_s += beat_s if pause_s < beat_s / 8 else 0.0  # a timer that came early is no second beat
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            self._heard += max(0.0, now - before - pause_s)
            if now - self._heard > self._dead_after_s:
                raise ConnectionError(f"silent for {now - self._heard:.1f} s")
            self._wake.set()


class SessionPool:
    """The sessions that the membership view asks for."""

    def __init__(
        self, router_id: str, heartbeat_s: float, dead_after_s: float, listener: Listener, tls: PeerTLS | None
    ) -> None:
        self._router_id = router_id
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._listener = listener
        self._tls = tls
        self._sessions: dict[Peer, Session] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def update(self, members: Iterable[Member]) -> None:
        """Opens sessions to new incarnations that serve, and closes those that are listed no more."""
        wanted = {member.peer: member for member in members if member.state in ("ready", "draining")}
        for peer, member in wanted.items():
            if peer in self._sessions:
                self._sessions[peer].member = member
            else:
                self._sessions[peer] = Session(
                    member, self._router_id, self._heartbeat_s, self._dead_after_s, self._listener, self._tls
                )
        for peer in [peer for peer in self._sessions if peer not in wanted]:
            task = asyncio.create_task(self._sessions.pop(peer).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def get(self, peer: Peer) -> Session | None:
        """The session with that incarnation, up or not."""
        return self._sessions.get(peer)

    def up(self) -> list[Session]:
        """Sessions that can be used."""
        return [session for session in self._sessions.values() if session.welcome is not None]

    def ready(self, role: str) -> list[Session]:
        """Sessions with workers that take new legs."""
        return [s for s in self.up() if s.member.role == role and s.member.state == "ready"]

    async def close(self) -> None:
        """Ends all sessions."""
        self.update([])
        await asyncio.gather(*self._closing)
