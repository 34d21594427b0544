"""The worker's end of Worker.Session: who is let in, what is written when, and how a session ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from baton.proto import worker_pb2 as pb
from baton.proto.session_server import MAX_PENDING_PREFIXES, SERVER_OPTIONS, SessionParams, SessionServer
from baton.proto.worker_pb2_grpc import WorkerStub, add_WorkerServicer_to_server

WELCOME = pb.Welcome(worker_id="decode-0", incarnation="b")
CANCEL = pb.RouterCommand(cancel=pb.Cancel(leg=pb.LegRef(request_id="q")))


def hello(worker: str = "decode-0", incarnation: str = "b") -> pb.RouterCommand:
    return pb.RouterCommand(hello=pb.Hello(router_id="r", worker_id=worker, worker_incarnation=incarnation))


def committed(name: str) -> pb.WorkerEvent:
    return pb.WorkerEvent(committed=pb.Committed(leg=pb.LegRef(request_id=name)))


class Served:
    """A server, and what it told its worker."""

    def __init__(self, heartbeat_s: float, dead_after_s: float) -> None:
        self.commands: list[tuple[int, str | None]] = []
        self.ended: list[int] = []
        self.changed = asyncio.Event()
        params = SessionParams(heartbeat_s, dead_after_s, None)
        self.service = SessionServer(params, WELCOME, self._on_commands, self._on_end)
        self.port = 0

    def _on_commands(self, session: int, commands: Sequence[pb.RouterCommand]) -> None:
        self.commands += [(session, command.WhichOneof("command")) for command in commands]
        self.changed.set()

    def _on_end(self, session: int) -> None:
        self.ended.append(session)
        self.changed.set()

    async def until_ended(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.ended) < count:
                self.changed.clear()
                await self.changed.wait()

    @asynccontextmanager
    async def call(self, *commands: pb.RouterCommand) -> AsyncIterator[Any]:
        """A router's stream whose first message has these commands."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            call: Any = WorkerStub(channel).Session()
            await call.write(pb.RouterMessage(commands=commands))
            yield call
            call.cancel()


@asynccontextmanager
async def served(heartbeat_s: float = 0.05, dead_after_s: float = 5.0) -> AsyncIterator[Served]:
    made = Served(heartbeat_s, dead_after_s)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_WorkerServicer_to_server(made.service, server)
    made.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield made
    finally:
        await server.stop(0)


async def test_welcome_comes_first_and_commands_beside_hello_are_heard() -> None:
    async with served() as made, made.call(hello(), CANCEL) as call:
        first = await call.read()
        assert [event.WhichOneof("event") for event in first.events] == ["welcome"]
        assert first.events[0].welcome == WELCOME
        await call.write(pb.RouterMessage(commands=[CANCEL, CANCEL]))
        async with asyncio.timeout(20):
            while len(made.commands) < 3:
                await asyncio.sleep(0.01)
        assert made.commands == [(1, "cancel")] * 3


@pytest.mark.parametrize(
    ("commands", "text"),
    [
        ([hello(incarnation="a")], "this is decode-0 incarnation b, not decode-0 incarnation a"),
        ([hello(worker="decode-1")], "not decode-1"),
        ([CANCEL], "begins with Hello"),
        ([], "begins with Hello"),
    ],
)
async def test_a_stranger_is_refused(commands: list[pb.RouterCommand], text: str) -> None:
    async with served() as made, made.call(*commands) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert text in str(caught.value.details())
        assert made.service.sessions == []
        assert made.ended == []


async def test_a_router_that_says_nothing_at_all_is_not_waited_for() -> None:
    async with served(dead_after_s=0.2) as made:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{made.port}") as channel:
            call: Any = WorkerStub(channel).Session()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_all_events_of_one_turn_travel_in_one_message() -> None:
    async with served(heartbeat_s=10) as made, made.call(hello()) as call:
        await call.read()
        made.service.deliver({1: [committed("a"), committed("b")]}, pb.Load(steps=1))
        made.service.deliver({1: [committed("c")], 7: [committed("nobody")]}, pb.Load(steps=2))
        message = await call.read()
        assert [event.committed.leg.request_id for event in message.events] == ["a", "b", "c"]
        assert message.load.steps == 2


