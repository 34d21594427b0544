"""Values at and beyond the edge of every field, over HTTP and gRPC: refused by name, never a fault of ours."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from baton.proto import baton_pb2 as api
from baton.tests.harness.router_rig import RouterRig, router_rig

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HUGE = ("2147483648", "9223372036854775808", "1" + "0" * 25, "-1" + "0" * 25, "1" + "0" * 400, "1" + "0" * 5000)
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999")
WHOLE = ("max_tokens", "min_tokens", "n", "top_k", "logprobs")
REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
TEXTS = {"stop": ["a", "\ud800"], "user": "\udfff", "cache_salt": "\ud800", "model": "\ud800", "prompt": ["\ud800"]}
DEEP = "[" * 900 + "]" * 900


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterRig]:
    async with router_rig(Path(tmp_path_factory.mktemp("hostile")), "prefill-0", "decode-0") as rig:
        yield rig


def _bodies() -> list[tuple[str, str, str]]:
    """(path, body, the field at fault)."""
    found = [(TEXT, f'{{"prompt": "x", "{name}": {value}}}', name) for name in WHOLE for value in HUGE]
    found += [(TEXT, f'{{"prompt": "x", "{name}": {v}}}', name) for name in REAL for v in (*NO_NUMBERS, HUGE[4])]
    found += [(TEXT, f'{{"prompt": "x", "{name}": NaN}}', name) for name in WHOLE]
    for value in HUGE:
        found.append((TEXT, f'{{"prompt": "x", "stop_token_ids": [{value}]}}', "stop_token_ids"))
        found.append((TEXT, f'{{"prompt": [{value}]}}', "prompt"))
        found.append((TEXT, f'{{"prompt": "x", "logit_bias": {{"{value}": 1}}}}', "logit_bias"))
    found += [(TEXT, f'{{"prompt": "x", "seed": {value}}}', "seed") for value in (*HUGE[2:], "NaN", "1.5")]
    found += [(TEXT, f'{{"prompt": "x", "logit_bias": {{"1": {value}}}}}', "logit_bias") for value in NO_NUMBERS]
    found += [(TEXT, f'{{"prompt": "x", "logit_bias": {{"{key}": 1}}}}', "logit_bias") for key in ("1_0", " 1", "٣")]
    found += [(TEXT, json.dumps({"prompt": "x", name: value}), name) for name, value in TEXTS.items()]
    chat = '{"messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": '
    found += [(CHAT, f"{chat}{value}}}", "top_logprobs") for value in ("-1", "21", *HUGE, *NO_NUMBERS)]
    found += [(CHAT, json.dumps({"messages": [message]}), "messages") for message in _messages("\ud800")]
    found += [(TEXT, f'{{"prompt": "x", "{name}": {DEEP}}}', name) for name in ("tools", "stop", "beam_width")]
    found.append((CHAT, '{"messages": [{"role": "user", "content": ' + DEEP + "}]}", "messages"))
    nested = '[{"type": "text", "text": ' * 400 + '""' + "}]" * 400
    found.append((CHAT, '{"messages": [{"role": "user", "content": ' + nested + "}]}", "messages"))
    return found


def _messages(bad: str) -> list[dict[str, Any]]:
    part = {"type": "text", "text": bad}
    return [{"role": bad, "content": "x"}, {"role": "user", "content": bad}, {"role": "user", "content": [part]}]


@pytest.mark.asyncio(loop_scope="module")
async def test_st_03_http_refuses_by_name_whatever_json_allows(rig: RouterRig) -> None:
    for path, body, field in _bodies():
        response = await rig.http.post(path, content=body.encode())
        assert response.status_code == 400, (body[:200], response.text)
        assert response.json()["error"]["param"] == field, (body[:200], response.text)
    raw = await rig.http.post(TEXT, content=b'{"prompt": "\xed\xa0\x80"}')
    assert (raw.status_code, "not UTF-8" in raw.text) == (400, True)
    name = await rig.http.post(TEXT, content=b'{"prompt": "x", "\\ud800": 1}')
    assert (name.status_code, "field name" in name.text) == (400, True)
    assert rig.cluster["prefill-0"].commands == []


@pytest.mark.asyncio(loop_scope="module")
async def test_fields_of_several_types_and_unknown_ones_are_explained(rig: RouterRig) -> None:
    for body, expected in (
        ({"prompt": 5}, "prompt: must be a text, a list of texts, a list of token ids"),
        ({"prompt": [1, "x"]}, "prompt: must be a text"),
        ({"prompt": "x", "stop": 5}, "stop: must be a text or a list of texts"),
        ({"prompt": "x", "logprobs": "many"}, "logprobs: must be an integer"),
        ({"prompt": "x", "max_token": 1}, "max_token: unknown field; did you mean max_tokens?"),
        ({"prompt": "x", "respons_format": 1}, "respons_format: unknown field; did you mean response_format?"),
        (
            {"prompt": "x", "stream": True, "stream_options": {"include_usag": True}},
            "stream_options.include_usag: unknown field; did you mean include_usage?",
        ),
        ({"prompt": "x", "zzz": 1}, "zzz: unknown field"),
    ):
        response = await rig.http.post(TEXT, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(expected), response.text


@pytest.mark.asyncio(loop_scope="module")
async def test_seeds_are_signed_or_unsigned_64_bits(rig: RouterRig) -> None:
    for seed in (0, -1, -(2**63), 2**64 - 1):
        assert (await rig.http.post(TEXT, json={"prompt": "x", "seed": seed})).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_st_03_grpc_refuses_by_name_whatever_protobuf_allows(rig: RouterRig) -> None:
    bad: list[tuple[str, Any]] = [(name, value) for name in WHOLE for value in (2**31 - 1, -(2**31)) if name != "top_k"]
    bad += [("top_k", -(2**31))]
    bad += [(name, value) for name in REAL for value in (float("nan"), float("inf"), -float("inf"), 3e38)]
    bad += [("stop_token_ids", [value]) for value in (2**31 - 1, -(2**31), 320)]
    bad += [("logit_bias", {value: 1.0}) for value in (2**31 - 1, -(2**31))]
    bad += [("logit_bias", {1: value}) for value in (float("nan"), float("inf"), 3e38)]
    bad += [("stop", [""]), ("cache_salt", "x" * 300), ("request_id", "x" * 300)]
    for name, value in bad:
        await refused(rig, name, prompt="x", **{name: value})
    for ids in ([2**31 - 1], [-1]):
        await refused(rig, "token_ids", token_ids=api.TokenIds(ids=ids))
    await refused(rig, "prompt")


async def refused(rig: RouterRig, field: str, **fields: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.generate(**fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (fields, caught.value)
    assert dict(caught.value.trailing_metadata() or ())["baton-field"] == field, fields
