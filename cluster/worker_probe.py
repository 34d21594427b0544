"""The controller's own short sessions with workers: the self-test of a pair before it counts as ready, and the load of
a worker that drains. Not a router: one request at a time, nothing is retried."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc

from ..proto import worker_pb2 as pb
from ..proto.peer_tls import PeerTLS
from ..proto.peer_tls import channel as channel_to
from ..proto.worker_pb2_grpc import WorkerStub
from .membership import Member

_SELF_TEST_TOKENS = 2


class ProbeFailed(Exception):
    """The worker could not be reached, refused, or failed the self-test; the message says which."""


class Probe:
    """One open session. Made by `connect`."""

    def __init__(self, call: Any, member: Member, welcome: pb.Welcome) -> None:
        self._call = call
        self.member = member
        self.welcome = welcome
        self.load: pb.Load | None = None  # the latest, from the worker's heartbeats
        self._events: asyncio.Queue[pb.WorkerEvent | None] = asyncio.Queue()
        self.changed = asyncio.Event()

    async def send(self, command: pb.RouterCommand) -> None:
        """One command."""
        try:
            await self._call.write(pb.RouterMessage(commands=[command]))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise ProbeFailed(f"{self.member.worker_id}: the session broke: {error}") from None

    async def event(self, kind: str) -> Any:
        """The next event of this kind; others are passed over. Raises ProbeFailed when the leg fails instead."""
        while True:
            event = await self._events.get()
            if event is None:
                raise ProbeFailed(f"{self.member.worker_id}: the session broke")
            got = event.WhichOneof("event")
            if got == kind:
                return getattr(event, kind)
            if got in ("failed", "unsent"):
                raise ProbeFailed(f"{self.member.worker_id}: {getattr(event, got).message}")

    async def read(self) -> None:
        """Take in messages until the session ends."""
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if message.HasField("load"):
                    self.load = message.load
                    self.changed.set()
                for event in message.events:
                    self._events.put_nowait(event)
        except grpc.aio.AioRpcError:
            pass
        finally:
            self._events.put_nowait(None)

    async def beat(self, heartbeat_s: float) -> None:
        """Keep the session alive."""
        while True:
            await asyncio.sleep(heartbeat_s)
            await self._call.write(pb.RouterMessage())


@contextlib.asynccontextmanager
async def connect(member: Member, heartbeat_s: float, timeout_s: float, tls: PeerTLS | None) -> AsyncIterator[Probe]:
    """A session with this worker. Raises ProbeFailed."""
    async with channel_to(member.address, tls, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call: Any = WorkerStub(channel).Session()
        hello = pb.Hello(
            router_id=f"controller-{secrets.token_hex(4)}",
            worker_id=member.worker_id,
            worker_incarnation=member.incarnation,
        )
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(pb.RouterMessage(commands=[pb.RouterCommand(hello=hello)]))
                message = await call.read()
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            detail = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no answer"
            raise ProbeFailed(f"{member.worker_id} at {member.address}: {detail}") from None
        if message is grpc.aio.EOF or not message.events or message.events[0].WhichOneof("event") != "welcome":
            raise ProbeFailed(f"{member.worker_id} at {member.address} did not say welcome")
        probe = Probe(call, member, message.events[0].welcome)
        tasks = [asyncio.create_task(probe.read()), asyncio.create_task(probe.beat(heartbeat_s))]
        try:
            yield probe
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _self_test_leg(prefill: pb.Welcome, decode: pb.Welcome, deadline_s: float) -> pb.Leg:
    """A prompt of just over one block of either side, two tokens, cached apart from everybody's prompts."""
    longest = min(prefill.max_model_len, decode.max_model_len) - _SELF_TEST_TOKENS
    length = max(1, min(max(prefill.block_size, decode.block_size) + 1, longest))
    return pb.Leg(
        request_id=f"selftest-{secrets.token_hex(8)}",
        attempt=1,
        choices=[0],
        prompt_token_ids=[index % prefill.vocab_size for index in range(length)],
        sampling=pb.SamplingParams(top_p=1, repetition_penalty=1, n=1, max_tokens=_SELF_TEST_TOKENS),
        deadline_s=deadline_s,
        cache_salt=f"selftest-{secrets.token_hex(8)}",
    )


async def self_test(prefill: Probe, decode: Probe, timeout_s: float) -> None:
    """One request through this pair: reservation, prompt, transfer, commit, one decode step. Raises ProbeFailed.

    It opens the link and builds every communicator, so that no client's request pays for that.
    """
    leg = _self_test_leg(prefill.welcome, decode.welcome, timeout_s)
    ref = pb.LegRef(request_id=leg.request_id, attempt=1, first_choice=0)
    pair = f"self-test {prefill.member.worker_id} -> {decode.member.worker_id}"
    try:
        async with asyncio.timeout(timeout_s):
            await decode.send(pb.RouterCommand(reserve=pb.Reserve(leg=leg)))
            ticket = await decode.event("ticket")
            await prefill.send(pb.RouterCommand(prefill=pb.Prefill(leg=leg, ticket=ticket.ticket)))
            await prefill.event("first")
            await decode.event("committed")
            while not any(step.token.finish_reason for step in (await decode.event("tokens")).tokens):
                pass
            await prefill.send(pb.RouterCommand(release=pb.Release(leg=ref)))
    except TimeoutError:
        raise ProbeFailed(f"{pair}: not done within {timeout_s:g} s") from None
    except ProbeFailed as error:
        raise ProbeFailed(f"{pair}: {error}") from None


async def wait_idle(member: Member, heartbeat_s: float, timeout_s: float, tls: PeerTLS | None) -> bool:
    """Wait until the worker holds no request, as two heartbeats in a row say. False: still busy after `timeout_s`."""
    quiet = 0
    try:
        async with asyncio.timeout(timeout_s), connect(member, heartbeat_s, timeout_s, tls) as probe:
            while quiet < 2:
                probe.changed.clear()
                await probe.changed.wait()
                load = probe.load
                if load is not None:
                    quiet = 0 if load.running or load.waiting or load.held_legs else quiet + 1
    except TimeoutError:
        return False
    except ProbeFailed:
        return True  # it has ended
    return True
