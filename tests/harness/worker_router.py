"""A router played by the test: legs on one pair of real workers, tokens in order, and the pools empty at the end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from baton.decode_worker.params import DecodeParams
from baton.prefill_worker.params import PrefillParams
from baton.proto import worker_pb2 as pb
from baton.proto.leg import LegKey, key_of, ref_of
from baton.proto.sampling import SamplingParams

from .worker_rig import Session, WorkerProcess, session

_ids = itertools.count(1)


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

    async def run_and_cancel(self, leg: pb.Leg, after_s: float) -> None:
        """One leg, cancelled on both sides after so many seconds, whatever it was doing."""
        task = asyncio.create_task(self.run(leg, Answer()))
        await asyncio.wait([task], timeout=after_s)
        cancel = pb.RouterCommand(cancel=pb.Cancel(leg=ref_of(key_of(leg))))
        await self.prefill.send(cancel)
        await self.decode.send(cancel, cancel)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.prefill.send(cancel)  # a prompt may have overtaken the first one
        await self.decode.send(cancel)

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
