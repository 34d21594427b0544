"""Makes the faults of a scenario happen, and puts right after a while what can be put right."""

from __future__ import annotations

from collections import Counter, defaultdict

from baton.proto.errors import Cancelled
from baton.router import life_messages as m
from baton.router.life_messages import Peer

from .cluster import START_S, Cluster
from .scenario import Fault
from .worker import Process
from .world import Wire


class Faults:
    """Arms the faults on a cluster."""

    def __init__(self, cluster: Cluster, faults: tuple[Fault, ...]) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._seen: Counter[str] = Counter()
        self._armed: defaultdict[tuple[str, int], list[Fault]] = defaultdict(list)
        for fault in faults:
            if fault.mark:
                self._armed[fault.mark, fault.count].append(fault)
            else:
                self._world.at(START_S + fault.at, self._strike, fault)
        if self._armed:
            self._world.on_mark = self._mark

    def _mark(self, name: str) -> None:
        self._seen[name] += 1
        for fault in self._armed.pop((name, self._seen[name]), ()):
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        self._disturbed()
        if fault.kind == "cancel":
            client = self._cluster.clients[fault.who]
            client.cancelled = True
            self._cluster.give_up(client, Cancelled("the client left"))
            return
        process = self._cluster.processes[fault.who]
        if not process.alive:
            return
        match fault.kind:
            case "kill" | "vanish":
                self._kill(process, fault.amount, vanish=fault.kind == "vanish")
            case "stall":
                self._stall(process, fault.amount)
            case "slow":
                process.slow = 10.0
                self._world.at(fault.amount, self._normal, process)
            case "drain":
                process.state = "draining"
                self._cluster.view(self._world.rng.random() * 0.05)
                self._world.at(0.05, self._move_away, process, 5)
                self._world.at(fault.amount, self._stay, process)
            case "corrupt":
                process.corrupt_next += 1
            case "carrier":
                process.break_next += 1
            case "duplicate":
                for wire in self._session(fault.who):
                    wire.duplicate += 1 + fault.count % 3
            case "cut session":
                for wire in self._session(fault.who):
                    wire.cut("connection reset")
            case "mute session":
                for wire in self._session(fault.who):
                    wire.mute(fault.side, fault.amount)
            case "cut link":
                for wire in self._links(fault):
                    wire.cut("connection reset")
            case "mute link":
                for wire in self._links(fault):
                    wire.mute(fault.side, fault.amount)

    def _kill(self, process: Process, down_s: float, *, vanish: bool) -> None:
        """The process is gone, or its whole machine: then nobody is told."""
        process.alive = False
        process.died_at = self._world.now
        for wire, end in self._wires_of(process.worker_id):
            if vanish:
                wire.mute(1 - end, 1e9)
            else:
                wire.cut("connection reset")
        self._cluster.view(self._world.rng.random() * 1.5)
        self._world.at(down_s, self._cluster.start, process.worker_id)

    def _stall(self, process: Process, for_s: float) -> None:
        process.stalled_until = max(process.stalled_until, self._world.now + for_s)
        for wire, end in self._wires_of(process.worker_id):
            wire.mute(1 - end, for_s)
            wire.hold(end, for_s)
        self._world.at(for_s, self._disturbed)

    def _move_away(self, process: Process, turns: int) -> None:
        """The choices that run on a draining worker go on elsewhere, whether there is room or not."""
        peer = Peer(process.worker_id, process.incarnation)
        for live in self._cluster.lives:
            for leg in list(live.life.legs.values()):
                for choice in list(leg.choices) if leg.decode == peer else []:
                    self._cluster.lives.handle(live, m.Migrate(leg.key, choice))
        if process.alive and process.state == "draining" and turns:
            self._world.at(0.05, self._move_away, process, turns - 1)

    def _stay(self, process: Process) -> None:
        process.state = "ready"
        if process.alive:
            self._cluster.view(0.0)
        self._disturbed()

    def _normal(self, process: Process) -> None:
        process.slow = 1.0
        self._disturbed()

    def _disturbed(self) -> None:
        self._world.disturbed = self._world.now

    def _session(self, worker_id: str) -> list[Wire]:
        return [wire for wire, who, other in self._cluster.wires if wire.open and who == worker_id and not other]

    def _links(self, fault: Fault) -> list[Wire]:
        return [w for w, *ends in self._cluster.wires if w.open and set(ends) == {fault.who, fault.other}]

    def _wires_of(self, worker_id: str) -> list[tuple[Wire, int]]:
        """Open wires of a worker, and which end is its."""
        return [
            (wire, 0 if other and who == worker_id else 1)
            for wire, who, other in list(self._cluster.wires)
            if wire.open and worker_id in (who, other)
        ]
