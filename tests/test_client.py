"""baton.client: attempts before the first token only, several routers in turn, deadlines, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from baton.client.api import Client, request
from baton.client.errors import of_failure
from baton.client.retry import Retry
from baton.proto import baton_pb2 as api
from baton.proto.baton_pb2_grpc import BatonServicer, add_BatonServicer_to_server
from baton.proto.errors import DeadlineExceeded, Exhausted, InternalError, InvalidRequest, Unavailable
from baton.router.grpc_errors import abort
from baton.tests.harness.router_rig import CONTEXT, router_rig, until

RNG = random.Random(1)


# ---- the law -------------------------------------------------------------------------------------------------------


def test_what_may_succeed_later_is_tried_again_as_often_as_it_may_be() -> None:
    retry = Retry(attempts=3, first_wait_s=1.0, longest_wait_s=1.5)
    for failed, low, high in ((1, 0.5, 1.0), (2, 0.75, 1.5)):
        wait = retry.wait_s(failed, Unavailable("gone"), None, others=False, rng=RNG)
        assert wait is not None
        assert low <= wait <= high
    assert retry.wait_s(3, Unavailable("gone"), None, others=True, rng=RNG) is None
    assert retry.wait_s(1, InvalidRequest("bad"), None, others=True, rng=RNG) is None
    assert retry.wait_s(1, DeadlineExceeded("late"), None, others=True, rng=RNG) is None


def test_the_routers_hint_is_obeyed_unless_another_router_is_there_or_the_deadline_comes_first() -> None:
    retry, full = Retry(), Exhausted("full", retry_after_s=2.0)
    assert retry.wait_s(1, full, 3.0, others=False, rng=RNG) == 2.0
    assert retry.wait_s(1, full, 1.0, others=False, rng=RNG) is None
    assert retry.wait_s(1, full, 1.0, others=True, rng=RNG) == 0.0


def test_a_request_has_one_input() -> None:
    assert request("x", n=2) == api.GenerateRequest(prompt="x", n=2)
    assert request(token_ids=[1, 2]).token_ids.ids == [1, 2]
    assert request(token_ids=[]).WhichOneof("input") == "token_ids"
    assert request(messages=[{"role": "user", "content": "x"}]).messages.messages[0].content == "x"
    assert request("x", one_of=["a", "b"]).one_of.texts == ["a", "b"]
    with pytest.raises(ValueError, match="one of"):
        request("x", token_ids=[1])
    with pytest.raises(ValueError):
        Client()


# ---- routers that follow a script ------------------------------------------------------------------------------------


class _Scripted(BatonServicer):
    """Takes from `script` for each call: an exception to fail with, before a token or after some, or None to answer."""

    def __init__(self) -> None:
        self.script: list[tuple[int, Exception | None]] = []
        self.calls = 0
        self.left: list[float] = []
        self.running = 0

    async def Generate(self, request: api.GenerateRequest, context: Any) -> None:
        self.calls += 1
        self.left.append(context.time_remaining())
        tokens, error = self.script.pop(0) if self.script else (2, None)
        self.running += 1
        try:
            await context.write(api.GenerateResponse(accepted=api.Accepted(request_id=f"r{self.calls}")))
            for offset in range(tokens):
                chunk = api.TokenChunk(offset=offset, token_ids=[offset], text="ab"[offset % 2])
                await context.write(api.GenerateResponse(tokens=chunk))
            if isinstance(error, TimeoutError):
                await asyncio.sleep(20)
            if error is not None:
                await abort(context, error)  # type: ignore[arg-type]
            await context.write(api.GenerateResponse(finished=api.Finished(reason="length")))
        finally:
            self.running -= 1

    async def ListModels(self, request: api.ListModelsRequest, context: Any) -> api.ListModelsResponse:
        self.calls += 1
        _, error = self.script.pop(0) if self.script else (0, None)
        if error is not None:
            await abort(context, error)  # type: ignore[arg-type]
        return api.ListModelsResponse(models=[api.Model(name="m")])


@contextlib.asynccontextmanager
async def scripted(count: int = 1) -> AsyncIterator[tuple[list[_Scripted], list[str]]]:
    routers, addresses, servers = [], [], []
    for _ in range(count):
        router, server = _Scripted(), grpc.aio.server()
        add_BatonServicer_to_server(router, server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        routers.append(router)
        servers.append(server)
    try:
        yield routers, addresses
    finally:
        for server in servers:
            await server.stop(0)


async def test_attempts_end_at_the_first_token() -> None:
    async with scripted() as ((router,), addresses), Client(*addresses, retry=Retry(3, 0.01)) as client:
        router.script = [(0, Unavailable("draining")), (0, Exhausted("full", retry_after_s=0.02))]
        assert (await client.complete(request("x"))).choices[0].text == "ab"
        assert router.calls == 3
        router.script = [(1, Unavailable("lost"))]
        with pytest.raises(Unavailable, match="lost"):
            await client.complete(request("x"))
        assert router.calls == 4
        router.script = [(0, InvalidRequest("n: too many", field="n"))]
        with pytest.raises(InvalidRequest) as caught:
            await client.complete(request("x"))
        assert (caught.value.field, router.calls) == ("n", 5)
        router.script = [(0, Unavailable("starting")), (0, None)]
        assert [model.name for model in await client.models()] == ["m"]
        router.script = [(0, Unavailable("one")), (0, Unavailable("two")), (0, Unavailable("three"))]
        with pytest.raises(Unavailable, match="three"):
            await client.complete(request("x"))


async def test_calls_go_round_the_routers_and_past_one_that_is_gone() -> None:
    async with scripted(3) as (routers, addresses), Client(*addresses) as client:
        await asyncio.gather(*(client.complete(request("x")) for _ in range(9)))
        assert [router.calls for router in routers] == [3, 3, 3]
        routers[1].script = [(0, Unavailable("stopping", retry_after_s=30.0))] * 2
        for _ in range(6):
            assert (await client.complete(request("x"))).choices[0].finish_reason == "length"
        assert sum(router.calls for router in routers) == 9 + 6 + 2  # at once elsewhere: nobody waited 30 s
    async with scripted(1) as (_, addresses), Client("127.0.0.1:1", *addresses) as client:
        for _ in range(4):
            assert (await client.complete(request("x"))).request_id


async def test_a_router_that_is_not_serving_is_passed_by(tmp_path: Path) -> None:
    async with (
        router_rig(tmp_path / "a", "prefill-0", "decode-0") as one,
        router_rig(tmp_path / "b", "prefill-0", "decode-0") as other,
        Client(one.addresses["grpc"], other.addresses["grpc"]) as client,
    ):
        await client.wait_serving(30)
        for rig in (one, other):  # both are in turn
            while not await rig.metric("baton_requests_accepted_total"):
                await client.complete(request("x", max_tokens=2))
        await one.cluster.set_state("decode-0", "draining")

        async def passed_by() -> bool:
            before = [await rig.metric("baton_requests_accepted_total") for rig in (one, other)]
            for _ in range(4):
                await client.complete(request("x", max_tokens=2))
            after = [await rig.metric("baton_requests_accepted_total") for rig in (one, other)]
            return after == [before[0], before[1] + 4]

        await until(passed_by)  # health says so, soon


async def test_the_deadline_is_one_over_all_attempts() -> None:
    async with scripted() as ((router,), addresses), Client(*addresses, retry=Retry(5, 0.2)) as client:
        router.script = [(0, Unavailable("draining")), (1, TimeoutError())]
        with pytest.raises(DeadlineExceeded):
            await client.complete(request("x"), timeout_s=2.0)
        assert router.left[0] > router.left[1] > 0
        router.script = [(0, Exhausted("full", retry_after_s=30.0))]
        with pytest.raises(Exhausted):  # at once: the hint is later than the deadline
            await client.complete(request("x"), timeout_s=5.0)


async def test_leaving_a_stream_or_the_client_ends_the_call() -> None:
    async with scripted() as ((router,), addresses):
        async with Client(*addresses) as client:
            router.script = [(1, TimeoutError())]
            async with contextlib.aclosing(client.stream(request("x"))) as stream:  # type: ignore[type-var]
                async for message in stream:
                    if message.HasField("tokens"):
                        break
            await _until_idle(router)
            router.script = [(1, TimeoutError())]
            reading = asyncio.create_task(client.complete(request("x")))
            while not router.running:
                await asyncio.sleep(0.01)
        with pytest.raises((asyncio.CancelledError, InternalError, Unavailable)):
            await reading
        await _until_idle(router)


async def _until_idle(router: _Scripted) -> None:
    for _ in range(1000):
        if not router.running:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the call goes on")


async def test_every_call_against_a_router(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig, Client(rig.addresses["grpc"]) as client:
        assert [(model.name, model.max_model_len) for model in await client.models()] == [("tiny", CONTEXT)]
        ids = await client.tokenize("hello")
        assert await client.detokenize(ids) == "hello"
        turn = [{"role": "user", "content": "hi"}]
        said = [m async for m in client.chat(turn, api.GenerateRequest(max_tokens=2))]
        assert said[0].accepted.prompt_tokens == len(await client.tokenize(messages=turn))
        done: dict[int, str] = {}
        async for message in client.batch([request("x", max_tokens=1), request("", max_tokens=1)], parallelism=1):
            if message.HasField("failure"):
                done[message.index] = str(of_failure(message.failure))
            elif message.answer.HasField("finished"):
                done[message.index] = message.answer.finished.reason
        assert done == {0: "length", 1: "prompt: the prompt is empty"}
        with pytest.raises(InvalidRequest):
            await client.detokenize([-1])
