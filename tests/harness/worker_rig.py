"""Real prefill and decode workers in threads of this process, and a router played by the test."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from baton.decode_worker import main as decode_main
from baton.decode_worker.params import DecodeParams
from baton.engine.params import EngineParams
from baton.kv_transfer.params import TransferParams
from baton.prefill_worker import main as prefill_main
from baton.prefill_worker.params import PrefillParams
from baton.proto import worker_pb2 as pb
from baton.proto.leg import LegKey, key_of, ref_of
from baton.proto.sampling import SamplingParams
from baton.proto.worker_pb2_grpc import WorkerStub

_START_S = 60.0
_ids = itertools.count(1)


def engine_params(model: Path, **changes: Any) -> EngineParams:
    """T0's engine: float32, blocks of 4, 64 of them."""
    values: dict[str, Any] = {
        "model_path": str(model),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "block_size": 4,
        "kv_blocks": 64,
        "kv_bytes": 0,
        "kv_dtype": "auto",
        "max_model_len": None,
        "batch_invariant": True,
        "prefix_cache": True,
        "layer_group": 1,
        "tensor_parallel": 1,
    }
    return EngineParams(**{**values, **changes})


def _shared(role: str, engine: EngineParams) -> dict[str, Any]:
    transfer = TransferParams(
        host="127.0.0.1",
        connect_timeout_s=2,
        frame_timeout_s=5,
        idle_close_s=30,
        transport="inline",
        checksum=True,
        max_outstanding=2,
        frame_bytes=512 << 10,
    )
    return {
        "worker_id": f"{role}-0",
        "incarnation": f"i{next(_ids)}",
        "engine": engine,
        "transfer": transfer,
        "host": "127.0.0.1",
        "port": 0,
        "secret": b"the secret of this worker's ranks",
        "rank_timeout_s": 30.0,
        "heartbeat_s": 0.1,
        "dead_after_s": 1.0,
    }


def prefill_params(engine: EngineParams, **changes: Any) -> PrefillParams:
    """A prefill worker with chunks of 16 tokens."""
    return PrefillParams(**{**_shared("prefill", engine), "max_batch_tokens": 16, "lookahead": 2, **changes})


def decode_params(engine: EngineParams, **changes: Any) -> DecodeParams:
    """A decode worker with 16 seats."""
    own = {"max_sequences": 16, "reserve_wait_s": 20.0, "commit_timeout_s": 20.0}
    return DecodeParams(**{**_shared("decode", engine), **own, **changes})


class WorkerProcess:
    """One worker, its ranks as threads. `failure` is what its leader raised."""

    def __init__(self, params: PrefillParams | DecodeParams) -> None:
        self.params = params
        self.address = ""
        self.failure: BaseException | None = None
        self.reports: list[str] = []
        self.stop_event = threading.Event()
        self._followers_stop = threading.Event()
        self._ready = threading.Event()
        self._threads = [threading.Thread(target=self._lead, name="leader")]
        self._threads[0].start()

    def wait_ready(self) -> None:
        """Blocks. Raises what kept the worker from starting."""
        assert self._ready.wait(_START_S)
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """Blocks until all ranks have ended; the leader tells the others."""
        self.stop_event.set()
        self.join()

    def join(self) -> None:
        """Blocks until all ranks have ended."""
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), thread.name

    def lose_followers(self) -> None:
        """The ranks other than the leader go."""
        self._followers_stop.set()

    def _lead(self) -> None:
        try:
            if isinstance(self.params, PrefillParams):
                prefill_main.run_leader(self.params, self._report, self.stop_event)
            else:
                decode_main.run_leader(self.params, self._report, self.stop_event)
        except BaseException as error:
            self.failure = error
        finally:
            self._ready.set()

    def _report(self, kind: str, fields: dict[str, Any]) -> None:
        self.reports.append(kind)
        if kind == "channel":
            for rank in range(1, self.params.engine.tensor_parallel):
                thread = threading.Thread(target=self._follow, args=(rank, fields["address"]), name=f"rank-{rank}")
                thread.start()
                self._threads.append(thread)
        elif kind == "ready":
            self.address = fields["address"]
            self._ready.set()

    def _follow(self, rank: int, address: str) -> None:
        if isinstance(self.params, PrefillParams):
            prefill_main.run_follower(self.params, rank, address, self._followers_stop)
        else:
            decode_main.run_follower(self.params, rank, address, self._followers_stop)


