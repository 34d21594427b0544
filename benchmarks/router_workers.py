"""Simulated workers for `router.py` and the overload test: the real session protocol, no model, no KV.

    python -m baton.benchmarks.router_workers      (parameters as one JSON line on stdin, see `Simulation`)

Pairs of a prefill and a decode worker and the membership that lists them, in one process. A decode worker steps every
`step_s` and sends the tokens of all its sequences in one message, as the real one does. The tokens that it sends name
the step: `first_id + step % steps`; when that was is in the file `clock`, one float64 per step, on the monotonic clock
that all processes of a machine share. So a client knows when each of its tokens left the worker.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import mmap
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from baton.proto import control_pb2
from baton.proto import worker_pb2 as pb
from baton.proto.control_pb2_grpc import MembershipServicer, add_MembershipServicer_to_server
from baton.proto.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from baton.router.channels import server_options

FIRST_ID = 1000  # ids of plain text in the vocabularies that are used here
STEPS = 16384
CONTEXT, VOCAB = 4096, 49152
_HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class Simulation:
    """`seats`: sequences of one decode worker, whose reservations wait beyond it. `prefill_s`: of one prompt, one
    after the other."""

    pairs: int
    step_s: float
    seats: int
    prefill_s: float
    clock: str


class Clock:
    """When each step was, shared through a file."""

    def __init__(self, path: str) -> None:
        place = Path(path)
        if not place.exists() or place.stat().st_size != 8 * STEPS:
            place.write_bytes(array.array("d", bytes(8 * STEPS)).tobytes())
        with place.open("r+b") as file:
            self.times = memoryview(mmap.mmap(file.fileno(), 8 * STEPS)).cast("d")
        self._step = 0

    def stamp(self) -> int:
        """The token id that means now."""
        self._step = (self._step + 1) % STEPS
        self.times[self._step] = time.monotonic()
        return FIRST_ID + self._step

    def said(self, token_id: int) -> float:
        """When a worker said the token."""
        return self.times[token_id - FIRST_ID]


def _ref(leg: pb.Leg) -> pb.LegRef:
    return pb.LegRef(request_id=leg.request_id, attempt=leg.attempt, first_choice=leg.choices[0])


_Key = tuple[int, str, int]  # session, request, attempt


class _Sequence:
    """One choice in a decode batch."""

    def __init__(self, session: int, leg: pb.Leg) -> None:
        self.session, self.leg = session, leg
        self.index, self.most = 1, leg.sampling.max_tokens


class Worker(WorkerServicer):
    """What both roles share: sessions of several routers, each with a queue of events."""

    role = ""

    def __init__(self, number: int, simulation: Simulation, clock: Clock) -> None:
        self.worker_id, self.address = f"{self.role}-{number}", ""
        self._simulation, self._clock = simulation, clock
        self._outboxes: dict[int, tuple[list[pb.WorkerEvent], asyncio.Event]] = {}
        self._server = grpc.aio.server(options=server_options(64 << 20))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        add_WorkerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        """Ends its sessions."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._server.stop(0)

    async def Session(self, request_iterator: AsyncIterator[pb.RouterMessage], context: Any) -> None:
        session = id(context)
        self._outboxes[session] = ([self._welcome()], wake := asyncio.Event())
        wake.set()
        writer = asyncio.create_task(self._write(session, context))
        try:
            async for message in request_iterator:
                for command in message.commands:
                    self.command(session, command)
        finally:
            writer.cancel()
            del self._outboxes[session]
            self.forget(session)

    def emit(self, session: int, **event: Any) -> None:
        """Sends one event."""
        if session in self._outboxes:
            events, wake = self._outboxes[session]
            events.append(pb.WorkerEvent(**event))
            wake.set()

    async def _write(self, session: int, context: Any) -> None:
        events, wake = self._outboxes[session]
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), _HEARTBEAT_S)
            wake.clear()
            message = pb.WorkerMessage(events=events, load=self.load())
            events.clear()
            await context.write(message)

    def _welcome(self) -> pb.WorkerEvent:
        return pb.WorkerEvent(
            welcome=pb.Welcome(
                worker_id=self.worker_id,
                incarnation="1",
                role=self.role,
                model_fingerprint="simulated",
                max_model_len=CONTEXT,
                vocab_size=VOCAB,
                block_size=16,
                total_blocks=1 << 20,
                max_batch_tokens=1 << 20,
                max_sequences=self._simulation.seats,
                lookahead=2,
                clock="simulated",
            )
        )

    def load(self) -> pb.Load:
        raise NotImplementedError

    def command(self, session: int, command: pb.RouterCommand) -> None:
        raise NotImplementedError

    def forget(self, session: int) -> None:
        """The router is gone, with all its legs."""


