"""A launcher and workers that exist only in this process: for the controller's tests. Workers speak the real Session
protocol, but compute and move nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from baton.cluster.child import Report
from baton.cluster.launcher import PlacementFailed
from baton.cluster.spec import WorkerSpec
from baton.proto import worker_pb2 as pb
from baton.proto.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server


class FakeWorker(WorkerServicer):
    """One worker's service. `broken`: the self-test fails with this message. `busy`: what its heartbeats report."""

    def __init__(self, cluster: FakeCluster, worker_id: str, incarnation: str) -> None:
        self._cluster = cluster
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.role = worker_id.partition("-")[0]
        self.busy = 0
        self._out: asyncio.Queue[pb.WorkerEvent] = asyncio.Queue()
        self._server = grpc.aio.server()
        add_WorkerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    async def start(self) -> str:
        await self._server.start()
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Session(self, requests: AsyncIterator[pb.RouterMessage], context: Any) -> AsyncIterator[pb.WorkerMessage]:
        """Answers as a worker would."""
        out: asyncio.Queue[pb.WorkerEvent] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, out))
        try:
            while True:
                events = []
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        events.append(await out.get())
                yield pb.WorkerMessage(events=events, load=pb.Load(running=self.busy))
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[pb.RouterMessage], out: asyncio.Queue[pb.WorkerEvent]) -> None:
        async for message in requests:
            for command in message.commands:
                self._obey(command, out)

    def _obey(self, command: pb.RouterCommand, out: asyncio.Queue[pb.WorkerEvent]) -> None:
        kind = command.WhichOneof("command")
        if kind == "hello":
            welcome = pb.Welcome(worker_id=self.worker_id, incarnation=self.incarnation, role=self.role)
            welcome.max_model_len, welcome.vocab_size, welcome.block_size, welcome.total_blocks = 64, 100, 4, 10
            out.put_nowait(pb.WorkerEvent(welcome=welcome))
        elif kind == "reserve":
            leg = command.reserve.leg
            ref = pb.LegRef(request_id=leg.request_id, attempt=leg.attempt, first_choice=0)
            self._cluster.reserved[leg.request_id] = (self.worker_id, out)
            out.put_nowait(pb.WorkerEvent(ticket=pb.Ticket(leg=ref, ticket=b"ticket")))
        elif kind == "prefill":
            self._prefill(command.prefill.leg, out)
        elif kind == "release":
            self._cluster.released += 1

    def _prefill(self, leg: pb.Leg, out: asyncio.Queue[pb.WorkerEvent]) -> None:
        ref = pb.LegRef(request_id=leg.request_id, attempt=leg.attempt, first_choice=0)
        decode, decode_out = self._cluster.reserved.pop(leg.request_id)
        broken = self._cluster.broken.get(self.worker_id)
        if broken:
            out.put_nowait(pb.WorkerEvent(failed=pb.Failed(leg=ref, code="transfer_failed", message=broken)))
            return
        self._cluster.tested.append((self.worker_id, decode))
        out.put_nowait(pb.WorkerEvent(first=pb.FirstTokens(leg=ref)))
        last = pb.Token(index=1, finish_reason="length")
        decode_out.put_nowait(pb.WorkerEvent(committed=pb.Committed(leg=ref)))
        step = pb.StepToken(request_id=leg.request_id, attempt=leg.attempt, token=last)
        decode_out.put_nowait(pb.WorkerEvent(tokens=pb.Tokens(tokens=[step])))


@dataclass(frozen=True)
class FakeSlot:
    """Room."""

    name: str
    ranks: int


class FakeRank:
    """One rank, a future."""

    def __init__(self, spec: WorkerSpec, worker: FakeWorker | None) -> None:
        self.spec = spec
        self.worker = worker
        self.config_error = False
        self.stopped: float | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def die(self, reason: str = "killed by SIGKILL") -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> None:
        self.stopped = grace_s
        if self.worker is not None:
            await self.worker.stop()
        self.die("")


@dataclass
class FakeCluster:
    """The launcher; tests look at and change its fields."""

    room: int = 100
    broken: dict[str, str] = field(default_factory=dict)  # prefill worker -> how its self-tests fail
    dead_on_arrival: dict[str, str] = field(default_factory=dict)  # worker -> how its leader ends before it is ready
    ranks: list[FakeRank] = field(default_factory=list)
    tested: list[tuple[str, str]] = field(default_factory=list)
    released: int = 0
    slots: set[str] = field(default_factory=set)
    reserved: dict[str, tuple[str, asyncio.Queue[pb.WorkerEvent]]] = field(default_factory=dict)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def reserve(self, name: str, ranks: int, device: str) -> FakeSlot:
        if ranks > self.room:
            raise PlacementFailed(f"{name} needs {ranks}, there is room for {self.room}")
        self.slots.add(name)
        return FakeSlot(name, ranks)

    async def start(self, slot: FakeSlot, spec: WorkerSpec, on_report: Report) -> FakeRank:
        if spec.rank > 0:
            rank = FakeRank(spec, None)
            self.ranks.append(rank)
            return rank
        worker = FakeWorker(self, spec.worker_id, spec.params.incarnation)
        rank = FakeRank(spec, worker)
        self.ranks.append(rank)
        if spec.worker_id in self.dead_on_arrival:
            rank.die(self.dead_on_arrival[spec.worker_id])
            return rank
        address = await worker.start()
        loop = asyncio.get_running_loop()
        loop.call_soon(on_report, "channel", {"address": f"channel of {spec.worker_id}"})
        loop.call_later(0.01, on_report, "ready", {"address": address, "pid": 1, "node": "here"})
        return rank

    async def release(self, slot: FakeSlot) -> None:
        self.slots.discard(slot.name)

    def leader(self, worker_id: str) -> FakeRank:
        """The latest rank 0 of a worker."""
        return [rank for rank in self.ranks if rank.spec.worker_id == worker_id and rank.spec.rank == 0][-1]
