"""A router on its own: real frontends and sessions, a real membership stream, and workers that follow a script.

The fake workers stand in for the engine and the transfer only; they speak Worker.Session over gRPC and keep books of
the legs that they hold, so that tests can assert that nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
from baton.proto import baton_pb2 as api
from baton.proto import control_pb2
from baton.proto import worker_pb2 as pb
from baton.proto.baton_pb2_grpc import BatonStub
from baton.proto.control_pb2_grpc import MembershipServicer, add_MembershipServicer_to_server
from baton.proto.sampling import SamplingParams, finish_reason
from baton.proto.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from baton.router import main
from baton.router.channels import server_options
from baton.router.params import BatchParams, GrpcParams, RequestLimits, RouterParams
from baton.tests.harness.tiny_model import EOS, special_id, write_tokenizer

EOS_ID = special_id(EOS)
CONTEXT = 256
VOCAB = 320
_LIMIT_S = 20.0
LIMITS = RequestLimits(
    n=8,
    logprobs=20,
    stops=4,
    stop_chars=64,
    stop_token_ids=16,
    logit_bias=300,
    prompts=16,
    messages=64,
    prompt_bytes=1 << 20,
    grammar_bytes=1 << 14,
    tools=16,
    body_bytes=6 << 20,
    batch=64,
    parallelism=8,
)


class Key(NamedTuple):
    """A leg at a worker."""

    request_id: str
    attempt: int
    first_choice: int


def key_of(leg: pb.Leg | pb.LegRef) -> Key:
    first = leg.choices[0] if isinstance(leg, pb.Leg) else leg.first_choice
    return Key(leg.request_id, leg.attempt, first)


def ref_of(leg: pb.Leg) -> pb.LegRef:
    return pb.LegRef(request_id=leg.request_id, attempt=leg.attempt, first_choice=leg.choices[0])


Script = Callable[[pb.Leg, int, int], int]  # (leg, choice, output index) -> token id


def say(text: str | bytes) -> Script:
    """Every choice says `text`, one byte a token, and then ends."""
    data = text.encode() if isinstance(text, str) else text
    return lambda leg, choice, index: data[index] if index < len(data) else EOS_ID


class FakeWorker(WorkerServicer):
    """One worker process. `on_reserve`, `on_prefill`, `on_decode` are its behaviour and can be replaced."""

    def __init__(self, cluster: FakeCluster, worker_id: str, incarnation: str, role: str) -> None:
        self.cluster = cluster
        self.worker_id, self.incarnation, self.role = worker_id, incarnation, role
        self.held: dict[Key, pb.Leg] = {}
        self.commands: list[tuple[str, Key]] = []
        self.messages = 0
        self.step_s = 0.002
        self.most_tokens = math.inf  # decode says so many of an answer and goes on when this is raised
        self.muted = False
        self.deadlines: list[float] = []
        self.on_reserve: Callable[[pb.Leg], Awaitable[None]] = self.reserve
        self.on_compute: Callable[[pb.Leg], Awaitable[None]] = self.compute
        self.on_prefill: Callable[[pb.Leg, bytes], Awaitable[None]] = self.prefill
        self.on_decode: Callable[[pb.Leg], Awaitable[None]] = self.decode
        self._outbox: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self.on_hold: Callable[[Key, int], None] = self.hold
        self.on_withdraw: Callable[[pb.Withdraw], None] = self.withdraw
        self.ended: dict[Key, set[int]] = {}  # choices that the router ended, by leg
        self.used_blocks = 0  # at least, as the load says
        self.step_time: pb.StepTime | None = None  # as the load says
        self.watched = 0  # how often the router asked for all prefixes
        self.on_watch: Callable[[], None] = lambda: None
        self.kept: set[Key] = set()  # legs whose only choice left the batch
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server(options=server_options(64 << 20))
        add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def kill(self) -> None:
        """Gone at once, with all that it held."""
        self._drop_all()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    def _drop_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self.held.clear()

    # ---- the session -----------------------------------------------------------------------------------------------

    async def Session(self, request_iterator: AsyncIterator[pb.RouterMessage], context: Any) -> None:
        self._outbox = asyncio.Queue()
        writer = asyncio.create_task(self._write(context))
        try:
            async for message in request_iterator:
                self.messages += bool(message.commands)
                for command in message.commands:
                    await self._command(command, context)
        finally:
            writer.cancel()
            self._drop_all()

    async def _write(self, context: Any) -> None:
        while True:
            try:
                message = await asyncio.wait_for(self._outbox.get(), 0.2)
            except TimeoutError:
                message = pb.WorkerMessage()
            if not self.muted:
                used = max(self.used_blocks, len(self.held))
                load = pb.Load(running=len(self.held), total_blocks=64, used_blocks=used, step_time=self.step_time)
                message.load.CopyFrom(load)
                await context.write(message)

    async def _command(self, command: pb.RouterCommand, context: Any) -> None:
        kind = command.WhichOneof("command")
        if kind == "hello":
            if command.hello.worker_incarnation != self.incarnation:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation")
            self.emit(welcome=self._welcome())
            return
        if kind == "watch_prefixes":
            self.watched += 1
            self.on_watch()
            return
        body = getattr(command, kind or "")
        key = key_of(body.leg)
        self.commands.append((kind or "", key))
        if kind == "cancel" and body.choices:
            self.ended.setdefault(key, set()).update(body.choices)
            if key in self.kept:
                self.held.pop(key, None)
            return
        if kind == "hold":
            self.on_hold(key, body.choice)
            return
        if kind == "handover":
            await self._hand_over(command.handover)
            return
        if kind == "withdraw":
            self.on_withdraw(command.withdraw)
            return
        if kind in ("cancel", "release"):
            self.held.pop(key, None)
            if kind == "cancel" and key in self._tasks:
                self._tasks.pop(key).cancel()
            return
        self.held[key] = body.leg
        self.deadlines.append(body.leg.deadline_s)
        if kind == "reserve":
            work = self.on_compute(body.leg) if body.compute else self.on_reserve(body.leg)
        else:
            work = self.on_prefill(body.leg, body.ticket)
        self._tasks[key] = asyncio.ensure_future(work)

    def _welcome(self) -> pb.Welcome:
        return pb.Welcome(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            model_fingerprint="tiny",
            max_model_len=CONTEXT,
            vocab_size=VOCAB,
            block_size=4,
            total_blocks=64,
            max_batch_tokens=64,
            max_sequences=16,
            lookahead=2,
        )

    def emit(self, **event: Any) -> None:
        """Sends one event."""
        self._outbox.put_nowait(pb.WorkerMessage(events=[pb.WorkerEvent(**event)]))

    def fail(self, leg: pb.Leg, code: str, message: str = "scripted") -> None:
        """The leg is over here."""
        self.held.pop(key_of(leg), None)
        self.emit(failed=pb.Failed(leg=ref_of(leg), code=code, message=message))

    # ---- behaviour -------------------------------------------------------------------------------------------------

    def token(self, leg: pb.Leg, choice: int, index: int) -> pb.Token:
        """What the script says, with a log probability that depends on the index."""
        params = SamplingParams.from_wire(leg.sampling)
        token_id = self.cluster.script(leg, choice, index)
        token = pb.Token(choice=choice, index=index, token_id=token_id)
        token.finish_reason = finish_reason(params, token_id, index + 1)
        if params.logprobs is not None:
            token.logprob = -0.5 - index
            token.top_logprobs.extend(pb.TopLogprob(token_id=i, logprob=-i - 1.0) for i in range(params.logprobs))
        return token

    async def reserve(self, leg: pb.Leg) -> None:
        """Decode: gives a ticket."""
        ticket = f"{self.worker_id}/{self.incarnation}/{leg.request_id}/{leg.attempt}/{leg.choices[0]}".encode()
        self.cluster.tickets[ticket] = (self, leg)
        self.emit(ticket=pb.Ticket(leg=ref_of(leg), ticket=ticket, cached_tokens=0, waited_s=0.001))

    async def compute(self, leg: pb.Leg) -> None:
        """Decode: computes the prompt itself, and goes on."""
        tokens = [self.token(leg, choice, len(leg.generated_token_ids)) for choice in leg.choices]
        self.emit(first=pb.FirstTokens(leg=ref_of(leg), tokens=tokens, prefill_s=0.002, chunks=1))
        if all(token.finish_reason for token in tokens):
            self.held.pop(key_of(leg), None)
            return
        self.emit(committed=pb.Committed(leg=ref_of(leg)))
        await self.on_decode(leg)

    async def prefill(self, leg: pb.Leg, ticket: bytes) -> None:
        """Prefill: samples the first tokens and hands the leg over."""
        start = len(leg.generated_token_ids)
        tokens = [self.token(leg, choice, start) for choice in leg.choices]
        first = pb.FirstTokens(
            leg=ref_of(leg), tokens=tokens, cached_tokens=3, queue_s=0.001, prefill_s=0.002, chunks=1
        )
        self.emit(first=first)
        if all(token.finish_reason for token in tokens):
            other = self.cluster.tickets.pop(ticket, None)
            if other is not None:
                other[0].held.pop(key_of(other[1]), None)  # abandoned
            return
        await self.hand_over(leg, ticket)

    async def hand_over(self, leg: pb.Leg, ticket: bytes) -> None:
        """The KV arrives; decode goes on."""
        decode, _ = self.cluster.tickets.pop(ticket)
        self.emit(sent=pb.Sent(leg=ref_of(leg), bytes=1000, frames=2, transfer_s=0.003, exposed_s=0.001))
        if key_of(leg) in decode.held:
            decode.emit(committed=pb.Committed(leg=ref_of(leg), bytes=1000, frames=2, reserved_s=0.01))
            decode._tasks[key_of(leg)] = asyncio.ensure_future(decode.on_decode(leg))

    def withdraw(self, order: pb.Withdraw) -> None:
        """Decode: a leg that is only reserved fails."""
        leg = self.held.get(key_of(order.leg))
        if leg is not None and self._tasks[key_of(order.leg)].done():
            self.fail(leg, order.code, order.message)

    def hold(self, key: Key, choice: int) -> None:
        """Decode: the only choice of a leg leaves the batch and is kept."""
        if key not in self.held or choice in self.ended.get(key, set()):
            return
        self.ended.setdefault(key, set()).add(choice)
        self.kept.add(key)
        ref = pb.LegRef(request_id=key.request_id, attempt=key.attempt, first_choice=key.first_choice)
        self.emit(held=pb.Held(leg=ref, choice=choice))

    async def _hand_over(self, order: pb.Handover) -> None:
        """What is held goes on under another leg; a prefill worker repeats the first tokens."""
        leg, held = order.leg, Key(order.held.request_id, order.held.attempt, order.held.first_choice)
        if self.held.pop(held, None) is None:
            self.fail(leg, "unavailable", "nothing is held")
            return
        self.held[key_of(leg)] = leg
        if held in self._tasks:
            self._tasks.pop(held).cancel()
        go_on = self.prefill if self.role == "prefill" else self.hand_over
        work = go_on(leg, order.ticket)
        self._tasks[key_of(leg)] = asyncio.ensure_future(work)

    async def decode(self, leg: pb.Leg) -> None:
        """Decode: one message per step with the tokens of all choices; the first repeats token 1."""
        alive, index = list(leg.choices), len(leg.generated_token_ids)
        while alive:
            tokens = [self.token(leg, choice, index) for choice in alive]
            self.step(leg, tokens)
            index += 1
            await asyncio.sleep(self.step_s)
            while index >= self.most_tokens:
                await asyncio.sleep(0.005)
            ended = self.ended.get(key_of(leg), set())
            alive = [token.choice for token in tokens if not token.finish_reason and token.choice not in ended]
        if key_of(leg) not in self.kept:
            self.held.pop(key_of(leg), None)

    def step(self, leg: pb.Leg, tokens: Sequence[pb.Token]) -> None:
        """One step's message."""
        steps = [pb.StepToken(request_id=leg.request_id, attempt=leg.attempt, token=token) for token in tokens]
        self.emit(tokens=pb.Tokens(tokens=steps))


