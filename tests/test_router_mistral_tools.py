"""Tools of a model with a template of Mistral's kind: a special token marks its calls, whose ids have 9 characters."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from baton.tests.harness.router_rig import CONTEXT, EOS_ID, FakeCluster, RouterRig, router_params, say, write_model
from baton.tests.harness.tiny_model import PAD, special_id
from baton.text import grammar
from baton.text.source import resolve
from baton.text.tokenizer import Tokenizer
from baton.text.tool_calls import MISTRAL, call_grammar

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
MARK = special_id(PAD)  # is spelt [TOOL_CALLS] here
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for message in messages %}{% if message['tool_calls'] %}[TOOL_CALLS] ["
    "{% for call in message['tool_calls'] %}{% if call['id'] | length != 9 %}"
    "{{ raise_exception('ids of calls must have 9 characters') }}{% endif %}"
    "{{ call['function'] | tojson }}{% endfor %}]{% else %}[{{ message['role'] }}]{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("time", "place")
]
CALLS = ' [{"name": "time", "arguments": {"zone": "UTC"}}, {"name": "place", "arguments": {}}]'
ASK = [{"role": "user", "content": "when?"}]


def write(directory: Path) -> Path:
    """A model's folder."""
    model = write_model(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text((model / name).read_text().replace(PAD, MISTRAL.mark))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterRig]:
    model, cluster = write(tmp_path_factory.mktemp("mistral") / "model"), FakeCluster()
    await cluster.start()
    for name in ("prefill-0", "decode-0"):
        await cluster.add(name)
    rig = RouterRig(cluster, router_params(model, cluster.address))
    await rig.start()
    await rig.ready()
    yield rig
    with contextlib.suppress(Exception):
        await rig.close()
    await cluster.stop()


def script(rig: RouterRig, before: str, after: str) -> None:
    """The model says a text, the mark, and another text."""
    ids = [*before.encode(), MARK, *after.encode()]
    rig.cluster.script = lambda leg, choice, index: ids[index] if index < len(ids) else EOS_ID


async def ask(rig: RouterRig, messages: Sequence[Any], **more: Any) -> Any:
    answer = await rig.http.post(CHAT, json={"messages": messages, "tools": TOOLS, "max_tokens": 100, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


async def test_calls_and_what_comes_back_through_the_template(rig: RouterRig) -> None:
    script(rig, "Let me see.", CALLS)
    choice = await ask(rig, ASK)
    calls = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Let me see.")
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
        ("time", {"zone": "UTC"}), ("place", {})]  # fmt: skip
    assert len({call["id"] for call in calls}) == 2
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)
    result = {"role": "tool", "content": "12:00", "tool_call_id": calls[0]["id"]}
    rig.cluster.script = say("Noon.")
    assert (await ask(rig, [*ASK, choice["message"], result]))["message"]["content"] == "Noon."
    calls[0]["id"] = "call_1"
    refused = await rig.http.post(CHAT, json={"messages": [*ASK, choice["message"], result], "tools": TOOLS})
    assert (refused.status_code, "9 characters" in refused.text) == (400, True)


async def test_a_stream_has_the_same_calls(rig: RouterRig) -> None:
    script(rig, "", CALLS)
    named: list[str] = []
    arguments, content, reason = ["", ""], "", ""
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 100, "stream": True}
    async with rig.http.stream("POST", CHAT, json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                content += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
                for call in choice["delta"].get("tool_calls", []):
                    named += [call["function"]["name"]] if "id" in call else []
                    arguments[call["index"]] += call["function"]["arguments"]
    assert (named, content, reason) == (["time", "place"], "", "tool_calls")
    assert [json.loads(one) for one in arguments] == [{"zone": "UTC"}, {}]


async def test_without_tools_the_mark_has_no_text(rig: RouterRig) -> None:
    script(rig, "a", "b")
    assert (await ask(rig, ASK, tools=None))["message"]["content"] == "ab"
    assert (await ask(rig, ASK))["message"]["content"] == "a[TOOL_CALLS]b"  # what is no call is text


async def test_a_forced_call_begins_with_the_mark_itself(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(resolve(str(write(tmp_path / "model"))))
    vocabulary = grammar.Vocabulary(tokenizer)
    functions = [tool["function"] for tool in TOOLS]
    text = call_grammar(MISTRAL, functions, several=True, mark_id=vocabulary.special_ids[MISTRAL.mark])
    vocabulary.check(text, "tools")
    said = tokenizer.encode(CALLS, special=False, bos=False)
    matcher = vocabulary.matcher(text)
    assert matcher.consume_tokens([MARK, *said])
    assert matcher.is_accepting()
    spelt = tokenizer.encode(MISTRAL.mark + CALLS, special=False, bos=False)
    assert MARK not in spelt
    assert not vocabulary.matcher(text).consume_tokens(spelt)
    assert len(spelt) < CONTEXT
