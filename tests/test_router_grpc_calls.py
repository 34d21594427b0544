"""The other calls of baton.v1, rich errors, and the services beside it, over real sessions with scripted workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
from baton.proto import baton_pb2 as api
from baton.proto import worker_pb2 as pb
from baton.router.params import GrpcParams
from baton.tests.harness.router_rig import CONTEXT, EOS_ID, RouterRig, ref_of, router_rig, until
from google.rpc import error_details_pb2, status_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

TURN = api.Message(role="user", content="hi")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path_factory.mktemp("router"), "prefill-0", "decode-0") as rig:
        yield rig


pytestmark = pytest.mark.asyncio(loop_scope="module")


def details(error: grpc.aio.AioRpcError) -> tuple[status_pb2.Status, dict[str, Any]]:
    """The google.rpc.Status of a failed call, and its details by name."""
    (raw,) = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    status = status_pb2.Status.FromString(raw)
    found: dict[str, Any] = {}
    for detail in status.details:
        kind = getattr(error_details_pb2, detail.TypeName().rpartition(".")[2])()
        assert detail.Unpack(kind)
        found[type(kind).__name__] = kind
    return status, found


async def failed(call: Any) -> grpc.aio.AioRpcError:
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    pytest.fail("the call succeeded")


async def batch_of(rig: RouterRig, request: api.GenerateBatchRequest, **more: Any) -> list[api.GenerateBatchResponse]:
    return [message async for message in rig.stub.GenerateBatch(request, timeout=20, **more)]


# ---- Chat, Tokenize, Detokenize ------------------------------------------------------------------------------------


async def test_a_chat_is_a_generate_call_with_messages(rig: RouterRig) -> None:
    parameters = api.GenerateRequest(max_tokens=3)
    said = [m async for m in rig.stub.Chat(api.ChatRequest(messages=[TURN], parameters=parameters))]
    ids = (await rig.stub.Tokenize(api.TokenizeRequest(messages=api.Messages(messages=[TURN])))).token_ids
    assert said[0].accepted.prompt_tokens == len(ids) > 10
    assert "".join(m.tokens.text for m in said) == "hel"
    assert said[-1].finished.reason == "length"


async def test_a_chat_names_what_is_wrong(rig: RouterRig) -> None:
    for request, field in (
        (api.ChatRequest(), "messages"),
        (api.ChatRequest(messages=[TURN], parameters=api.GenerateRequest(prompt="x")), "parameters"),
        (api.ChatRequest(messages=[TURN], parameters=api.GenerateRequest(max_tokens=0)), "max_tokens"),
        (api.ChatRequest(messages=[TURN] * 65), "messages"),
    ):
        error = await failed(rig.stub.Chat(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(error)[1]["BadRequest"].field_violations[0].field == field


async def test_tokenize_and_detokenize_are_inverse(rig: RouterRig) -> None:
    text = "héllo, 世界"
    answer = await rig.stub.Tokenize(api.TokenizeRequest(prompt=text))
    assert (len(answer.token_ids) <= len(text.encode()), answer.max_model_len) == (True, CONTEXT)
    back = await rig.stub.Detokenize(api.DetokenizeRequest(token_ids=answer.token_ids))
    assert back.text == text
    long = await rig.stub.Tokenize(api.TokenizeRequest(prompt="xy" * CONTEXT))  # longer than any request may be
    assert len(long.token_ids) == 2 * CONTEXT
    special = [*b"a", EOS_ID]
    whole = await rig.stub.Detokenize(api.DetokenizeRequest(token_ids=special))
    plain = await rig.stub.Detokenize(api.DetokenizeRequest(token_ids=special, skip_special=True))
    assert (whole.text != "a", plain.text) == (True, "a")


async def test_tokenize_and_detokenize_name_what_is_wrong(rig: RouterRig) -> None:
    for call, field in (
        (rig.stub.Tokenize(api.TokenizeRequest()), "prompt"),
        (rig.stub.Tokenize(api.TokenizeRequest(prompt="")), "prompt"),
        (rig.stub.Tokenize(api.TokenizeRequest(prompt="x" * (1 << 20) + "x")), "prompt"),
        (rig.stub.Tokenize(api.TokenizeRequest(messages=api.Messages())), "messages"),
        (rig.stub.Detokenize(api.DetokenizeRequest(token_ids=[320])), "token_ids"),
        (rig.stub.Detokenize(api.DetokenizeRequest(token_ids=[-1])), "token_ids"),
        (rig.stub.Detokenize(api.DetokenizeRequest(token_ids=[1] * ((1 << 20) + 1))), "token_ids"),
    ):
        error = await failed(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(error)[1]["BadRequest"].field_violations[0].field == field


# ---- GenerateBatch -------------------------------------------------------------------------------------------------


async def test_a_batch_answers_every_request_and_one_failure_ends_no_other(rig: RouterRig) -> None:
    requests = [api.GenerateRequest(prompt="x", max_tokens=tokens) for tokens in (1, 2, 0, 3)]
    said = await batch_of(rig, api.GenerateBatchRequest(requests=requests))
    texts = dict.fromkeys(range(4), "")
    for message in said:
        texts[message.index] += message.answer.tokens.text
    assert texts == {0: "h", 1: "he", 2: "", 3: "hel"}
    (bad,) = [message for message in said if message.WhichOneof("event") == "failure"]
    assert (bad.index, bad.failure.code, bad.failure.field, bad.failure.status) == (
        2,
        "invalid_request",
        "max_tokens",
        3,
    )
    for index in (0, 1, 3):
        kinds = [m.answer.WhichOneof("event") for m in said if m.index == index]
        assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("accepted", "finished", {"tokens"})


async def test_a_batch_runs_as_many_at_a_time_as_it_may(rig: RouterRig) -> None:
    requests = [api.GenerateRequest(prompt="x", max_tokens=3)] * 9
    running = most = 0
    async for message in rig.stub.GenerateBatch(api.GenerateBatchRequest(requests=requests, parallelism=2)):
        kind = message.answer.WhichOneof("event")
        running += (kind == "accepted") - (kind == "finished")
        most = max(most, running)
    assert (running, most) == (0, 2)


async def test_a_batch_waits_for_a_router_that_is_full(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0", max_inflight=1) as small:
        requests = [api.GenerateRequest(prompt="x", max_tokens=2)] * 3
        said = await batch_of(small, api.GenerateBatchRequest(requests=requests))
        assert [m.failure.code for m in said if m.WhichOneof("event") == "failure"] == []
        assert sum(m.answer.WhichOneof("event") == "finished" for m in said) == 3


async def test_bad_batches_are_refused_whole(rig: RouterRig) -> None:
    one = api.GenerateRequest(prompt="x")
    for request, field in (
        (api.GenerateBatchRequest(requests=[one] * 65), "requests"),
        (api.GenerateBatchRequest(requests=[one], parallelism=0), "parallelism"),
        (api.GenerateBatchRequest(requests=[one], parallelism=9), "parallelism"),
        (api.GenerateBatchRequest(requests=[one, api.GenerateRequest(stop=["a"] * 5)]), "requests[1].stop"),
    ):
        error = await failed(rig.stub.GenerateBatch(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(error)[1]["BadRequest"].field_violations[0].field == field
    assert await batch_of(rig, api.GenerateBatchRequest()) == []


async def test_api_01_a_batch_that_is_left_ends_all_its_requests(rig: RouterRig) -> None:
    decode = rig.cluster["decode-0"]
    script, decode.most_tokens = rig.cluster.script, 3
    rig.cluster.script = lambda leg, choice, index: ord("a")
    cancelled = await rig.metric("baton_requests_cancelled_total")
    accepted = await rig.metric("baton_requests_accepted_total")
    requests = [api.GenerateRequest(prompt="x", max_tokens=200)] * 12
    call = rig.stub.GenerateBatch(api.GenerateBatchRequest(requests=requests, parallelism=4))
    async for message in call:
        if message.answer.HasField("tokens"):
            break
    await rig.counts("baton_requests_accepted_total", accepted + 4)
    call.cancel()
    await rig.cluster.settled()
    decode.most_tokens, rig.cluster.script = math.inf, script
    ended = await rig.metric("baton_requests_cancelled_total") - cancelled
    assert ended == await rig.metric("baton_requests_accepted_total") - accepted == 4
    await rig.reconcile()


async def test_api_10_the_deadline_of_a_batch_is_that_of_its_requests(rig: RouterRig) -> None:
    """Its requests end with the call, or, when the router's clock is the first, each with the same error."""
    prefill = rig.cluster["prefill-0"]

    async def hang(leg: Any, ticket: bytes) -> None:
        await asyncio.Event().wait()

    prefill.on_prefill = hang
    prefill.deadlines.clear()
    try:
        requests = [api.GenerateRequest(prompt="x")] * 3
        call = rig.stub.GenerateBatch(api.GenerateBatchRequest(requests=requests, parallelism=2), timeout=1.0)
        codes = []
        try:
            async for message in call:
                codes += [message.failure.code] if message.HasField("failure") else []
        except grpc.aio.AioRpcError as error:
            codes.append(error.code().name.lower())
        assert set(codes) == {"deadline_exceeded"}
        assert prefill.deadlines
        assert all(0 <= left < 1.1 for left in prefill.deadlines)  # gRPC rounds what is left up
        await rig.cluster.settled()
    finally:
        prefill.on_prefill = prefill.prefill


