"""The whole cluster through HTTP: constrained answers, tools, prompt logprobs. Two decode ranks that speculate, with
small pools; after every test O-live, O-pool, O-acct."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.oracles import Reference
from baton.tests.harness.rig import Rig, merged, running, tiny_config
from baton.tests.harness.tiny_model import EOS, special_id, write_tiny_model
from baton.text import grammar

END = special_id(EOS)
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}"
    " Answer with <tool_call>{...}</tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"unit": {"$ref": "#/$defs/unit"}}, "required": ["unit"],
        "additionalProperties": False, "$defs": {"unit": {"enum": ["C", "F"]}}}}},
    {"type": "function", "function": {"name": "now", "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}},
]  # fmt: skip
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("openai") / "tools")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    changes = {
        "pools.decode.memory": 128 * 2048,
        "pools.prefill.memory": 128 * 2048,
        "pools.decode.tensor_parallel": 2,
        "engine.speculation": {"method": "prompt_lookup", "max_tokens": 4},
        "model.name": "tiny",
    }
    with running(tmp_path_factory.mktemp("cluster"), merged(tiny_config(model), changes)) as rig:
        yield rig


@pytest.fixture
def rig(cluster: Rig) -> Iterator[Rig]:
    yield cluster
    cluster.quiesce()


def post(rig: Rig, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(rig.http + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json())


def events(rig: Rig, path: str, **body: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", rig.http + path, json={**body, "stream": True}, timeout=60) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines
    return [json.loads(line) for line in lines[:-1]]


def ask(text: str = "hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


# ---- constraints -----------------------------------------------------------------------------------------------------


def test_constrained_answers_parse_and_are_those_of_one_engine(rig: Rig, model: Path) -> None:
    """Token 1 from prefill, the rest from decode with two ranks and speculation, two choices each, all at once."""
    regex = "(ab|cd){3,9}[0-9]{2}"
    kinds: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
         grammar.from_schema(SCHEMA, "x")),
        ({"guided_regex": regex}, grammar.from_regex(regex)),
        ({"structured_outputs": {"choice": ["yes", "no", "maybe"]}}, grammar.from_choices(["yes", "no", "maybe"], "x")),
        ({"guided_grammar": 'start: "a" ("b" | "c" start)'}, grammar.from_text('start: "a" ("b" | "c" start)', "x")),
    ]  # fmt: skip
    jobs = [(number, *kind) for number in range(3) for kind in kinds]
    base = {"max_tokens": 60, "n": 2, "return_token_ids": True}

    def run(job: tuple[int, dict[str, Any], str]) -> dict[str, Any]:
        number, extra, _ = job
        return post(rig, TEXT, prompt=[number, 7, 9], seed=number, temperature=number / 2, **base, **extra)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(run, jobs))
    alone = Monolithic(model)
    stopped = 0
    for (number, extra, text), answer in zip(jobs, answers, strict=True):
        expected = alone.run(
            [number, 7, 9], seed=number, temperature=number / 2, max_tokens=60, n=2, grammar=text,
            stop_token_ids=frozenset({END}),
        )  # fmt: skip
        for choice, right in zip(answer["choices"], expected, strict=True):
            assert choice["token_ids"] == right.token_ids, extra
            if choice["finish_reason"] == "stop":
                stopped += 1
                check(extra, choice["text"], regex)
    assert stopped > 16


def check(extra: dict[str, Any], text: str, regex: str) -> None:
    if "response_format" in extra:
        value = json.loads(text)
        assert set(value) == {"name", "age"}
        assert 0 <= value["age"] <= 99
    elif "guided_regex" in extra:
        assert re.fullmatch(regex, text)
    elif "guided_grammar" in extra:
        assert re.fullmatch("(ac)*ab", text)
    else:
        assert text in ("yes", "no", "maybe")


def test_a_stream_under_a_grammar_is_the_whole_answer(rig: Rig) -> None:
    body = {"messages": ask(), "guided_regex": "x{3}y{4}", "temperature": 0, "stream_interval": 3}
    whole = post(rig, CHAT, **body)["choices"][0]
    assert whole["message"]["content"] == "xxxyyyy"
    assert whole["finish_reason"] == "stop"
    parts = [event["choices"][0]["delta"].get("content", "") for event in events(rig, CHAT, **body)]
    assert "".join(parts) == "xxxyyyy"
    assert len([part for part in parts if part]) <= 4


# ---- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_required_tools_are_called(rig: Rig, stream: bool) -> None:
    body: dict[str, Any] = {"messages": ask(), "tools": TOOLS, "temperature": 0.8, "max_tokens": 150}
    for seed in range(4):
        made = calls(rig, stream, seed=seed, tool_choice="required", **body)
        assert made
        for call in made:
            arguments = json.loads(call["arguments"])
            assert arguments == {} if call["name"] == "now" else arguments["unit"] in ("C", "F")
    named = {"type": "function", "function": {"name": "weather"}}
    (call,) = calls(rig, stream, seed=1, tool_choice=named, **body)
    assert call["name"] == "weather"
    (call,) = calls(rig, stream, seed=1, tool_choice="required", parallel_tool_calls=False, **body)


def calls(rig: Rig, stream: bool, **body: Any) -> list[dict[str, str]]:
    if not stream:
        choice = post(rig, CHAT, **body)["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert all(call["id"] and call["type"] == "function" for call in choice["message"]["tool_calls"])
        return [call["function"] for call in choice["message"]["tool_calls"]]
    made: list[dict[str, str]] = []
    said = events(rig, CHAT, **body)
    for event in said:
        for part in event["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(made)
                made.append({"name": part["function"]["name"], "arguments": ""})
            made[part["index"]]["arguments"] += part["function"]["arguments"]
    assert said[-1]["choices"][0]["finish_reason"] == "tool_calls"
    return made


def test_tool_messages_reach_the_template(rig: Rig) -> None:
    plain = post(rig, CHAT, messages=ask(), max_tokens=1, tools=TOOLS, tool_choice="none")
    tools = post(rig, CHAT, messages=ask(), max_tokens=1, tools=TOOLS)
    assert tools["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    called = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    talk = [
        *ask(),
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    assert post(rig, CHAT, messages=talk, max_tokens=1, tools=TOOLS)["usage"]["prompt_tokens"] > 100
    called["function"] = {"name": "now", "arguments": "{"}
    bad = httpx.post(rig.http + CHAT, json={"messages": talk, "tools": TOOLS}, timeout=60)
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "messages"


# ---- prompt logprobs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model, frozenset({END}))


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_st_06_echo_with_logprobs(rig: Rig, reference: Reference, logprobs: int) -> None:
    """Of 100 tokens, in two chunks, with the prompt in the prefix cache and not; entry t is log p(t | before t)."""
    prompt = [(7 * i * i + logprobs) % 256 for i in range(100)]
    truth = reference.logprobs(prompt)
    for _ in range(2):
        answer = post(rig, TEXT, prompt=prompt, echo=True, logprobs=logprobs, max_tokens=3, temperature=0)
        scores = answer["choices"][0]["logprobs"]
        assert len(scores["tokens"]) == len(scores["token_logprobs"]) == 100 + answer["usage"]["completion_tokens"]
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        for position in range(1, 100):
            row = truth[position - 1]
            assert scores["token_logprobs"][position] == pytest.approx(float(row[prompt[position]]), abs=1e-4)
            best = sorted(scores["top_logprobs"][position].values(), reverse=True)[:logprobs]
            assert best == pytest.approx(row.topk(logprobs).values.tolist(), abs=1e-4)
        assert scores["text_offset"] == [sum(map(len, scores["tokens"][:i])) for i in range(len(scores["tokens"]))]


def test_st_03_scoring_alone(rig: Rig, reference: Reference) -> None:
    """max_tokens 0 with echo: the prompt's scores and no token, whole and as a stream, for several prompts."""
    prompts = [list(b"The river"), list(b"carries water")]
    for _ in range(10):
        answer = post(rig, TEXT, prompt=prompts, echo=True, logprobs=1, max_tokens=0, n=2)
        assert [choice["text"] for choice in answer["choices"]] == ["The river"] * 2 + ["carries water"] * 2
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["prompt_tokens"] == 22
        assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [9, 9, 13, 13]
    said = events(rig, TEXT, prompt=prompts[0], echo=True, logprobs=1, max_tokens=0)
    assert said[0]["choices"][0]["text"] == "The river"
    assert said[-1]["choices"][0]["finish_reason"] == "length"
    truth = reference.logprobs(prompts[0])
    last = said[0]["choices"][0]["logprobs"]["token_logprobs"][-1]
    assert last == pytest.approx(float(truth[-2][prompts[0][-1]]), abs=1e-4)
    refused = httpx.post(rig.http + TEXT, json={"prompt": "x", "max_tokens": 0}, timeout=60)
    assert refused.status_code == 400


