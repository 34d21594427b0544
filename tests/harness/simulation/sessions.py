"""The router's end of its sessions without gRPC: in place of `router.sessions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from baton.proto import worker_pb2 as pb
from baton.router.life_messages import Peer
from baton.router.sessions import Member

from .world import Wire

if TYPE_CHECKING:
    from .cluster import Cluster

DEAD_AFTER_S = 2.0
_RECONNECT_S = 0.2


class RouterSession:
    """The router's end of a session with one incarnation: end 0 of a wire. In place of `router.sessions.Session`."""

    def __init__(self, cluster: Cluster, member: Member) -> None:
        self.member = member
        self.welcome: pb.Welcome | None = None
        self.closed = False
        self.wire: Wire | None = None
        self._cluster = cluster
        cluster.world.at(cluster.world.rng.random() * 0.01, self._dial)

    @property
    def load(self) -> pb.Load:
        """The worker in numbers."""
        return self._cluster.history[self.member.peer].legs.load()

    def send(self, command: pb.RouterCommand) -> None:
        """A command; dropped when the session is down."""
        if self.welcome is None or self.wire is None:
            return
        self._cluster.check_alive(self.member.peer)
        self.wire.send(1, command)

    def close(self) -> None:
        """For good."""
        self.closed = True
        if self.wire is not None:
            self.wire.close(0)
        self._down()

    def _dial(self) -> None:
        if self.closed:
            return
        process = self._cluster.processes.get(self.member.address)
        if process is None or not process.alive or process.incarnation != self.member.peer.incarnation:
            self._cluster.world.at(_RECONNECT_S, self._dial)
            return
        session = process.begin_session()
        self.wire = session.wire = Wire(self._cluster.world, (self, session), DEAD_AFTER_S, _name)
        self._cluster.wires.append((self.wire, self.member.peer.worker_id, ""))
        self._cluster.hold_if_stalled(process, self.wire, 1)
        self.wire.send(0, pb.WorkerEvent(welcome=process.welcome))

    def on_message(self, message: Any) -> None:
        """A worker's event."""
        if message.HasField("welcome"):
            self.welcome = message.welcome
            self._cluster.lives.worker_up(self.member.peer, message.welcome)
        elif self.welcome is not None:
            self._cluster.heard(self.member.peer, message)

    def on_closed(self, reason: str) -> None:
        """The worker is gone, or the connection is."""
        self._down()
        if not self.closed:
            self._cluster.world.at(_RECONNECT_S, self._dial)

    def on_silence(self) -> bool:
        """Dead for us."""
        if self.wire is not None:
            self.wire.close(0)
        self.on_closed("silent")
        return True

    def _down(self) -> None:
        was_up, self.welcome, self.wire = self.welcome is not None, None, None
        if was_up:
            self._cluster.lives.worker_lost(self.member.peer)


def _name(message: Any) -> str:
    kind = "command" if isinstance(message, pb.RouterCommand) else "event"
    return str(message.WhichOneof(kind))


class Sessions:
    """In place of `router.sessions.SessionPool`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sessions: dict[Peer, RouterSession] = {}
        self._version = 0

    def update(self, version: int, members: Sequence[Member]) -> None:
        """The membership has a new view; an older one is late."""
        if version <= self._version:
            return
        self._version = version
        wanted = {member.peer: member for member in members}
        for peer, member in wanted.items():
            if peer in self._sessions:
                self._sessions[peer].member = member
            else:
                self._sessions[peer] = RouterSession(self._cluster, member)
        for peer in [peer for peer in self._sessions if peer not in wanted]:
            self._sessions.pop(peer).close()
        self._cluster.lives.look_again()

    def get(self, peer: Peer) -> RouterSession | None:
        """The session with that incarnation, up or not."""
        return self._sessions.get(peer)

    def ready(self, role: str) -> list[RouterSession]:
        """Those that take new legs."""
        up = [s for s in self._sessions.values() if s.welcome is not None and s.member.role == role]
        return [s for s in up if s.member.state == "ready"]
