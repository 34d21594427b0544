"""The OpenAI HTTP frontend end to end, over real sessions, with workers that follow a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from baton.proto import worker_pb2 as pb
from baton.tests.harness.loop_gaps import gaps
from baton.tests.harness.router_rig import CONTEXT, EOS_ID, RouterRig, router_rig, say, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        yield rig


async def post(rig: RouterRig, path: str, **body: Any) -> dict[str, Any]:
    response = await rig.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(rig: RouterRig, path: str, **body: Any) -> list[Any]:
    """The events of a stream, "[DONE]" included as a string."""
    found: list[Any] = []
    async with rig.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                data = line.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
    return found


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def messages(text: str = "hi") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_completion_whole(rig: RouterRig) -> None:
    answer = await post(rig, TEXT, model="tiny", prompt="abc")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_chat_whole(rig: RouterRig) -> None:
    answer = await post(rig, CHAT, messages=messages(), stop=["lo"])
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hel", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "lo")
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] == 5


async def test_chat_stream_shape(rig: RouterRig) -> None:
    *stream, done = await events(rig, CHAT, messages=messages(), stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert {(event["id"], event["created"], event["object"]) for event in stream} == {
        (stream[0]["id"], stream[0]["created"], "chat.completion.chunk")
    }
    *chunks, usage = stream
    deltas = [event["choices"][0]["delta"] for event in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[:-1]) == "hello"
    assert deltas[-1] == {}
    assert [event["choices"][0]["finish_reason"] for event in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(event["usage"] is None for event in chunks)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 6)


async def test_st_08_stream_equals_whole(rig: RouterRig) -> None:
    rig.cluster.script = say("aé€bcDEFGHIJklm §")
    for body in (
        {"stop": ["DEFGHIJ"]},
        {"stop": "€b"},
        {"stop": ["DEFGHIJ", "DEF"], "include_stop_str_in_output": True},
        {"stop": ["nothing like it", "klm §!"]},
        {"max_tokens": 3},
    ):
        whole = (await post(rig, TEXT, prompt="x", **({"max_tokens": 60} | body)))["choices"][0]
        *stream, _ = await events(rig, TEXT, prompt="x", **({"max_tokens": 60} | body))
        choices = [event["choices"][0] for event in stream]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert choices[-1]["finish_reason"] == whole["finish_reason"]


async def test_prompts_and_choices_are_numbered(rig: RouterRig) -> None:
    rig.cluster.script = lambda leg, choice, index: EOS_ID if index else ord("a") + choice + len(leg.prompt_token_ids)
    answer = await post(rig, TEXT, prompt=["", "x", "xx"][1:], n=2)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "b"),
        (1, "c"),
        (2, "c"),
        (3, "d"),
    ]
    assert answer["usage"]["prompt_tokens"] == 1 + 2
    assert answer["usage"]["completion_tokens"] == 8
    ids = await post(rig, TEXT, prompt=[[1, 2], [3]], return_token_ids=True)
    assert [choice["token_ids"] for choice in ids["choices"]] == [[99, EOS_ID], [98, EOS_ID]]
    stream = await events(rig, TEXT, prompt=[[1, 2], [3]])
    assert {event["choices"][0]["index"] for event in stream[:-1]} == {0, 1}
    assert (await post(rig, TEXT, prompt=[1, 2, 3]))["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_st_06_echo_without_logprobs_needs_nothing_of_the_workers(rig: RouterRig, stream: bool) -> None:
    prompt = "Say  it é"
    if stream:
        said = await events(rig, TEXT, prompt=prompt, echo=True)
        texts = [event["choices"][0]["text"] for event in said[:-1]]
    else:
        texts = [(await post(rig, TEXT, prompt=prompt, echo=True))["choices"][0]["text"]]
    assert "".join(texts) == prompt + "hello"
    ids = await post(rig, TEXT, prompt=[[65, 66], [67]], echo=True, n=2)
    assert [choice["text"] for choice in ids["choices"]] == ["ABhello", "ABhello", "Chello", "Chello"]


async def test_st_05_logprobs(rig: RouterRig) -> None:
    for k in (0, 1, 5, 20):
        answer = await post(rig, TEXT, prompt="x", logprobs=k)
        scores = answer["choices"][0]["logprobs"]
        assert scores["tokens"] == [*"hello", "<|end|>"]
        assert scores["token_logprobs"] == [-0.5 - index for index in range(6)]
        assert scores["text_offset"] == [0, 1, 2, 3, 4, 5]
        assert all(len(top) in (k, k + 1) for top in scores["top_logprobs"])
    chat = await post(rig, CHAT, messages=messages(), logprobs=True, top_logprobs=2)
    content = chat["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content[:2]] == [[ord("h")], [ord("e")]]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 6
    *stream, _ = await events(rig, CHAT, messages=messages(), logprobs=True)
    logprobs = [event["choices"][0]["logprobs"] for event in stream]
    assert [entry["token"] for part in logprobs if part for entry in part["content"]] == [*"hello", "<|end|>"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": 0, "n": 2, "stream": True}, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": 0, "logprobs": 1}, "max_tokens"),
        (TEXT, {"prompt": "x", "echo": True, "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        (CHAT, {"messages": messages(), "echo": True}, "echo"),
        (CHAT, {"messages": messages(), "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": messages(), "max_completion_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": messages(), "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": messages(), "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": messages(), "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": messages(), "response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"messages": messages(), "response_format": {"type": "json_schema"}}, "response_format"),
        (TEXT, {"prompt": "x", "guided_regex": "("}, "guided_regex"),
        (TEXT, {"prompt": "x", "guided_choice": [1]}, "guided_choice"),
        (TEXT, {"prompt": "x", "guided_json": {"type": "bogus"}}, "guided_json"),
        (TEXT, {"prompt": "x", "guided_json": {"const": "x" * 20_000}}, "guided_json"),
        (TEXT, {"prompt": "x", "guided_grammar": "root ::= missing"}, "guided_grammar"),
        (TEXT, {"prompt": "x", "structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        (TEXT, {"prompt": "x", "structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
        (TEXT, {"prompt": "x", "guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        (TEXT, {"prompt": "x", "guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        (TEXT, {"prompt": "x", "stream_interval": 0}, "stream_interval"),
        (TEXT, {"prompt": "x", "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHAT, {"messages": messages(), "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": messages(), "tools": [TOOL]}, "tools"),
        (CHAT, {"messages": messages(), "tools": [TOOL] * 17}, "tools"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": ["x", ""]}, "prompt"),
        (TEXT, {"prompt": ["x"] * 17}, "prompt"),
        (TEXT, {"prompt": [1, "x"]}, "prompt"),
        (TEXT, {"prompt": [320]}, "prompt"),
        (TEXT, {"prompt": "x" * CONTEXT}, "prompt"),
        (TEXT, {"prompt": "x" * 10**6}, "prompt"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": "x", "temperature": "hot"}, "temperature"),
        (TEXT, {"prompt": "x", "max_tokens": True}, "max_tokens"),
        (TEXT, {"prompt": "x", "best_of": 3}, "best_of"),
        (TEXT, {"prompt": "x", "beam_width": 3}, "beam_width"),
        (TEXT, {"prompt": "x", "logprobs": True}, "logprobs"),
        (TEXT, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        (TEXT, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ],
)
async def test_st_03_api_06_bad_fields_are_named(rig: RouterRig, path: str, body: dict[str, Any], param: str) -> None:
    response = await rig.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", "invalid_request")
    assert param in error["message"] or "messages" in error["message"]
    assert rig.cluster["prefill-0"].commands == []


async def test_what_routers_add_is_taken_at_its_default(rig: RouterRig) -> None:
    extras = {
        "no_stop_trim": False,
        "ignore_eos": False,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "include_reasoning": True,
        "return_hidden_states": False,
        "logprobs": False,
        "kv_transfer_params": None,
        "user": "me",
        "response_format": {"type": "text"},
    }
    assert (await post(rig, CHAT, messages=messages(), **extras))["choices"][0]["finish_reason"] == "stop"
    assert (await post(rig, TEXT, prompt="x", **extras))["choices"][0]["finish_reason"] == "stop"
    for name in ("no_stop_trim", "return_hidden_states"):
        response = await rig.http.post(TEXT, json={"prompt": "x", name: True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_other_errors_have_openais_shape(rig: RouterRig) -> None:
    for response, status in (
        (await rig.http.post(TEXT, json={"prompt": "x", "model": "gpt-7"}), 404),
        (await rig.http.get("/v1/nothing"), 404),
        (await rig.http.get(TEXT), 405),
        (await rig.http.post(TEXT, content=b"{nonsense"), 400),
        (await rig.http.post(TEXT, content=b"[" * 100_000), 400),
        (await rig.http.post(TEXT, content=b"[1]"), 400),
        (await rig.http.post(TEXT, content=b" " * (rig.params.limits.body_bytes + 1)), 413),
        (await rig.http.post(TEXT, content=b'{"prompt": "x", "temperature": NaN}'), 400),
        (await rig.http.post(TEXT, content=b'{"prompt": "\\ud800"}'), 400),
    ):
        assert response.status_code == status, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_what_is_not_served_here_says_what_is(rig: RouterRig) -> None:
    wrong = await rig.http.get(TEXT)
    error = wrong.json()["error"]
    assert (wrong.headers["allow"], error["type"]) == ("POST", "invalid_request_error")
    assert error["code"] == "method_not_allowed"
    unknown = (await rig.http.get("/v1/nothing")).json()["error"]
    assert (unknown["type"], unknown["code"]) == ("not_found_error", "not_found")


async def test_models_and_state(rig: RouterRig) -> None:
    (model,) = (await rig.http.get("/v1/models")).json()["data"]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("tiny", "baton", CONTEXT)
    for path in ("/health", "/ready", "/live", "/version", "/metrics"):
        assert (await rig.http.get(path)).status_code == 200
    assert (await rig.http.head("/metrics")).status_code == 200
    await rig.cluster.set_state("decode-0", "draining")
    await rig.not_ready()
    response = await rig.http.get("/health")
    assert response.json() == {"status": "not ready", "reason": "no decode worker is ready"}
    assert (await rig.http.get("/live")).status_code == 200
    refused = await rig.http.post(TEXT, json={"prompt": "x"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("stream", [True, False])
async def test_lc_14_a_client_that_leaves_cancels(rig: RouterRig, stream: bool) -> None:
    rig.cluster.script = lambda leg, choice, index: ord("a")
    rig.cluster["decode-0"].most_tokens = 3
    reader, writer = await asyncio.open_connection(*rig.addresses["http"].split(":"))
    body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": stream}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    if stream:
        await reader.readuntil(b"data: ")
    else:
        await until(lambda: rig.cluster["decode-0"].held)
    writer.close()
    await writer.wait_closed()
    await rig.cluster.settled()
    assert await rig.metric("baton_requests_cancelled_total") == 1


async def test_survives_an_http2_preface(rig: RouterRig) -> None:
    reader, writer = await asyncio.open_connection(*rig.addresses["http"].split(":"))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 4")
    writer.close()
    await writer.wait_closed()
    assert (await rig.http.get("/live")).status_code == 200


async def test_api_04_a_huge_prompt_delays_nobody(rig: RouterRig) -> None:
    rig.cluster.script = lambda leg, choice, index: ord("a")
    rig.cluster["decode-0"].step_s = 0.01
    async with gaps() as found:
        streams = [asyncio.create_task(rig.generate(prompt="x", max_tokens=40)) for _ in range(8)]
        under = await rig.http.post(TEXT, json={"prompt": "word " * (200 * 1024)})  # tokenised, then refused
        over = await rig.http.post(TEXT, json={"prompt": "word " * (1 << 20)})  # 5 MB, refused before that
        await asyncio.gather(*streams)
    assert "tokens; the context of" in under.json()["error"]["message"]
    assert "bytes of text" in over.json()["error"]["message"]
    assert found.worst_s < 1.25


async def test_a_body_that_never_comes_whole_is_ended(
    rig: RouterRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("baton.router.http_body._BODY_S", 0.3)
    host, port = rig.addresses["http"].split(":")
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head)
    assert b"504" in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    _, leaver = await asyncio.open_connection(host, int(port))
    leaver.write(head)
    await leaver.drain()
    leaver.close()
    await asyncio.sleep(0.5)
    assert "Traceback" not in caplog.text
    await post(rig, TEXT, prompt="x")


async def test_text_to_ids_and_back(rig: RouterRig) -> None:
    answer = (
        await rig.http.post("/tokenize", json={"model": "tiny", "prompt": "abé", "return_token_strs": True})
    ).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == CONTEXT
    back = await rig.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "abé"}
    chat = (await rig.http.post("/tokenize", json={"messages": messages()})).json()
    assert chat["count"] == (await post(rig, CHAT, messages=messages()))["usage"]["prompt_tokens"]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": messages()}, "prompt"),
        ("/tokenize", {"prompt": "x" * (2 << 20)}, "prompt"),
        ("/detokenize", {"tokens": [320]}, "token_ids"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ):
        refused = await rig.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_the_document_names_every_path_that_is_served(rig: RouterRig) -> None:
    document = (await rig.http.get("/openapi.json")).json()
    served = {"/v1/completions", CHAT, "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize", "/v1/batches"}
    assert served <= set(document["paths"])
    assert "frequency_penalty" in document["components"]["schemas"]["ChatRequest"]["properties"]
    assert (await rig.http.get("/v1/models/tiny")).json()["id"] == "tiny"
    for path in ("/v1/models/other", "/v1/embeddings", "/v1/responses"):
        missing = await (rig.http.get(path) if "models" in path else rig.http.post(path, json={}))
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "not_found_error"


async def test_usage_in_every_event(rig: RouterRig) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    said = await events(rig, TEXT, prompt="abc", stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in said[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == said[-2]["usage"]["completion_tokens"] == 6
    assert {event["usage"]["prompt_tokens"] for event in said[:-1]} == {3}


async def test_api_07_150_slow_streams_run_side_by_side(rig: RouterRig) -> None:
    """No pool or queue on the way caps how many streams are open: all have begun before any has ended."""
    go_on = asyncio.Event()
    worker = rig.cluster["decode-0"]
    decode = worker.on_decode

    async def held(leg: pb.Leg) -> None:
        await go_on.wait()
        await decode(leg)

    worker.on_decode = held
    begun = 0

    async def stream() -> str:
        nonlocal begun
        limits = httpx.Limits(max_connections=None)
        http = httpx.AsyncClient(base_url=rig.http.base_url, timeout=60, limits=limits, verify=False)
        async with http, http.stream("POST", TEXT, json={"prompt": "x", "stream": True}) as response:
            lines = response.aiter_lines()
            first = await anext(lines)
            begun += 1
            return "\n".join([first, *[line async for line in lines]])

    streams = [asyncio.create_task(stream()) for _ in range(150)]
    for _ in range(1000):
        if begun == 150:
            break
        await asyncio.sleep(0.02)
    assert begun == 150
    go_on.set()
    assert all(text.rstrip().endswith("[DONE]") for text in await asyncio.gather(*streams))