class Prefill(Worker):
    """Prompts one after the other; KV arrives as soon as the first token was drawn."""

    role = "prefill"

    def __init__(
        self, number: int, simulation: Simulation, clock: Clock, commit: Callable[[str, pb.Leg], None]
    ) -> None:
        super().__init__(number, simulation, clock)
        self._commit = commit
        self._queue: deque[tuple[int, pb.Prefill, float]] = deque()
        self._waiting: set[_Key] = set()
        self._wake = asyncio.Event()

    async def start(self) -> None:
        await super().start()
        self._task = asyncio.create_task(self._run())

    def load(self) -> pb.Load:
        return pb.Load(waiting=len(self._waiting), total_blocks=1 << 20)

    def command(self, session: int, command: pb.RouterCommand) -> None:
        if command.HasField("prefill"):
            leg = command.prefill.leg
            self._waiting.add((session, leg.request_id, leg.attempt))
            self._queue.append((session, command.prefill, time.monotonic()))
            self._wake.set()
        elif command.HasField("cancel"):
            self._waiting.discard((session, command.cancel.leg.request_id, command.cancel.leg.attempt))

    def forget(self, session: int) -> None:
        self._waiting = {key for key in self._waiting if key[0] != session}

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                session, order, since = self._queue.popleft()
                key = session, order.leg.request_id, order.leg.attempt
                if key not in self._waiting:
                    continue
                begun = time.monotonic()
                if self._simulation.prefill_s:
                    await asyncio.sleep(self._simulation.prefill_s)
                self._waiting.discard(key)
                self._first(session, order, begun - since, time.monotonic() - begun)

    def _first(self, session: int, order: pb.Prefill, queue_s: float, prefill_s: float) -> None:
        leg, most = order.leg, order.leg.sampling.max_tokens
        reason = "length" if most == 1 else ""
        token_id = self._clock.stamp()
        tokens = [pb.Token(choice=c, index=0, token_id=token_id, finish_reason=reason) for c in leg.choices]
        ref = _ref(leg)
        drawn = time.monotonic()
        self.emit(
            session,
            first=pb.FirstTokens(
                leg=ref, tokens=tokens, queue_s=queue_s, prefill_s=prefill_s, chunks=1, drawn_at=drawn
            ),
        )
        if most > 1:
            self.emit(session, sent=pb.Sent(leg=ref, bytes=1 << 16, frames=1, transfer_s=1e-3, exposed_s=1e-4))
            self._commit(order.ticket.decode(), leg)


