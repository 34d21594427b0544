"""API-04's other half: a body of millions of small values is refused by counting, in no time."""

from __future__ import annotations

import time
from typing import Any

import pytest
from baton.proto import baton_pb2 as api
from baton.proto.errors import InvalidRequest
from baton.router.bounds import check_body, check_message
from baton.tests.harness.router_rig import LIMITS

CONTEXT = 256
MANY = 400_000


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [{}] * MANY}, "messages"),
        ({"messages": [{"content": [{}] * MANY}]}, "messages"),
        ({"prompt": [[]] * MANY}, "prompt"),
        ({"prompt": [1] * MANY}, "prompt"),
        ({"prompt": [[1] * MANY]}, "prompt"),
        ({"logit_bias": {str(i): 0 for i in range(MANY)}}, "logit_bias"),
        ({"stop": ["a"] * MANY}, "stop"),
        ({"unknown": [[[]] * 1000] * 1000}, "unknown"),
        ({str(i): 0 for i in range(MANY)}, ""),
    ],
)
def test_api_04_bodies_of_many_values(body: dict[str, Any], field: str) -> None:
    started = time.thread_time()  # of the processor: what else runs does not count
    with pytest.raises(InvalidRequest) as caught:
        check_body(body, LIMITS, CONTEXT)
    assert time.thread_time() - started < 1.25
    assert caught.value.field == field


@pytest.mark.parametrize("body", [[], {}, {"prompt": "x", "stop": "y"}, {"prompt": [[1] * CONTEXT] * LIMITS.prompts}])
def test_other_bodies_pass(body: Any) -> None:
    check_body(body, LIMITS, CONTEXT)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (api.GenerateRequest(messages=api.Messages(messages=[api.Message()] * MANY)), "messages"),
        (api.GenerateRequest(token_ids=api.TokenIds(ids=[1] * MANY)), "token_ids"),
        (api.GenerateRequest(stop_token_ids=[1] * MANY), "stop_token_ids"),
        (api.GenerateRequest(logit_bias=dict.fromkeys(range(100_000), 0.0)), "logit_bias"),
    ],
)
def test_api_04_calls_of_many_values(request_: api.GenerateRequest, field: str) -> None:
    started = time.thread_time()  # of the processor: what else runs does not count
    with pytest.raises(InvalidRequest) as caught:
        check_message(request_, LIMITS, CONTEXT)
    assert time.thread_time() - started < 1.25
    assert caught.value.field == field