def test_prompt_logprobs_as_vllm_shows_them(rig: Rig) -> None:
    answer = post(rig, CHAT, messages=ask("abc"), prompt_logprobs=2, max_tokens=2)
    entries = answer["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == answer["usage"]["prompt_tokens"]
    assert all(2 <= len(entry) <= 3 for entry in entries[1:])
    assert set(next(iter(entries[1].values()))) == {"logprob", "decoded_token"}


def test_prompts_that_decode_computes_itself(
    model: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same without a prefill worker's part: scores of the prompt, and token 1 under a grammar."""
    changes = {"pools.decode.memory": 128 * 2048, "router.placement.disaggregation": "never"}
    prompt = [(11 * i * i) % 256 for i in range(100)]
    truth = reference.logprobs(prompt)
    with running(tmp_path_factory.mktemp("alone"), merged(tiny_config(model), changes)) as rig:
        for _ in range(2):
            answer = post(rig, TEXT, prompt=prompt, echo=True, logprobs=0, max_tokens=2)
            scores = answer["choices"][0]["logprobs"]["token_logprobs"][1:100]
            expected = [float(truth[at - 1][prompt[at]]) for at in range(1, 100)]
            assert scores == pytest.approx(expected, abs=1e-4)
        guided = post(rig, TEXT, prompt=prompt, guided_choice=["left", "right"], n=2, seed=4)
        assert {choice["text"] for choice in guided["choices"]} <= {"left", "right"}
