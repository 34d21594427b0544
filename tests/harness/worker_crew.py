"""A router played by the test over one prefill worker and several decode workers: legs that move between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from baton.decode_worker.params import DecodeParams
from baton.prefill_worker.params import PrefillParams
from baton.proto import worker_pb2 as pb
from baton.proto.leg import LegKey, key_of, ref_of

from .worker_rig import Session, WorkerProcess, session
from .worker_router import Answer


class Crew:
    """Sessions with all workers, and one command each."""

    def __init__(self, prefill: Session, decodes: Sequence[Session], workers: Sequence[WorkerProcess]) -> None:
        self.prefill = prefill
        self.decodes = decodes
        self.workers = workers

    async def reserve(self, leg: pb.Leg, decode: Session) -> bytes:
        """The ticket of a reservation."""
        await decode.send(pb.RouterCommand(reserve=pb.Reserve(leg=leg)))
        ticket: pb.Ticket = await self.news(decode, key_of(leg), "ticket")
        return ticket.ticket

    async def start(self, leg: pb.Leg, decode: Session) -> None:
        """Reserve, and send the prompt."""
        ticket = await self.reserve(leg, decode)
        await self.prefill.send(pb.RouterCommand(prefill=pb.Prefill(leg=leg, ticket=ticket)))

    async def hand_over(self, source: Session, leg: pb.Leg, ticket: bytes, held: LegKey) -> None:
        """What the source knows as `held` goes on as `leg`."""
        order = pb.Handover(leg=leg, ticket=ticket, held=ref_of(held))
        await source.send(pb.RouterCommand(handover=order))

    async def hold(self, decode: Session, key: LegKey, choice: int, answer: Answer) -> None:
        """Take a choice out of the batch; `answer` then has all that it said there."""
        await decode.send(pb.RouterCommand(hold=pb.Hold(leg=ref_of(key), choice=choice)))
        await decode.until(lambda: any(held.choice == choice for held in decode.of(key, "held")))
        self.take(decode, key, answer)

    async def cancel(self, side: Session, key: LegKey) -> None:
        """Forget the leg."""
        await side.send(pb.RouterCommand(cancel=pb.Cancel(leg=ref_of(key))))

    async def release(self, side: Session, key: LegKey) -> None:
        """The blocks are needed no more."""
        await side.send(pb.RouterCommand(release=pb.Release(leg=ref_of(key))))

    async def news(self, side: Session, key: LegKey, kind: str) -> Any:
        """The first event of this kind for the leg; AssertionError when the leg fails instead."""

        def found() -> list[Any]:
            failed = side.of(key, "failed")
            assert kind == "failed" or not failed, failed
            return side.of(key, kind)

        return (await side.until(found))[0]

    async def finish(self, leg: pb.Leg, source: Session, decode: Session, answer: Answer) -> None:
        """From the commit to the last token of every choice of the leg."""
        key = key_of(leg)
        await self.news(decode, key, "committed")
        await self.release(source, key)

        def over() -> bool:
            ended = {token.choice for token in decode.tokens(key) if token.finish_reason}
            return ended >= set(leg.choices)

        await decode.until(over)
        self.take(decode, key, answer)

    def take(self, side: Session, key: LegKey, answer: Answer) -> None:
        """What a worker has said of a leg so far."""
        for first in side.of(key, "first"):
            for token in first.tokens:
                answer.add(token)
        for token in side.tokens(key):
            answer.add(token)


def next_leg(leg: pb.Leg, attempt: int = 0, **changes: Any) -> pb.Leg:
    """The same leg under the next attempt, or this one."""
    made = pb.Leg()
    made.CopyFrom(leg)
    made.attempt = attempt or leg.attempt + 1
    for name, value in changes.items():
        getattr(made, name)[:] = value
    return made


def moved(leg: pb.Leg, choice: int, answer: Answer, attempt: int = 0) -> pb.Leg:
    """The leg of a choice that was held after it said what is in `answer`."""
    return next_leg(leg, attempt, choices=[choice], generated_token_ids=answer.ids(choice)[:-1])


@asynccontextmanager
async def crew(prefill: PrefillParams, *decode: DecodeParams) -> AsyncIterator[Crew]:
    """All workers and a session with each. When the block ends well all pools are empty (O-pool), then all ends."""
    workers = [WorkerProcess(prefill), *(WorkerProcess(params) for params in decode)]
    try:
        for worker in workers:
            await asyncio.to_thread(worker.wait_ready)
        async with AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(session(worker)) for worker in workers]
            yield Crew(sessions[0], sessions[1:], workers)
            for side in sessions:
                await side.wait_idle()
    finally:
        for worker in workers:
            await asyncio.to_thread(worker.stop)
    assert [worker.failure for worker in workers] == [None] * len(workers)