class Decode(Worker):
    """A batch that steps on time."""

    role = "decode"

    def __init__(self, number: int, simulation: Simulation, clock: Clock) -> None:
        super().__init__(number, simulation, clock)
        self._number = number
        self._seats: dict[_Key, _Sequence | None] = {}  # None: reserved
        self._line: deque[tuple[int, pb.Leg, float]] = deque()
        self._reserved: dict[str, int] = {}  # request -> session
        self._steps = 0

    async def start(self) -> None:
        await super().start()
        self._task = asyncio.create_task(self._run())

    def load(self) -> pb.Load:
        running = sum(sequence is not None for sequence in self._seats.values())
        held = len(self._seats) - running
        return pb.Load(
            running=running, waiting=len(self._line), held_legs=held, steps=self._steps, total_blocks=1 << 20
        )

    def command(self, session: int, command: pb.RouterCommand) -> None:
        if command.HasField("reserve"):
            self._line.append((session, command.reserve.leg, time.monotonic()))
            self._seat()
        elif command.HasField("cancel"):
            ref = command.cancel.leg
            self._leave((session, ref.request_id, ref.attempt))
            self._line = deque(entry for entry in self._line if entry[1].request_id != ref.request_id)

    def forget(self, session: int) -> None:
        self._line = deque(entry for entry in self._line if entry[0] != session)
        for key in [key for key in self._seats if key[0] == session]:
            self._leave(key)

    def _leave(self, key: _Key) -> None:
        if key in self._seats:
            del self._seats[key]
            self._reserved.pop(key[1], None)
            self._seat()

    def _seat(self) -> None:
        while self._line and len(self._seats) < self._simulation.seats:
            session, leg, since = self._line.popleft()
            self._seats[session, leg.request_id, leg.attempt] = None
            self._reserved[leg.request_id] = session
            ticket = pb.Ticket(leg=_ref(leg), ticket=self.worker_id.encode(), waited_s=time.monotonic() - since)
            self.emit(session, ticket=ticket)

    def commit(self, leg: pb.Leg) -> None:
        """The KV of a leg is here."""
        session = self._reserved.get(leg.request_id)
        key = (session or 0, leg.request_id, leg.attempt)
        if session is not None and key in self._seats:
            self._seats[key] = _Sequence(session, leg)
            done = pb.Committed(leg=_ref(leg), bytes=1 << 16, frames=1, reserved_s=1e-3, at=time.monotonic())
            self.emit(session, committed=done)

    async def _run(self) -> None:
        step_s = self._simulation.step_s
        due = time.monotonic() + step_s * (self._number / self._simulation.pairs)  # workers do not step together
        while True:
            due = max(due + step_s, time.monotonic() - step_s)
            await asyncio.sleep(due - time.monotonic())
            self._step()

    def _step(self) -> None:
        self._steps += 1
        token_id = self._clock.stamp()
        by_session: dict[int, list[pb.StepToken]] = {}
        ended: list[_Key] = []
        for key, sequence in self._seats.items():
            if sequence is None:
                continue
            last = sequence.index + 1 >= sequence.most
            token = pb.Token(index=sequence.index, token_id=token_id, finish_reason="length" if last else "")
            sequence.index += 1
            step = pb.StepToken(request_id=key[1], attempt=key[2], token=token)
            by_session.setdefault(key[0], []).append(step)
            if last:
                ended.append(key)
        for session, tokens in by_session.items():
            self.emit(session, tokens=pb.Tokens(tokens=tokens, at=time.monotonic()))
        for key in ended:
            self._leave(key)


class _Membership(MembershipServicer):
    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers

    async def Watch(self, request: control_pb2.WatchRequest, context: Any) -> None:
        """All workers, ready, for ever."""
        members = [
            control_pb2.Member(worker_id=w.worker_id, incarnation="1", role=w.role, address=w.address, state="ready")
            for w in self._workers
        ]
        await context.write(control_pb2.View(version=1, members=members))
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def simulated(simulation: Simulation) -> AsyncIterator[str]:
    """All of it, in this loop, while the block runs; the address is the membership's."""
    clock = Clock(simulation.clock)
    decodes = {f"decode-{i}": Decode(i, simulation, clock) for i in range(simulation.pairs)}

    def commit(worker: str, leg: pb.Leg) -> None:
        decodes[worker].commit(leg)

    prefills = [Prefill(i, simulation, clock, commit) for i in range(simulation.pairs)]
    workers: list[Worker] = [*prefills, *decodes.values()]
    for worker in workers:
        await worker.start()
    server = grpc.aio.server(options=server_options(64 << 20))
    add_MembershipServicer_to_server(_Membership(workers), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)
        for worker in workers:
            await worker.stop()


async def _main() -> None:
    simulation = Simulation(**json.loads(sys.stdin.readline()))
    async with simulated(simulation) as address:
        print(json.dumps({"membership": address}), flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the parent closes it


if __name__ == "__main__":
    asyncio.run(_main())