class Session:
    """The router's end of a session with one worker."""

    def __init__(self, call: Any, welcome: pb.Welcome) -> None:
        self.call = call
        self.welcome = welcome
        self.events: list[pb.WorkerEvent] = []
        self.messages: list[pb.WorkerMessage] = []
        self.load = pb.Load()
        self.changed = asyncio.Condition()
        self.broken: grpc.aio.AioRpcError | None = None
        self._writing = asyncio.Lock()

    async def send(self, *commands: pb.RouterCommand) -> None:
        """One message."""
        async with self._writing:  # gRPC takes one write at a time
            await self.call.write(pb.RouterMessage(commands=commands))

    async def until(self, found: Callable[[], Any], within_s: float = 20.0) -> Any:
        """Waits for news until `found()` is true, and returns it."""
        async with asyncio.timeout(within_s), self.changed:
            while not (value := found()):
                await self.changed.wait()
            return value

    def of(self, key: LegKey, kind: str) -> list[Any]:
        """Events of this kind that name the leg."""
        bodies = [getattr(event, kind) for event in self.events if event.WhichOneof("event") == kind]
        return [body for body in bodies if key_of(body.leg) == key]

    def tokens(self, key: LegKey) -> list[pb.Token]:
        """Of all the request's choices, in the order of arrival; of this attempt."""
        steps = [step for event in self.events for step in event.tokens.tokens]
        return [step.token for step in steps if (step.request_id, step.attempt) == key[:2]]

    async def wait_idle(self, within_s: float = 5.0) -> None:
        """O-pool: nothing referenced, held, running or waiting."""
        idle = lambda load: not (load.used_blocks or load.held_legs or load.running or load.waiting)  # noqa: E731
        seen = len(self.messages)
        await self.until(lambda: len(self.messages) > seen + 1 and idle(self.load), within_s)

    async def read(self) -> None:
        """Until the session ends."""
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                async with self.changed:
                    self.messages.append(message)
                    self.events += message.events
                    self.load = message.load
                    self.changed.notify_all()
        except grpc.aio.AioRpcError as error:
            self.broken = error

    async def beat(self, every_s: float) -> None:
        """The router's heartbeats."""
        while self.broken is None:
            await asyncio.sleep(every_s)
            await self.send()


@asynccontextmanager
async def session(worker: WorkerProcess, beats: bool = True) -> AsyncIterator[Session]:
    """Greets the worker; ends the session when the block ends."""
    params = worker.params
    async with grpc.aio.insecure_channel(worker.address) as channel:
        call: Any = WorkerStub(channel).Session()
        hello = pb.Hello(router_id="r", worker_id=params.worker_id, worker_incarnation=params.incarnation)
        await call.write(pb.RouterMessage(commands=[pb.RouterCommand(hello=hello)]))
        first = await call.read()
        made = Session(call, first.events[0].welcome)
        tasks = [asyncio.create_task(made.read())]
        if beats:
            tasks.append(asyncio.create_task(made.beat(0.2)))
        try:
            yield made
        finally:
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks[1:], return_exceptions=True)
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def leg_message(prompt: Sequence[int], params: SamplingParams, **changes: Any) -> pb.Leg:
    """The first leg of a new request."""
    values: dict[str, Any] = {
        "request_id": f"q{next(_ids)}",
        "attempt": 1,
        "choices": range(params.n),
        "prompt_token_ids": prompt,
        "sampling": params.to_wire(),
        "deadline_s": 60.0,
    }
    return pb.Leg(**{**values, **changes})


