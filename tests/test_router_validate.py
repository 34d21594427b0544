"""Request fields: each bound is named, before anything is allocated (API-06, ST-03)."""

from __future__ import annotations

from typing import Any

import pytest
from baton.proto.errors import InvalidRequest
from baton.router.requests import ClientRequest, Prepared
from baton.router.tenants import ANYBODY
from baton.router.validate import ModelFacts, check_size, prepare
from baton.tests.harness.router_rig import CONTEXT, LIMITS, VOCAB

FACTS = ModelFacts(CONTEXT, VOCAB)


def made(ids: list[int] | None = None, **fields: Any) -> Prepared:
    prompt = [1, 2, 3] if ids is None else ids
    request = ClientRequest(token_ids=prompt, input_field="token_ids", **fields)
    check_size(request, LIMITS, FACTS.context)
    return prepare(request, prompt, LIMITS, FACTS, {7, 8}, seed=99, deadline_s=600.0, stream_interval=1, tenant=ANYBODY)


def test_defaults_are_neutral() -> None:
    prepared = made()
    sampling = prepared.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (sampling.n, sampling.max_tokens, sampling.min_tokens) == (1, CONTEXT - 3, 0)
    assert (sampling.seed, sampling.logprobs) == (99, None)
    assert sampling.stop_token_ids == {7, 8}
    assert prepared.deadline_s == 600.0


def test_given_values_are_kept() -> None:
    prepared = made(
        temperature=0.0, top_k=-1, seed=0, max_tokens=5, min_tokens=5, logprobs=0, stop_token_ids=[4], deadline_s=1.5
    )
    sampling = prepared.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.logprobs) == (0.0, 0, 0, 0)
    assert sampling.stop_token_ids == {4, 7, 8}
    assert prepared.deadline_s == 1.5


def test_ignore_eos_keeps_the_users_own_stop_ids() -> None:
    assert made(ignore_eos=True, stop_token_ids=[4, 8]).sampling.stop_token_ids == {4, 8}


HUGE = (0, -1, 2**31, 2**63, float("nan"), float("inf"), 1e30)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.1, 2.1, *HUGE[4:])],
        *[("top_p", value) for value in (0.0, -1.0, 1.1, *HUGE[4:])],
        *[("min_p", value) for value in (-0.1, 1.1, *HUGE[4:])],
        *[("repetition_penalty", value) for value in (0.0, 1e-45, -1.0, 11.0, *HUGE[4:])],
        *[("presence_penalty", value) for value in (-2.1, 2.1, *HUGE[4:])],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, *HUGE[4:])],
        *[("top_k", value) for value in (-2, 2**31, 2**63)],
        *[("n", value) for value in (0, -1, 9, 2**31)],
        *[("max_tokens", value) for value in (0, -1, CONTEXT - 2, 2**31, 2**63)],
        *[("min_tokens", value) for value in (-1, CONTEXT, 2**31)],
        *[("logprobs", value) for value in (-1, 21, 2**31)],
        *[("seed", value) for value in (-1, 2**64)],
        ("stop", ["a"] * 5),
        ("stop", [""]),
        ("stop", ["x" * 65]),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 17),
        ("logit_bias", {VOCAB: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", dict.fromkeys(range(301), 0.0)),
        ("cache_salt", "x" * 257),
        *[("priority", value) for value in (-1001, 1001, 2**31)],
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(**{field: value})
    assert caught.value.field == field
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize("ids", [[-1], [VOCAB], [2**31 - 1], [1, 2, VOCAB]])
def test_ids_outside_the_vocabulary(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=f"token id {ids[-1]} is outside the vocabulary"):
        made(ids)


def test_api_06_lengths_at_the_edges() -> None:
    assert made([1] * (CONTEXT - 1)).sampling.max_tokens == 1
    assert made([1]).sampling.max_tokens == CONTEXT - 1
    for length in (CONTEXT, CONTEXT + 1, 10**6):
        with pytest.raises(InvalidRequest, match=f"{length} tokens; the context of {CONTEXT}"):
            made([1] * length)
    with pytest.raises(InvalidRequest, match="no tokens"):
        made([])
    message = rf"3 prompt tokens \+ 254 max_tokens = 257, but the context holds {CONTEXT}: at most 253"
    with pytest.raises(InvalidRequest, match=message):
        made(max_tokens=254)


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (ClientRequest(), "exactly one"),
        (ClientRequest(prompt="a", token_ids=[1]), "exactly one"),
        (ClientRequest(prompt=""), "empty"),
        (ClientRequest(prompt="x" * ((1 << 20) + 1)), "bytes of text"),
        (ClientRequest(prompt="é" * (1 << 19) + "x"), "bytes of text"),
        (ClientRequest(prompt="a\ud800"), "not valid Unicode"),
        (ClientRequest(messages=[]), "no messages"),
        (ClientRequest(messages=[{"role": "user", "content": "a"}] * 65), "at most 64 messages"),
        (ClientRequest(messages=[{"role": "user", "content": [{"text": "x" * (1 << 21)}]}]), "bytes of text"),
    ],
)
def test_inputs_are_bounded_before_they_are_tokenised(request_: ClientRequest, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        check_size(request_, LIMITS, CONTEXT)