# ---- stream_interval -----------------------------------------------------------------------------------------------


async def test_stream_interval_is_the_tokens_of_a_message(rig: RouterRig) -> None:
    decode = rig.cluster["decode-0"]
    script, decode.most_tokens = rig.cluster.script, 0
    rig.cluster.script = lambda leg, choice, index: ord("a")
    try:
        sizes = []
        async for message in rig.stub.Generate(api.GenerateRequest(prompt="x", max_tokens=10, stream_interval=4)):
            if message.HasField("tokens"):
                sizes.append((message.tokens.offset, len(message.tokens.token_ids)))
                decode.most_tokens = math.inf  # the others come when the first is here
        assert sizes[0] == (0, 1)  # the first at once
        assert [at for at, _ in sizes] == [sum(size for _, size in sizes[:index]) for index in range(len(sizes))]
        assert all(size >= 4 for _, size in sizes[1:-1])  # a reader that is late is given more
        assert sum(size for _, size in sizes) == 10
    finally:
        decode.most_tokens, rig.cluster.script = math.inf, script
    for wrong in (0, -1, 1025):
        error = await failed(rig.stub.Generate(api.GenerateRequest(prompt="x", stream_interval=wrong)))
        assert details(error)[1]["BadRequest"].field_violations[0].field == "stream_interval"


