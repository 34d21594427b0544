"""The membership view that routers subscribe to: pure values; every change makes a new version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..proto import control_pb2 as pb


@dataclass(frozen=True, slots=True)
class Member:
    """One worker as routers and people see it; see Member in control.proto."""

    worker_id: str
    incarnation: str
    role: str
    address: str
    state: str
    pid: int
    node: str
    tensor_parallel: int
    restarts: int

    def to_wire(self) -> pb.Member:
        """As a message."""
        return pb.Member(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            address=self.address,
            state=self.state,
            pid=self.pid,
            node=self.node,
            tensor_parallel=self.tensor_parallel,
            restarts=self.restarts,
        )


@dataclass(frozen=True, slots=True)
class View:
    """All workers at one moment."""

    version: int
    members: Mapping[str, Member]

    def put(self, member: Member) -> View:
        """The view with this member; the same view when nothing changes."""
        if self.members.get(member.worker_id) == member:
            return self
        return View(self.version + 1, {**self.members, member.worker_id: member})

    def change(self, worker_id: str, state: str) -> View:
        """The view with this member in another state. Unknown members change nothing."""
        member = self.members.get(worker_id)
        return self if member is None else self.put(replace(member, state=state))

    def drop(self, worker_id: str) -> View:
        """The view without this member."""
        if worker_id not in self.members:
            return self
        return View(self.version + 1, {key: member for key, member in self.members.items() if key != worker_id})

    def ready(self, role: str) -> list[Member]:
        """The members of one pool that take requests."""
        return [member for member in self.members.values() if member.role == role and member.state == "ready"]

    def to_wire(self) -> pb.View:
        """As a message, members by id."""
        return pb.View(version=self.version, members=[self.members[key].to_wire() for key in sorted(self.members)])


EMPTY = View(0, {})