class FakeCluster(MembershipServicer):
    """Fake workers and the membership service that lists them."""

    def __init__(self) -> None:
        self.script: Script = say("hello")
        self.tickets: dict[bytes, tuple[FakeWorker, pb.Leg]] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.states: dict[str, str] = {}
        self._changed = asyncio.Condition()
        self._version = 0
        self._server = grpc.aio.server(options=server_options(64 << 20))
        self.address = ""

    async def start(self) -> None:
        add_MembershipServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def add(self, worker_id: str, incarnation: str = "1", address: str = "127.0.0.1:0") -> FakeWorker:
        """Starts a worker (its role is the id up to the dash) and lists it as ready."""
        worker = FakeWorker(self, worker_id, incarnation, worker_id.partition("-")[0])
        await worker.start(address)
        self.workers[worker_id] = worker
        await self.set_state(worker_id, "ready")
        return worker

    async def set_state(self, worker_id: str, state: str) -> None:
        """Publishes a new view; state "" takes the worker off the list."""
        self.states[worker_id] = state
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    def _view(self) -> control_pb2.View:
        members = [
            control_pb2.Member(
                worker_id=name, incarnation=w.incarnation, role=w.role, address=w.address, state=self.states[name]
            )
            for name, w in self.workers.items()
            if self.states[name]
        ]
        return control_pb2.View(version=self._version, members=members)

    async def Watch(self, request: control_pb2.WatchRequest, context: Any) -> None:
        while True:
            version = self._version
            await context.write(self._view())
            async with self._changed:
                while self._version == version:
                    await self._changed.wait()

    async def stop(self) -> None:
        for worker in self.workers.values():
            await worker.kill()
        await self._server.stop(0)

    def __getitem__(self, worker_id: str) -> FakeWorker:
        return self.workers[worker_id]

    async def settled(self) -> None:
        """Waits until no worker holds a leg; fails with what is left (O-pool)."""

        def left() -> dict[str, list[Key]]:
            return {name: list(worker.held) for name, worker in self.workers.items() if worker.held}

        await until(lambda: not left(), lambda: f"legs left behind: {left()}")