async def test_st_06_prompt_logprobs_that_come_behind_the_answer(
    rig: RouterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode's messages may overtake prefill's, and end the request, before the prompt's scores are there."""
    monkeypatch.setattr("baton.router.live.SCORES_S", 20.0)
    prefill = rig.cluster["prefill-0"]

    async def late(leg: pb.Leg, ticket: bytes) -> None:
        await rig.cluster["prefill-0"].hand_over(leg, ticket)
        await asyncio.sleep(0.3)
        scores = [pb.PromptScore(logprob=-1.0 - at) for at in range(len(leg.prompt_token_ids) - 1)]
        prefill.emit(prompt_scores=pb.PromptScores(leg=ref_of(leg), start=1, scores=scores))

    prefill.on_prefill = late
    try:
        request = api.GenerateRequest(token_ids=api.TokenIds(ids=[1, 2, 3]), max_tokens=3, prompt_logprobs=0)
        said = [message async for message in rig.stub.Generate(request, timeout=30)]
    finally:
        prefill.on_prefill = prefill.prefill
    kinds = [message.WhichOneof("event") for message in said]
    assert (kinds[:2], kinds[-1], kinds.count("prompt")) == (["accepted", "prompt"], "finished", 1)
    assert [score.logprob for score in said[1].prompt.logprobs] == [-1.0, -2.0]


# ---- rich errors ---------------------------------------------------------------------------------------------------


async def test_an_invalid_field_is_a_field_violation(rig: RouterRig) -> None:
    error = await failed(rig.stub.Generate(api.GenerateRequest(prompt="x", top_p=2)))
    status, found = details(error)
    assert (status.code, status.message) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], error.details())
    assert (found["ErrorInfo"].reason, found["ErrorInfo"].domain) == ("INVALID_REQUEST", "baton")
    (violation,) = found["BadRequest"].field_violations
    assert violation.field == "top_p"
    assert "(0, 1]" in violation.description
    assert "RetryInfo" not in found


