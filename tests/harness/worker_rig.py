"""Real prefill and decode workers in threads of this process, and a router's sessions with them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from baton.decode_worker import main as decode_main
from baton.decode_worker.params import DecodeParams
from baton.engine.params import EngineParams, SpeculationParams
from baton.kv_transfer.params import TransferParams
from baton.prefill_worker import main as prefill_main
from baton.prefill_worker.params import PrefillParams
from baton.proto import worker_pb2 as pb
from baton.proto.leg import LegKey, key_of
from baton.proto.worker_pb2_grpc import WorkerStub

_START_S = 60.0
_ids = itertools.count(1)


def engine_params(model: Path, **changes: Any) -> EngineParams:
    """T0's engine: float32, blocks of 4, 64 of them."""
    values: dict[str, Any] = {
        "model_path": str(model),
        "dtype": "float32",
        "quantization": "none",
        "sparsity": "auto",
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
        connect_timeout_s=5,
        frame_timeout_s=10,
        idle_close_s=30,
        transport="inline",
        tls=None,
        max_links=64,
        wire="raw",
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
        "start_timeout_s": 90.0,
        "rank_timeout_s": 30.0,
        "heartbeat_s": 0.1,
        "peer_tls": None,
        "dead_after_s": 5.0,
    }


def prefill_params(engine: EngineParams, **changes: Any) -> PrefillParams:
    """A prefill worker with chunks of 16 tokens."""
    own = {
        "max_batch_tokens": 16,
        "lookahead": 2,
        "commit_timeout_s": 20.0,
        "fetch_min_tokens": 0,
        "fetch_timeout_s": 10.0,
    }
    return PrefillParams(**{**_shared("prefill", engine), **own, **changes})


def decode_params(engine: EngineParams, **changes: Any) -> DecodeParams:
    """A decode worker with 16 seats."""
    own: dict[str, Any] = {"max_sequences": 16, "max_batch_tokens": 8, "reserve_wait_s": 20.0, "commit_timeout_s": 20.0}
    own["speculation"] = SpeculationParams("none", 8, "", 1 << 20)
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
        """One message. A caller that is cancelled meanwhile does not cancel the session."""
        await asyncio.shield(self._write(pb.RouterMessage(commands=commands)))

    async def _write(self, message: pb.RouterMessage) -> None:
        async with self._writing:  # gRPC takes one write at a time
            await self.call.write(message)

    async def until(self, found: Callable[[], Any], within_s: float = 60.0) -> Any:
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

    async def wait_idle(self, within_s: float = 30.0) -> None:
        """O-pool: nothing referenced, held, running or waiting."""
        seen = len(self.messages)

        def idle() -> bool:
            busy = self.load.used_blocks or self.load.held_legs or self.load.running or self.load.waiting
            return len(self.messages) > seen + 1 and not busy

        await self.until(idle, within_s)

    async def failed(self, key: LegKey) -> pb.Failed:
        """Waits for the leg's failure."""
        (failure,) = await self.until(lambda: self.of(key, "failed"))
        assert isinstance(failure, pb.Failed)
        return failure

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
        stub: Any = WorkerStub(channel)
        call: Any = stub.Session()
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
