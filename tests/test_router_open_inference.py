"""The Open Inference Protocol in front of scripted workers, over the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from baton.proto import open_inference_pb2 as oip
from baton.proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from baton.tests.harness.router_rig import RouterRig, router_rig

pytestmark = pytest.mark.asyncio(loop_scope="module")
Tensor = oip.ModelInferRequest.InferInputTensor


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path_factory.mktemp("router"), "prefill-0", "decode-0") as rig:
        yield rig


def text(value: bytes = b"x") -> Any:
    contents = oip.InferTensorContents(bytes_contents=[value])
    return Tensor(name="text_input", datatype="BYTES", shape=[1], contents=contents)


def infer(*inputs: Any, model: str = "tiny", raw: list[bytes] | None = None, **parameters: Any) -> Any:
    request = oip.ModelInferRequest(model_name=model, id="mine", inputs=inputs, raw_input_contents=raw or [])
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def said(answer: oip.ModelInferResponse) -> tuple[bytes, bytes]:
    assert [tensor.name for tensor in answer.outputs] == ["text_output", "finish_reason"]
    if answer.raw_output_contents:
        one, other = answer.raw_output_contents
        return one[4:], other[4:]
    one, other = (tensor.contents.bytes_contents[0] for tensor in answer.outputs)
    return one, other


async def test_a_prompt_and_its_answer(rig: RouterRig) -> None:
    stub = GRPCInferenceServiceStub(rig.channel)
    answer = await stub.ModelInfer(infer(text(), max_tokens=3, temperature=0.5, stop="zz"))
    assert (said(answer), answer.id, answer.model_name) == ((b"hel", b"length"), "mine", "tiny")
    bare = Tensor(name="text_input", datatype="BYTES", shape=[1])
    raw = await stub.ModelInfer(infer(bare, raw=[b"\x01\0\0\0x"], max_tokens=9))
    assert raw.raw_output_contents[0] == b"\x05\0\0\0hello"
    assert said(raw) == (b"hello", b"stop")


async def test_a_stream_of_two_prompts_and_a_failure_between_them(rig: RouterRig) -> None:
    stub = GRPCInferenceServiceStub(rig.channel)
    switch = Tensor(
        name="streaming", datatype="BOOL", shape=[1], contents=oip.InferTensorContents(bool_contents=[True])
    )
    asked = [infer(text(), switch, max_tokens=3), infer(text(b"")), infer(text(), max_tokens=2)]
    answers = [answer async for answer in stub.ModelStreamInfer(iter(asked))]
    finals = [a.infer_response.parameters["triton_final_response"].bool_param for a in answers]
    failure = finals.index(True) + 1
    assert b"".join(said(a.infer_response)[0] for a in answers[:failure]) == b"hel"
    assert len(answers) > 4  # the first one came in pieces
    assert "the prompt is empty" in answers[failure].error_message
    assert [said(a.infer_response) for a in answers[failure + 1 :]] == [(b"he", b"length")]


async def test_what_the_server_says_of_itself(rig: RouterRig) -> None:
    stub = GRPCInferenceServiceStub(rig.channel)
    assert (await stub.ServerLive(oip.ServerLiveRequest())).live
    assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
    assert (await stub.ModelReady(oip.ModelReadyRequest(name="tiny"))).ready
    assert not (await stub.ModelReady(oip.ModelReadyRequest(name="other"))).ready
    assert (await stub.ServerMetadata(oip.ServerMetadataRequest())).name == "baton"
    model = await stub.ModelMetadata(oip.ModelMetadataRequest(name="tiny"))
    assert [(t.name, t.datatype) for t in model.inputs] == [("text_input", "BYTES"), ("streaming", "BOOL")]


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        (infer(text(), model="other"), grpc.StatusCode.NOT_FOUND, "'other' is not served"),
        (infer(), grpc.StatusCode.INVALID_ARGUMENT, "text_input: the tensor is missing"),
        (infer(text(), text()), grpc.StatusCode.INVALID_ARGUMENT, "text_input: must be one"),
        (infer(text(b"\xff")), grpc.StatusCode.INVALID_ARGUMENT, "not valid UTF-8"),
        (infer(text(), max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        (infer(text(), max_tokens="many"), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        (infer(text(), n=2), grpc.StatusCode.INVALID_ARGUMENT, "'n' is not known"),
        (infer(text(), nonsense=1), grpc.StatusCode.INVALID_ARGUMENT, "'nonsense' is not known"),
        (infer(Tensor(name="image")), grpc.StatusCode.INVALID_ARGUMENT, "no tensor 'image'"),
        (infer(text(), raw=[b"\x09\0\0\0x"]), grpc.StatusCode.INVALID_ARGUMENT, "not one element"),
        (infer(text(), raw=[b"\0\0\0\0"]), grpc.StatusCode.INVALID_ARGUMENT, "the prompt is empty"),
        (
            infer(text(), Tensor(name="streaming", datatype="BOOL", shape=[1]), raw=[b"\x01\0\0\0x"]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "streaming: the tensor's contents",
        ),
    ],
)
async def test_bad_requests_name_the_tensor_or_parameter(
    rig: RouterRig, request_: Any, status: grpc.StatusCode, words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await GRPCInferenceServiceStub(rig.channel).ModelInfer(request_)
    assert (caught.value.code(), words in (caught.value.details() or "")) == (status, True), caught.value.details()