async def until(
    met: Callable[[], object] | Callable[[], Awaitable[object]], problem: str | Callable[[], str] = "it did not happen"
) -> None:
    """Returns when `met()`, or what it awaits, is true. The limit only ends a test that has failed."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        found = met()
        if await found if inspect.isawaitable(found) else found:
            return
        assert time.monotonic() < deadline, problem if isinstance(problem, str) else problem()
        await asyncio.sleep(0.01)


class Collected(NamedTuple):
    """A whole gRPC answer."""

    texts: dict[int, str]
    ids: dict[int, list[int]]
    reasons: dict[int, str]
    finished: list[api.Finished]
    prompt_tokens: int


class RouterRig:
    """A running router and its cluster."""

    def __init__(self, cluster: FakeCluster, params: RouterParams) -> None:
        self.cluster = cluster
        self.params = params
        self.stop = asyncio.Event()
        self.addresses: dict[str, Any] = {}
        self._up = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def _report(self, kind: str, what: dict[str, Any]) -> None:
        if kind == "ready":
            self.addresses = what
            self._up.set()

    async def start(self) -> None:
        self.task = asyncio.create_task(main.run(self.params, self._report, self.stop))
        waiting = asyncio.create_task(self._up.wait())
        await asyncio.wait([waiting, self.task], return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            waiting.cancel()
            self.task.result()
        self.channel = grpc.aio.insecure_channel(self.addresses["grpc"])
        self.stub = BatonStub(self.channel)
        scheme = "http" if self.params.tls is None else "https"
        self.http = httpx.AsyncClient(
            base_url=f"{scheme}://{self.addresses['http']}", timeout=30, trust_env=False, verify=False
        )

    async def ready(self) -> None:
        """Waits until the router calls itself ready."""

        async def ready() -> bool:
            return (await self.http.get("/ready")).status_code == 200

        await until(ready, "the router is not ready")

    async def not_ready(self) -> str:
        """Waits until it does not; the reason."""
        said: list[str] = []

        async def refused() -> bool:
            answer = await self.http.get("/ready")
            said.append(answer.json().get("reason", ""))
            return answer.status_code == 503

        await until(refused, "the router stays ready")
        return said[-1]

    async def counts(self, name: str, value: float, **labels: str) -> None:
        """Waits until a metric has this value."""

        async def equal() -> bool:
            return await self.metric(name, **labels) == value

        await until(equal, f"{name} is not {value:g}")

    async def generate(self, timeout: float = 60, **fields: Any) -> Collected:
        """One gRPC call, read to its end."""
        request = api.GenerateRequest(**fields)
        texts: dict[int, str] = {}
        ids: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        finished: list[api.Finished] = []
        prompt_tokens = 0
        call = self.stub.Generate(request, timeout=timeout)
        async for message in call:
            if message.HasField("accepted"):
                prompt_tokens = message.accepted.prompt_tokens
            elif message.HasField("tokens"):
                chunk = message.tokens
                assert chunk.offset == len(ids.setdefault(chunk.choice, []))
                ids[chunk.choice] += chunk.token_ids
                texts[chunk.choice] = texts.get(chunk.choice, "") + chunk.text
            else:
                assert message.finished.choice not in reasons
                reasons[message.finished.choice] = message.finished.reason
                finished.append(message.finished)
        return Collected(texts, ids, reasons, finished, prompt_tokens)

    async def streaming(self, tokens: int, step_s: float = 0.03, **fields: Any) -> asyncio.Task[Collected]:
        """Starts a call of slow steps and returns it once `tokens` tokens were decoded."""
        seen, said = asyncio.Event(), self.cluster.script

        def watch(leg: pb.Leg, choice: int, index: int) -> int:
            if index >= tokens:
                seen.set()
            return said(leg, choice, index)

        self.cluster.script = watch
        for worker in self.cluster.workers.values():
            worker.step_s = step_s
        call = asyncio.create_task(self.generate(**fields))
        await asyncio.wait_for(seen.wait(), _LIMIT_S)
        return call

    def serving(self, role: str) -> FakeWorker:
        """The one worker of a role that holds a leg."""
        (worker,) = [w for w in self.cluster.workers.values() if w.role == role and w.held]
        return worker

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry the labels."""
        return _sum((await self.http.get("/metrics")).text, name, **labels)

    async def reconcile(self) -> None:
        """O-acct: accepted = completed + failed + cancelled, and nothing is in flight."""
        names = ("accepted", "completed", "failed", "cancelled")
        text = (await self.http.get("/metrics")).text
        counts = {name: _sum(text, f"baton_requests_{name}_total") for name in names}
        assert counts["accepted"] == counts["completed"] + counts["failed"] + counts["cancelled"], counts
        assert _sum(text, "baton_router_inflight_requests") == 0

    async def close(self) -> None:
        if not self.addresses:
            return
        await self.http.aclose()
        await self.channel.close()
        self.stop.set()
        if self.task is not None:
            await self.task