@dataclass
class Answer:
    """What the router would have: per choice its tokens in order, and how each ended."""

    tokens: dict[int, list[pb.Token]] = field(default_factory=dict)
    legs: int = 1

    def add(self, token: pb.Token) -> None:
        """Each index once, in order."""
        known = self.tokens.setdefault(token.choice, [])
        if token.index == len(known):
            known.append(token)
        assert token.index < len(known), f"a gap before {token}"

    def ids(self, choice: int = 0) -> list[int]:
        """Token ids of a choice."""
        return [token.token_id for token in self.tokens[choice]]

    @property
    def reasons(self) -> list[str]:
        """How the choices ended."""
        return [self.tokens[choice][-1].finish_reason for choice in sorted(self.tokens)]


class Router:
    """Places every leg on the one pair; resumes what is preempted."""

    def __init__(self, prefill: Session, decode: Session, workers: Sequence[WorkerProcess]) -> None:
        self.prefill = prefill
        self.decode = decode
        self.workers = workers

    async def generate(self, prompt: Sequence[int], params: SamplingParams, **changes: Any) -> Answer:
        """One request to its end. Raises AssertionError when a worker fails it."""
        answer = Answer()
        await self.run(leg_message(prompt, params, **changes), answer)
        return answer

    async def run(self, leg: pb.Leg, answer: Answer) -> None:
        """One leg, and the legs of choices that it lost."""
        key, params = key_of(leg), SamplingParams.from_wire(leg.sampling)
        ticket = b""
        if params.max_tokens - len(leg.generated_token_ids) > 1:
            ticket = (await self.reserve(leg)).ticket
        await self.prefill.send(pb.RouterCommand(prefill=pb.Prefill(leg=leg, ticket=ticket)))
        await self.prefill.until(lambda: self._alive(self.prefill, key) and self.prefill.of(key, "first"))
        (first,) = self.prefill.of(key, "first")
        for token in first.tokens:
            answer.add(token)
        if ticket and not all(token.finish_reason for token in first.tokens):
            await self.decode.until(lambda: self._alive(self.decode, key) and self.decode.of(key, "committed"))
            await self.prefill.send(pb.RouterCommand(release=pb.Release(leg=ref_of(key))))
            await self.decode.until(lambda: self._alive(self.decode, key) and self._over(key))
            for token in self.decode.tokens(key):
                answer.add(token)
        for lost in self.decode.of(key, "preempted"):
            answer.legs += 1
            values = {"attempt": leg.attempt + answer.legs, "choices": [lost.choice]}
            resumed = leg_message(leg.prompt_token_ids, params, request_id=leg.request_id, **values)
            resumed.generated_token_ids[:] = answer.ids(lost.choice)
            await self.run(resumed, answer)

    async def reserve(self, leg: pb.Leg) -> pb.Ticket:
        """Asks for blocks and waits for them."""
        key = key_of(leg)
        await self.decode.send(pb.RouterCommand(reserve=pb.Reserve(leg=leg)))
        await self.decode.until(lambda: self._alive(self.decode, key) and self.decode.of(key, "ticket"))
        ticket: pb.Ticket = self.decode.of(key, "ticket")[0]
        return ticket

    def _alive(self, side: Session, key: LegKey) -> bool:
        failed = side.of(key, "failed")
        assert not failed, failed
        assert side.broken is None, side.broken
        return True

    def _over(self, key: LegKey) -> bool:
        ended = {token.choice for token in self.decode.tokens(key) if token.finish_reason}
        ended |= {lost.choice for lost in self.decode.of(key, "preempted")}
        (first,) = self.prefill.of(key, "first")
        return ended >= {token.choice for token in first.tokens}


@asynccontextmanager
async def pair(prefill: PrefillParams, decode: DecodeParams) -> AsyncIterator[Router]:
    """A pair of workers and a router. When the block ends well both pools are empty (O-pool), then all ends."""
    workers = [WorkerProcess(prefill), WorkerProcess(decode)]
    try:
        for worker in workers:
            await asyncio.to_thread(worker.wait_ready)
        async with session(workers[0]) as one, session(workers[1]) as two:
            yield Router(one, two, workers)
            await one.wait_idle()
            await two.wait_idle()
    finally:
        for worker in workers:
            await asyncio.to_thread(worker.stop)
    assert [worker.failure for worker in workers] == [None, None]
