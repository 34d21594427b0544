"""The gRPC frontend end to end, over real sessions, with workers that follow a script."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from baton.proto import baton_pb2 as api
from baton.router.errors import AddressTaken
from baton.tests.harness.router_rig import CONTEXT, EOS_ID, RouterRig, router_rig, say
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        yield rig


async def refused(rig: RouterRig, **fields: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.generate(**fields)
    return caught.value


async def test_a_stream_of_text_ids_usage_and_timing(rig: RouterRig) -> None:
    answer = await rig.generate(prompt="abc", max_tokens=20)
    assert answer.texts == {0: "hello"}
    assert answer.ids == {0: [*b"hello", EOS_ID]}
    assert answer.reasons == {0: "stop"}
    last = answer.finished[-1]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (3, 6, 3)
    timing = last.timing
    assert (timing.prefill_worker, timing.decode_worker) == ("prefill-0", "decode-0")
    assert (timing.kv_bytes, timing.kv_frames, timing.attempts, timing.preemptions) == (1000, 2, 1, 0)
    assert 0 < timing.ttft_s <= timing.total_s


async def test_messages_go_through_the_template_and_ids_do_not(rig: RouterRig) -> None:
    chat = api.Messages(messages=[api.Message(role="user", content="hi")])
    assert (await rig.generate(messages=chat)).prompt_tokens > 10
    assert (await rig.generate(token_ids=api.TokenIds(ids=[1, 2, 3]))).prompt_tokens == 3


async def test_every_choice_gets_its_index_and_the_usage_is_one_sum(rig: RouterRig) -> None:
    rig.cluster.script = lambda leg, choice, index: EOS_ID if index > choice else ord("a") + choice
    answer = await rig.generate(prompt="x", n=3)
    assert answer.texts == {0: "a", 1: "bb", 2: "ccc"}
    assert [finished.HasField("usage") for finished in answer.finished] == [False, False, True]
    assert answer.finished[-1].usage.completion_tokens == 2 + 3 + 4


async def test_st_02_exact_counts_and_no_decode_worker_for_one_token(rig: RouterRig) -> None:
    for wanted in (1, 2, 3):
        answer = await rig.generate(prompt="x", max_tokens=wanted)
        assert answer.ids == {0: list(b"hello"[:wanted])}
        assert answer.reasons == {0: "length"}
        assert answer.finished[-1].usage.completion_tokens == wanted
        assert bool(rig.cluster["decode-0"].commands) == (wanted > 1)
    edge = await rig.generate(token_ids=api.TokenIds(ids=[1] * (CONTEXT - 1)))
    assert edge.ids == {0: [ord("h")]}


async def test_st_01_first_token_eos_needs_no_decode_news(rig: RouterRig) -> None:
    rig.cluster.script = say("")
    answer = await rig.generate(prompt="x", max_tokens=9)
    assert (answer.ids, answer.reasons, answer.texts) == ({0: [EOS_ID]}, {0: "stop"}, {0: ""})


async def test_st_01_stop_string_on_the_first_token_cancels_both(rig: RouterRig) -> None:
    answer = await rig.generate(prompt="x", stop=["h"])
    assert (answer.texts, answer.reasons, answer.ids) == ({0: ""}, {0: "stop"}, {0: [ord("h")]})
    assert answer.finished[0].matched_stop == "h"


async def test_st_08_stop_over_the_seam_of_prefill_and_decode(rig: RouterRig) -> None:
    answer = await rig.generate(prompt="x", stop=["hel"])
    assert (answer.texts, answer.reasons) == ({0: ""}, {0: "stop"})
    assert answer.finished[0].usage.completion_tokens == 3
    kept = await rig.generate(prompt="x", stop=["hel"], include_stop=True)
    assert kept.texts == {0: "hel"}


@pytest.mark.parametrize("top", [0, 1, 5, 20])
async def test_st_05_logprobs_of_every_token_the_first_included(rig: RouterRig, top: int) -> None:
    scores: dict[int, list[api.TokenLogprobs]] = {0: [], 1: []}
    ids: dict[int, list[int]] = {0: [], 1: []}
    async for message in rig.stub.Generate(api.GenerateRequest(prompt="x", n=2, logprobs=top)):
        if message.HasField("tokens"):
            scores[message.tokens.choice] += message.tokens.logprobs
            ids[message.tokens.choice] += message.tokens.token_ids
    for choice in (0, 1):
        assert len(scores[choice]) == len(ids[choice]) == 6
        assert [round(score.logprob, 3) for score in scores[choice]] == [-0.5 - index for index in range(6)]
        assert all(len(score.top) == top for score in scores[choice])


async def test_st_03_max_tokens_zero_is_refused_by_name(rig: RouterRig) -> None:
    for fields in ({}, {"n": 2}, {"logprobs": 1}):
        for _ in range(10):
            error = await refused(rig, prompt="x", max_tokens=0, **fields)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "max_tokens" in (error.details() or "")
    assert rig.cluster["prefill-0"].commands == []


async def test_st_04_length_fields_reach_the_workers_as_given(rig: RouterRig) -> None:
    legs = []

    async def look(leg: Any, ticket: bytes) -> None:
        legs.append(leg.sampling)
        await rig.cluster["prefill-0"].prefill(leg, ticket)

    rig.cluster["prefill-0"].on_prefill = look
    for fields in ({"max_tokens": 4}, {"min_tokens": 2}, {"max_tokens": 5, "min_tokens": 5}, {}):
        await rig.generate(prompt="x", ignore_eos=True, **fields)
    assert [(sampling.max_tokens, sampling.min_tokens) for sampling in legs] == [
        (4, 0),
        (CONTEXT - 1, 2),
        (5, 5),
        (CONTEXT - 1, 0),
    ]


async def test_api_06_bad_prompts_name_field_and_numbers(rig: RouterRig) -> None:
    for fields, words in (
        ({"prompt": ""}, "prompt: the prompt is empty"),
        ({}, "exactly one"),
        ({"token_ids": api.TokenIds()}, "no tokens"),
        ({"prompt": "x" * CONTEXT}, f"{CONTEXT} tokens; the context of {CONTEXT}"),
        ({"prompt": "x" * 10**6}, "1000000 tokens"),
        ({"prompt": "xx", "max_tokens": CONTEXT}, f"2 prompt tokens + {CONTEXT} max_tokens"),
        ({"token_ids": api.TokenIds(ids=[320])}, "token id 320 is outside the vocabulary"),
        ({"token_ids": api.TokenIds(ids=[-1])}, "token id -1"),
    ):
        error = await refused(rig, **fields)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in (error.details() or "")
        assert dict(error.trailing_metadata() or ())["baton-code"] == "invalid_request"
    assert (await rig.generate(prompt=" ")).reasons == {0: "stop"}
    assert await rig.metric("baton_rejections_total", reason="invalid_request") == 8
    assert await rig.metric("baton_requests_accepted_total") == 1


async def test_request_id_is_in_the_metadata(rig: RouterRig) -> None:
    call = rig.stub.Generate(api.GenerateRequest(prompt="x", request_id="mine"))
    first = await call.read()
    assert isinstance(first, api.GenerateResponse)
    initial = dict(await call.initial_metadata())
    assert initial["x-request-id"] == first.accepted.request_id != "mine"
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_api_10_deadline_reaches_every_leg_and_ends_it(rig: RouterRig) -> None:
    prefill, decode = rig.cluster["prefill-0"], rig.cluster["decode-0"]

    async def hang(leg: Any, ticket: bytes) -> None:
        await asyncio.Event().wait()

    prefill.on_prefill = hang
    start = asyncio.get_running_loop().time()
    error = None
    try:
        await rig.generate(prompt="x", timeout=0.3)
    except grpc.aio.AioRpcError as caught:
        error = caught
    assert error is not None
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert asyncio.get_running_loop().time() - start < 15  # prefill hangs for ever
    assert all(0 <= left < 0.4 for left in prefill.deadlines + decode.deadlines)
    await rig.cluster.settled()


async def test_api_01_cancelled_streams_stop_their_workers(rig: RouterRig) -> None:
    rig.cluster.script = lambda leg, choice, index: ord("a")
    rig.cluster["decode-0"].most_tokens = 3

    async def leave_after_one() -> None:
        call = rig.stub.Generate(api.GenerateRequest(prompt="x", max_tokens=200))
        async for message in call:
            if message.HasField("tokens"):
                break
        call.cancel()

    await asyncio.gather(*(leave_after_one() for _ in range(32)))
    await rig.cluster.settled()
    rig.cluster["decode-0"].most_tokens = math.inf
    await rig.reconcile()
    assert await rig.metric("baton_requests_cancelled_total") == 32
    assert (await rig.generate(prompt="x", max_tokens=2)).ids == {0: [97, 97]}


async def wait_for_health(rig: RouterRig, service: str, wanted: int) -> None:
    """Follows Health.Watch until the service has the wanted status."""
    watch = rig.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )(health_pb2.HealthCheckRequest(service=service), timeout=20)
    async for update in watch:
        if update.status == wanted:
            break
    watch.cancel()


async def test_models_health_and_reflection(rig: RouterRig) -> None:
    models = (await rig.stub.ListModels(api.ListModelsRequest())).models
    assert [(model.name, model.max_model_len) for model in models] == [("tiny", CONTEXT)]
    for service in ("", "baton.v1.Baton"):
        await wait_for_health(rig, service, health_pb2.HealthCheckResponse.SERVING)
    call = rig.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    async for reply in call:
        names = {service.name for service in reply.list_services_response.service}
        assert {"baton.v1.Baton", "grpc.health.v1.Health"} <= names


async def test_health_follows_the_workers(rig: RouterRig) -> None:
    await wait_for_health(rig, "", health_pb2.HealthCheckResponse.SERVING)
    await rig.cluster.set_state("decode-0", "draining")
    await wait_for_health(rig, "", health_pb2.HealthCheckResponse.NOT_SERVING)


async def test_a_taken_port_is_an_error_that_names_it(rig: RouterRig, tmp_path: Path) -> None:
    for key in ("grpc", "http"):
        taken = rig.addresses[key]
        with pytest.raises(AddressTaken, match=f"router.{key}: cannot listen on {taken}"):
            async with router_rig(tmp_path / key, **{f"{key}_address": taken}):
                pass


async def test_starting_without_workers_is_unavailable(tmp_path: Path) -> None:
    async with router_rig(tmp_path) as rig:
        error = await refused(rig, prompt="x")
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "grpc-retry-pushback-ms" in dict(error.trailing_metadata() or ())


async def test_too_many_in_flight_is_exhausted(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0", max_inflight=2) as rig:
        rig.cluster["decode-0"].most_tokens = 2
        first = [asyncio.create_task(rig.generate(prompt="x")) for _ in range(2)]
        await rig.counts("baton_router_inflight_requests", 2)
        error = await refused(rig, prompt="x")
        rig.cluster["decode-0"].most_tokens = math.inf
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await asyncio.gather(*first)
