"""The `openai` package against a server: `python with_openai.py http://127.0.0.1:8000/v1`."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import Literal

import openai
from pydantic import BaseModel

URL = sys.argv[1]
MESSAGES = [{"role": "user", "content": "Say something."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["unit", "days"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    kind: Literal["adult", "child"]
    tall: bool


def refused(kind, param, call, **arguments) -> None:
    """The call fails with this kind of error, which names the parameter."""
    found = None
    try:
        call(**arguments)
    except kind as error:
        found = error.param
    assert found == param, (found, param)


def models(client: openai.OpenAI) -> str:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    refused(openai.NotFoundError, "model", client.chat.completions.create, model="another", messages=MESSAGES)
    return model.id


def completions(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=["abc", "def"], max_tokens=5, n=2, seed=3, logprobs=2, echo=True, stop=["\n"]
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith("abc")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    parts = client.completions.create(
        model=model, prompt=[1, 2, 3], max_tokens=8, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "min_p": 0.01, "top_k": 40, "stream_interval": 2, "repetition_penalty": 1.1},
    )  # fmt: skip
    *said, last = parts
    assert last.usage.completion_tokens == 8
    assert sum(len(part.choices[0].text) for part in said) > 0
    hot = {"model": model, "prompt": "x", "temperature": 99}
    refused(openai.BadRequestError, "temperature", client.completions.create, **hot)


def chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=6, logprobs=True, top_logprobs=3, temperature=0,
        frequency_penalty=0.2, presence_penalty=0.1, logit_bias={"65": 2}, user="me", metadata={"a": "b"},
    )  # fmt: skip
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    text = ""
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, max_tokens=6, temperature=0, frequency_penalty=0.2, presence_penalty=0.1,
        logit_bias={"65": 2},
    ) as stream:  # fmt: skip
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
    assert text == answer.choices[0].message.content


def structured(client: openai.OpenAI, model: str) -> None:
    parsed = client.chat.completions.parse(model=model, messages=MESSAGES, response_format=Person, max_tokens=80)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    guided = client.chat.completions.create(
        model=model, messages=MESSAGES, extra_body={"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}
    )
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", guided.choices[0].message.content)


def tools(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "messages": MESSAGES, "tools": [TOOL], "max_tokens": 120}
    named = {"type": "function", "function": {"name": "weather"}}
    (call,) = client.chat.completions.create(**ask, tool_choice=named).choices[0].message.tool_calls
    check_call(call)
    with client.chat.completions.stream(**ask, tool_choice="required", parallel_tool_calls=False) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    (call,) = final.choices[0].message.tool_calls
    check_call(call)
    talk = [*MESSAGES, final.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "mild"}]
    assert client.chat.completions.create(**{**ask, "messages": talk, "max_tokens": 4}).choices


def check_call(call) -> None:
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["unit"] in "CF"
    assert 1 <= arguments["days"] <= 9


def batches(client: openai.OpenAI, model: str) -> None:
    lines = [
        {"custom_id": f"q{n}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": model, "messages": MESSAGES, "max_tokens": 4}}
        for n in range(20)
    ]  # fmt: skip
    text = "\n".join(map(json.dumps, lines)).encode()
    source = client.files.create(file=("in.jsonl", text), purpose="batch")
    batch = client.batches.create(
        input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"k": "v"}
    )
    for _ in range(300):
        batch = client.batches.retrieve(batch.id)
        if batch.status == "completed":
            break
        time.sleep(0.1)
    assert batch.request_counts.completed == 20, batch
    answers = client.files.content(batch.output_file_id).text.splitlines()
    assert {json.loads(line)["custom_id"] for line in answers} == {f"q{n}" for n in range(20)}
    assert batch.id in [one.id for one in client.batches.list()]
    assert client.files.delete(source.id).deleted


async def many(model: str) -> None:
    """32 at once, half of them streams, some left in the middle."""
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:

        async def whole(n: int) -> None:
            answer = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=20, seed=n)
            assert answer.choices[0].finish_reason in ("stop", "length")

        async def stream(n: int) -> None:
            parts = await client.chat.completions.create(
                model=model, messages=MESSAGES, max_tokens=60, seed=n, stream=True, extra_body={"ignore_eos": True}
            )
            seen = 0
            async for _ in parts:
                seen += 1
                if n % 4 == 1 and seen == 3:
                    await parts.close()
                    return
            assert seen > 20

        await asyncio.gather(*((stream if n % 2 else whole)(n) for n in range(32)))


def main() -> None:
    client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
    model = models(client)
    for check in (completions, chat, structured, tools, batches):
        check(client, model)
        print(f"openai {openai.__version__}: {check.__name__} ok", flush=True)
    asyncio.run(many(model))
    print("openai: async ok")


main()