def prefixes(sequence: int, blocks: int, *, snapshot: bool = False) -> pb.WorkerEvent:
    changes = pb.PrefixChanges(sequence=sequence, snapshot=snapshot, added=range(blocks))
    return pb.WorkerEvent(prefixes=changes)


async def test_a_router_that_does_not_read_misses_prefixes_but_no_other_event_and_no_snapshot() -> None:
    many = MAX_PENDING_PREFIXES // 2 + 1
    async with served(heartbeat_s=10) as made, made.call(hello()) as call:
        await call.read()
        made.service.deliver({1: [prefixes(1, many), prefixes(2, many), committed("a"), prefixes(3, 1)]}, pb.Load())
        made.service.deliver({1: [prefixes(3, 9, snapshot=True)]}, pb.Load())
        message = await call.read()
        said = [(event.prefixes.sequence, event.prefixes.snapshot) for event in message.events]
        assert said == [(1, False), (0, False), (3, True)]
        assert message.events[1].committed.leg.request_id == "a"
        made.service.deliver({1: [prefixes(4, many)]}, pb.Load())
        assert [event.prefixes.sequence for event in (await call.read()).events] == [4]


async def test_heartbeats_carry_the_load() -> None:
    async with served(heartbeat_s=0.02) as made, made.call(hello()) as call:
        await call.read()
        made.service.deliver({}, pb.Load(steps=9))
        async with asyncio.timeout(20):
            while (await call.read()).load.steps != 9:
                pass


async def test_a_session_that_begins_during_a_step_hears_of_the_load_at_once() -> None:
    """An empty load would say that the worker is idle: a drain would stop it, and its requests."""
    async with served(heartbeat_s=10) as made:
        made.service.deliver({}, pb.Load(running=3, used_blocks=7))
        async with made.call(hello()) as call:
            first = await call.read()
            assert (first.load.running, first.load.used_blocks) == (3, 7)


async def test_events_go_to_their_own_session() -> None:
    async with served(heartbeat_s=10) as made, made.call(hello()) as one:
        await one.read()  # session 1
        async with made.call(hello()) as two:
            await two.read()
            made.service.deliver({2: [committed("two")], 1: [committed("one")]}, pb.Load())
            assert [event.committed.leg.request_id for event in (await one.read()).events] == ["one"]
            assert [event.committed.leg.request_id for event in (await two.read()).events] == ["two"]


async def test_a_closed_stream_ends_the_session_once() -> None:
    async with served() as made:
        async with made.call(hello()) as call:
            await call.read()
            assert made.service.sessions == [1]
        await made.until_ended(1)
        async with made.call(hello()) as call:
            await call.read()
            await call.done_writing()
            await made.until_ended(2)
        assert made.ended == [1, 2]
        assert made.service.sessions == []


async def test_a_silent_router_loses_its_session() -> None:
    async with served(heartbeat_s=0.05, dead_after_s=0.3) as made, made.call(hello()) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read_to_the_end(call)
        assert (caught.value.code(), made.ended) == (grpc.StatusCode.UNAVAILABLE, [1])
        assert "was silent for 0.3 s" in str(caught.value.details())


async def _read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_heartbeats_keep_a_session_alive() -> None:
    async with served(heartbeat_s=0.05, dead_after_s=0.8) as made, made.call(hello()) as call:
        for _ in range(16):
            await asyncio.sleep(0.1)
            await call.write(pb.RouterMessage())
        assert made.service.sessions == [1]


async def test_flush_waits_until_everything_is_handed_over() -> None:
    async with served(heartbeat_s=10) as made, made.call(hello()) as call:
        await call.read()
        made.service.deliver({1: [committed("last words")]}, pb.Load())
        await made.service.flush(20.0)
        assert len((await call.read()).events) == 1