async def test_a_full_router_says_when_to_come_again(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0", max_inflight=1) as small:
        small.cluster["decode-0"].most_tokens = 2
        running = small.stub.Generate(api.GenerateRequest(prompt="x"))
        await running.read()
        error = await failed(small.stub.Generate(api.GenerateRequest(prompt="x")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        found = details(error)[1]
        delay = found["RetryInfo"].retry_delay.ToTimedelta().total_seconds()
        assert 0 < delay < 60
        assert int(dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"]) == int(1000 * delay)
        assert found["ErrorInfo"].reason == "EXHAUSTED"
        small.cluster["decode-0"].most_tokens = math.inf
        while await running.read() is not grpc.aio.EOF:
            pass
        channel = grpc.insecure_channel(small.addresses["grpc"])  # what grpcio-status itself makes of it
        with channel:
            call = channel.unary_stream(
                "/baton.v1.Baton/Generate",
                request_serializer=api.GenerateRequest.SerializeToString,
                response_deserializer=api.GenerateResponse.FromString,
            )(api.GenerateRequest(prompt=""))
            with pytest.raises(grpc.RpcError):
                await asyncio.to_thread(list, call)
            assert rpc_status.from_call(call).code == 3


async def test_a_router_that_stops_says_so_before_it_refuses(tmp_path: Path) -> None:
    """NOT_SERVING while requests are still served, then UNAVAILABLE for new ones while those that run end."""
    async with router_rig(tmp_path, "prefill-0", "decode-0", lame_duck_s=2.0) as leaving:
        leaving.cluster["decode-0"].most_tokens = 2
        stub: Any = health_pb2_grpc.HealthStub(leaving.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        leaving.stop.set()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        running = leaving.stub.Generate(api.GenerateRequest(prompt="x", max_tokens=5))
        accepted: Any = await running.read()
        assert accepted.HasField("accepted")
        errors: list[grpc.aio.AioRpcError] = []

        async def refused() -> bool:
            try:
                await leaving.generate(prompt="x", max_tokens=1)
            except grpc.aio.AioRpcError as error:
                errors.append(error)
            return bool(errors)

        await until(refused)
        (error,) = errors
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert {"ErrorInfo", "RetryInfo"} == set(details(error)[1])
        leaving.cluster["decode-0"].most_tokens = math.inf
        last: Any = None
        while (message := await running.read()) is not grpc.aio.EOF:
            last = message
        assert last.finished.reason == "length"
        watch.cancel()


# ---- beside it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_knows_every_service_and_message(rig: RouterRig, version: str) -> None:
    call = rig.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.Baton"),
    ]
    listed, found = [reply async for reply in call(iter(asked))]
    names = {service.name for service in listed.list_services_response.service}
    assert {
        "baton.v1.Baton",
        "grpc.health.v1.Health",
        "grpc.channelz.v1.Channelz",
    } <= names
    assert found.file_descriptor_response.file_descriptor_proto


async def test_channelz_sees_the_calls(rig: RouterRig) -> None:
    stub: Any = channelz_pb2_grpc.ChannelzStub(cast(Any, rig.channel))
    await rig.generate(prompt="x", max_tokens=1)
    servers = (await stub.GetServers(channelz_pb2.GetServersRequest())).server
    assert sum(server.data.calls_started for server in servers) > 0


async def test_reflection_and_channelz_can_be_switched_off(tmp_path: Path) -> None:
    closed = GrpcParams(30.0, 10.0, 0.5, None, 100, reflection=False, channelz=False, open_inference=False)
    async with router_rig(tmp_path, grpc=closed) as quiet:
        stub: Any = channelz_pb2_grpc.ChannelzStub(cast(Any, quiet.channel))
        error = await failed(stub.GetServers(channelz_pb2.GetServersRequest()))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        for version in ("v1alpha", "v1"):
            call: Any = quiet.channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
            assert (await failed(call(iter([b""])))).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_connection_that_is_old_enough_is_made_anew(tmp_path: Path) -> None:
    """max_connection_age: the server asks for it, and the client's next call does not notice."""
    young = GrpcParams(30.0, 10.0, 0.5, 0.2, 100, reflection=False, channelz=True, open_inference=False)
    async with router_rig(tmp_path, "prefill-0", "decode-0", grpc=young) as rig:
        stub: Any = channelz_pb2_grpc.ChannelzStub(cast(Any, rig.channel))

        async def socket() -> int:
            newest = 0
            for server in (await stub.GetServers(channelz_pb2.GetServersRequest())).server:
                request = channelz_pb2.GetServerSocketsRequest(server_id=server.ref.server_id)
                refs = (await stub.GetServerSockets(request)).socket_ref
                newest = max([newest, *(ref.socket_id for ref in refs)])
            return newest

        first = await socket()

        async def newer() -> bool:
            return await socket() > first

        await until(newer)
        assert (await rig.generate(prompt="x", max_tokens=2)).ids
