"""The Open Inference Protocol over HTTP in front of scripted workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from baton.tests.harness.router_rig import RouterRig, router_rig, say

pytestmark = pytest.mark.asyncio(loop_scope="module")
INFER = "/v2/models/tiny/infer"
LENGTH = "inference-header-content-length"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path_factory.mktemp("router"), "prefill-0", "decode-0") as rig:
        yield rig


def text(data: Any = ("x",), **fields: Any) -> dict[str, Any]:
    return {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": data, **fields}


def said(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    assert all((one["datatype"], one["shape"]) == ("BYTES", [1]) for one in answer.json()["outputs"])
    return {one["name"]: one["data"][0] for one in answer.json()["outputs"]}


async def test_a_prompt_and_its_answer(rig: RouterRig) -> None:
    parameters = {"max_tokens": 3, "temperature": 0.5, "stop": ["zz", "yy"]}
    answer = await rig.http.post(INFER, json={"id": "mine", "inputs": [text()], "parameters": parameters})
    assert said(answer) == {"text_output": "hel", "finish_reason": "length"}
    assert {key: answer.json()[key] for key in ("id", "model_name", "model_version")} == {
        "id": "mine", "model_name": "tiny", "model_version": "1"}  # fmt: skip
    assert answer.headers["x-request-id"].startswith("req-")
    nested = {"inputs": [text([["x"]], shape=[1, 1])], "outputs": [{"name": "finish_reason"}]}
    assert said(await rig.http.post("/v2/models/tiny/versions/1/infer", json=nested)) == {"finish_reason": "stop"}


async def test_binary_tensors_as_tritons_client_sends_them(rig: RouterRig) -> None:
    switch = {"name": "streaming", "shape": [1], "datatype": "BOOL", "parameters": {"binary_data_size": 1}}
    prompt = text(parameters={"binary_data_size": 5})
    del prompt["data"]
    head = json.dumps({"inputs": [prompt, switch], "parameters": {"binary_data_output": True}}).encode()
    body = head + b"\x01\0\0\0x" + b"\0"
    answer = await rig.http.post(INFER, content=body, headers={LENGTH: str(len(head))})
    size = int(answer.headers[LENGTH])
    outputs = json.loads(answer.content[:size])["outputs"]
    assert [one["parameters"]["binary_data_size"] for one in outputs] == [9, 8]
    assert answer.content[size:] == b"\x05\0\0\0hello" + b"\x04\0\0\0stop"
    for length in (len(head) + 99, -1, len(head) - 1):
        wrong = await rig.http.post(INFER, content=body, headers={LENGTH: str(length)})
        assert wrong.status_code == 400, wrong.text


async def test_generate_and_its_stream(rig: RouterRig) -> None:
    asked = {"text_input": "x", "max_tokens": 4, "parameters": {"temperature": 0}}
    whole = (await rig.http.post("/v2/models/tiny/generate", json=asked)).json()
    assert (whole["text_output"], whole["finish_reason"], whole["model_name"]) == ("hell", "length", "tiny")
    events = []
    async with rig.http.stream("POST", "/v2/models/tiny/generate_stream", json=asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) async for line in answer.aiter_lines() if line]
    assert len(events) > 2
    assert "".join(one["text_output"] for one in events) == "hell"
    assert [one["finish_reason"] for one in events if one["finish_reason"]] == ["length"]


async def test_a_client_that_leaves_cancels_and_a_failure_is_said_in_the_stream(rig: RouterRig) -> None:
    rig.cluster.script = say("x" * 200)
    rig.cluster["decode-0"].step_s = 0.02
    try:
        before = await rig.metric("baton_requests_cancelled_total")
        async with rig.http.stream("POST", "/v2/models/tiny/generate_stream", json={"text_input": "x"}) as answer:
            await anext(answer.aiter_lines())
        await rig.cluster.settled()
        assert await rig.metric("baton_requests_cancelled_total") == before + 1
        lines: list[dict[str, Any]] = []
        async with rig.http.stream("POST", "/v2/models/tiny/generate_stream", json={"text_input": "x"}) as answer:
            async for line in answer.aiter_lines():
                if not lines:
                    (leg,) = rig.cluster["decode-0"].held.values()
                    rig.cluster["decode-0"].fail(leg, "internal")
                lines += [json.loads(line[6:])] if line else []
        assert set(lines[-1]) == {"error"}
        assert not any(one.get("finish_reason") for one in lines)
    finally:
        rig.cluster.script = say("hello")
        rig.cluster["decode-0"].step_s = 0.002


async def test_what_the_server_says_of_itself(rig: RouterRig) -> None:
    http = rig.http
    assert (await http.get("/v2")).json()["name"] == "baton"
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready", "/v2/models/tiny/versions/1/ready"):
        assert (await http.get(path)).status_code == 200, path
    for path in ("/v2/models/other", "/v2/models/other/ready", "/v2/models/tiny/versions/2/ready"):
        answer = await http.get(path)
        assert (answer.status_code, "is not served here" in answer.json()["error"]) == (404, True), path
    model = (await http.get("/v2/models/tiny")).json()
    assert [(one["name"], one["datatype"]) for one in model["inputs"]] == [
        ("text_input", "BYTES"), ("streaming", "BOOL")]  # fmt: skip
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert paths["/v2/models/{model}/infer"]["post"]["parameters"][0]["schema"] == {"enum": ["tiny"]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"inputs": []}, "text_input: the tensor is missing"),
        ({"inputs": [text(), text()]}, "text_input: must be one"),
        ({"inputs": [text(datatype="INT32")]}, "text_input: must be one"),
        ({"inputs": [text(shape=[2])]}, "text_input: must be one"),
        ({"inputs": [text([3])]}, "not one element"),
        ({"inputs": [text(["a", "b"])]}, "not one element"),
        ({"inputs": [text(parameters={"binary_data_size": 3})]}, "not so many bytes"),
        ({"inputs": [text(), {"name": "streaming", "shape": [1], "datatype": "BOOL", "data": [True]}]}, "not stream"),
        ({"inputs": [text(more=1)]}, "unknown field more"),
        ({"inputs": 5}, "inputs: must be a list"),
        ({"inputs": [text()], "outputs": [{"name": "logits"}]}, "no tensor 'logits'"),
        ({"inputs": [text()], "parameters": 3}, "parameters: must be an object"),
        ({"inputs": [text()], "parameters": {"max_tokens": 0}}, "max_tokens"),
        ({"inputs": [text()], "parameters": {"max_tokens": "many"}}, "max_tokens"),
        ({"inputs": [text()], "parameters": {"one_of": 1}}, "one_of"),
        ({"inputs": [text()], "parameters": {"n": 2}}, "'n' is not known"),
        ({"inputs": [text()], "id": 5}, "id: must be a text"),
        ({"inputs": [text([""])]}, "the prompt is empty"),
        ({"image": 1}, "image: unknown field"),
        ([1], "must be a JSON object"),
    ],
)
async def test_bad_requests_name_the_tensor_or_parameter(rig: RouterRig, body: Any, words: str) -> None:
    answer = await rig.http.post(INFER, json=body)
    assert (answer.status_code, words in answer.json()["error"]) == (400, True), answer.text


async def test_both_services_answer_alike(rig: RouterRig) -> None:
    """One core: what HTTP says is what the own gRPC service says."""
    own = await rig.generate(prompt="x", max_tokens=4, temperature=0.0, stop=["l"])
    body = {"inputs": [text()], "parameters": {"max_tokens": 4, "temperature": 0.0, "stop": "l"}}
    assert said(await rig.http.post(INFER, json=body))["text_output"] == own.texts[0]