def _sum(text: str, name: str, **labels: str) -> float:
    total = 0.0
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
            total += float(value)
    return total


def write_model(directory: Path) -> Path:
    """A tokenizer and a config: all that the router reads of a model."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, vocab=VOCAB, max_len=CONTEXT)
    (directory / "config.json").write_text(json.dumps({"eos_token_id": EOS_ID, "vocab_size": VOCAB}))
    return directory


def router_params(model: Path, membership: str) -> RouterParams:
    return RouterParams(
        router_id="router-0",
        model_path=str(model),
        served_name="tiny",
        grpc_address="127.0.0.1:0",
        grpc=GrpcParams(
            keepalive_s=30.0,
            keepalive_timeout_s=10.0,
            min_ping_interval_s=0.5,
            max_connection_age_s=None,
            max_streams=1000,
            reflection=True,
            channelz=True,
            open_inference=True,
        ),
        http_address="127.0.0.1:0",
        share_ports=False,
        joins=False,
        metrics_socket="",
        membership_address=membership,
        peer_tls=None,
        prefill_placement="least_loaded",
        decode_placement="least_loaded",
        disaggregation="always",
        prefix_events=True,
        ttft_objective_s=None,
        tpot_objective_s=None,
        heartbeat_s=0.1,
        dead_after_s=1.0,
        request_deadline_s=20.0,
        stall_s=10.0,
        attempts=3,
        stream_interval=1,
        tenants=(),
        tls=None,
        traces="",
        max_inflight=256,
        lame_duck_s=0.0,
        stop_grace_s=10.0,
        limits=LIMITS,
        batches=BatchParams(folder=None, files=8, file_bytes=1 << 20, parallelism=4),
    )


@contextlib.asynccontextmanager
async def router_rig(directory: Path, *workers: str, **changes: Any) -> AsyncIterator[RouterRig]:
    """A router with these fake workers, ready; `changes` replace fields of its parameters. Ends with O-pool, O-acct."""
    cluster = FakeCluster()
    await cluster.start()
    for worker in workers:
        await cluster.add(worker)
    rig = RouterRig(
        cluster, dataclasses.replace(router_params(write_model(directory / "model"), cluster.address), **changes)
    )
    try:
        await rig.start()
        if {"prefill", "decode"} <= {worker.partition("-")[0] for worker in workers}:
            await rig.ready()
        yield rig
        await cluster.settled()
        if not rig.stop.is_set():
            await rig.reconcile()
    finally:
        await rig.close()
        await cluster.stop()
