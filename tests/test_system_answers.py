"""The whole cluster on T0: right answers at every edge, and clear refusals. After every test O-live, O-pool, O-acct."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from baton.tests.harness.gates import Gates
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.one_pair import leave
from baton.tests.harness.oracles import Reference, total
from baton.tests.harness.rig import Rig, merged, running, tiny_config
from baton.tests.harness.tiny_model import EOS, special_id

MAX_LEN = 256
END = special_id(EOS)
PROMPT = list(b"The river carries")


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Gates:
    return Gates(tmp_path_factory.mktemp("gates"), {"prefill.chunk": "gate", "decode.step": "gate"})


@pytest.fixture(scope="module")
def cluster(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Iterator[Rig]:
    changes = {"pools.decode.memory": 128 * 2048}  # blocks x bytes: room for two requests of full length
    with running(tmp_path_factory.mktemp("answers"), merged(tiny_config(tiny_dir), changes), gates) as rig:
        yield rig


@pytest.fixture
def rig(cluster: Rig, gates: Gates) -> Iterator[Rig]:
    yield cluster
    gates.release_all()
    cluster.quiesce()


@pytest.fixture(scope="module")
def reference(tiny_dir: Path) -> Reference:
    return Reference(tiny_dir, frozenset({END}))


@pytest.fixture(scope="module")
def monolithic(tiny_dir: Path) -> Monolithic:
    return Monolithic(tiny_dir)


def ids(length: int, start: int = 0) -> list[int]:
    """A prompt of byte tokens that differs with `start`."""
    return [(start * 31 + i * i * 7 + i) % 256 for i in range(length)]


def complete(rig: Rig, **fields: Any) -> httpx.Response:
    return httpx.post(f"{rig.http}/v1/completions", json=fields, timeout=60)


# ---- O-eq ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5])
def test_kv_05_lengths_around_block_edges(rig: Rig, reference: Reference, max_tokens: int) -> None:
    for length in range(1, 14):
        prompt = ids(length, start=max_tokens)
        answer = rig.client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
        assert len(answer.token_ids) == max_tokens
        assert answer.reason == "length"
        reference.check(prompt, answer.token_ids, max_tokens, stops=False)


@pytest.mark.parametrize("length", [63, 64, 65, 128, 200])
def test_o_eq_over_several_chunks(rig: Rig, reference: Reference, length: int) -> None:
    prompt = ids(length, start=length)
    answer = rig.client.generate(token_ids=prompt, max_tokens=24, temperature=0)
    reference.check(prompt, answer.token_ids, 24)
    assert answer.timing.prefill_worker == "prefill-0"
    assert answer.timing.decode_worker == "decode-0"
    kv_bytes = 2 * 2 * 2 * 16 * 4  # per token: layers x (k, v) x heads x head_dim x float32
    assert answer.timing.kv_bytes == (length - answer.timing.decode_cached_tokens) * kv_bytes


def test_o_eq_with_prefix_hits_on_both_sides(rig: Rig, reference: Reference) -> None:
    prompt = ids(90, start=3)
    first = rig.client.generate(token_ids=prompt, max_tokens=8, temperature=0)
    second = rig.client.generate(token_ids=prompt, max_tokens=8, temperature=0)
    longer = rig.client.generate(token_ids=prompt + ids(9, start=8), max_tokens=8, temperature=0)
    reference.check(prompt, first.token_ids, 8)
    assert second.token_ids == first.token_ids
    assert second.timing.prefill_cached_tokens >= 84
    assert second.timing.decode_cached_tokens >= 84
    assert second.timing.kv_bytes < first.timing.kv_bytes / 10
    reference.check(prompt + ids(9, start=8), longer.token_ids, 8)


def test_st_10_alone_and_in_a_batch(rig: Rig, reference: Reference) -> None:
    prompts = [ids(5 + 9 * i, start=i) for i in range(8)]

    def one(prompt: list[int]) -> list[int]:
        return rig.client.generate(token_ids=prompt, max_tokens=20, temperature=0).token_ids

    alone = [one(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one, prompts))
    assert together == alone
    for prompt, token_ids in zip(prompts, alone, strict=True):
        reference.check(prompt, token_ids, 20)


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 0.9, "logit_bias": {65: 3.0, 66: -100.0}},
]


@pytest.mark.parametrize("how", SAMPLINGS, ids=str)
def test_o_eq_sampled_answers_equal_the_monolithic_run(rig: Rig, monolithic: Monolithic, how: dict[str, Any]) -> None:
    for seed in (5, 6):
        answer = rig.client.generate(token_ids=PROMPT, max_tokens=16, ignore_eos=True, seed=seed, n=3, **how)
        expected = monolithic.run(PROMPT, seed=seed, n=3, max_tokens=16, **how)
        assert [choice.token_ids for choice in answer.choices] == [choice.token_ids for choice in expected]


# ---- lengths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_st_02_exactly_max_tokens(rig: Rig, max_tokens: int) -> None:
    answer = rig.client.generate(token_ids=PROMPT, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    assert (len(answer.token_ids), answer.reason) == (max_tokens, "length")
    assert answer.usage.completion_tokens == max_tokens
    assert answer.timing.decode_worker == ("" if max_tokens == 1 else "decode-0")
    body = {
        "model": "tiny-llama",
        "prompt": "The river",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    plain = complete(rig, **body).raise_for_status().json()
    assert plain["usage"]["completion_tokens"] == max_tokens
    assert plain["choices"][0]["finish_reason"] == "length"


def test_st_02_prompt_one_short_of_the_context(rig: Rig, reference: Reference) -> None:
    before = total(rig.metrics(), "baton_worker_steps_total", role="decode")
    prompt = ids(MAX_LEN - 1)
    answer = rig.client.generate(token_ids=prompt, max_tokens=1, temperature=0)
    reference.check(prompt, answer.token_ids, 1)
    assert rig.client.generate(token_ids=prompt, temperature=0).token_ids == answer.token_ids  # what the context leaves
    assert total(rig.metrics(), "baton_worker_steps_total", role="decode") == before


def test_the_whole_context_can_be_used(rig: Rig, reference: Reference) -> None:
    prompt = ids(MAX_LEN - 20, start=4)
    answer = rig.client.generate(token_ids=prompt, max_tokens=20, temperature=0, ignore_eos=True)
    assert len(answer.token_ids) == 20
    reference.check(prompt, answer.token_ids, 20, stops=False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ""}, ["prompt", "empty"]),
        ({"token_ids": []}, ["token_ids"]),
        ({"messages": []}, ["messages"]),
        ({"token_ids": ids(MAX_LEN)}, ["token_ids", "256"]),
        ({"token_ids": ids(MAX_LEN + 1)}, ["token_ids", "257", "256"]),
        ({"token_ids": ids(250), "max_tokens": 7}, ["max_tokens", "250", "257", "256"]),
        ({"prompt": "x " * 500_000}, ["prompt"]),
        ({"token_ids": [1, 320, 2]}, ["token_ids", "320"]),
        ({"token_ids": [-1]}, ["token_ids", "-1"]),
        ({"token_ids": PROMPT, "max_tokens": 0}, ["max_tokens"]),
        ({"token_ids": PROMPT, "n": 99}, ["n"]),
        ({"token_ids": PROMPT, "stop_token_ids": [320]}, ["stop_token_ids", "320"]),
        ({"token_ids": PROMPT, "logit_bias": {320: 1.0}}, ["logit_bias", "320"]),
        ({"token_ids": PROMPT, "temperature": -1.0}, ["temperature"]),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, ["unknown role wizard"]),
        ({}, ["prompt"]),
    ],
)
def test_api_06_refusals_name_the_field_and_the_numbers(rig: Rig, fields: dict[str, Any], words: list[str]) -> None:
    status, message = rig.client.refused(**fields)
    assert status == grpc.StatusCode.INVALID_ARGUMENT
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("prompt", ["", [], [[]], [[], []], [320], "x " * 500_000, ids(MAX_LEN), None, 7])
def test_api_06_the_same_over_http(rig: Rig, prompt: Any) -> None:
    response = complete(rig, model="tiny-llama", prompt=prompt, max_tokens=4)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("prompt", [" ", "\n\n", "a", "<|begin|>"])
def test_api_06_odd_prompts_that_are_fine(rig: Rig, prompt: str) -> None:
    answer = rig.client.generate(prompt=prompt, max_tokens=3, temperature=0, ignore_eos=True)
    assert len(answer.token_ids) == 3


# ---- the first token ends it ---------------------------------------------------------------------------------


def _sent_bytes(rig: Rig) -> float:
    return total(rig.metrics(), "baton_kv_transfer_bytes_sum")


def test_st_01_first_token_is_eos(rig: Rig) -> None:
    steps = total(rig.metrics(), "baton_worker_steps_total", role="decode")
    answer = rig.client.generate(token_ids=PROMPT, max_tokens=20, temperature=0, logit_bias={END: 100.0})
    assert (answer.token_ids, answer.text, answer.reason) == ([END], "", "stop")
    assert answer.usage.completion_tokens == 1
    assert total(rig.metrics(), "baton_worker_steps_total", role="decode") == steps


def test_st_01_first_token_is_a_stop_id(rig: Rig) -> None:
    fields: dict[str, Any] = {"token_ids": PROMPT, "max_tokens": 20, "temperature": 0, "logit_bias": {65: 100.0}}
    answer = rig.client.generate(**fields, stop_token_ids=[65])
    assert (answer.token_ids, answer.text, answer.reason) == ([65], "", "stop")


def test_st_01_first_token_is_a_stop_string(rig: Rig) -> None:
    fields: dict[str, Any] = {"token_ids": PROMPT, "max_tokens": 20, "temperature": 0, "logit_bias": {65: 100.0}}
    answer = rig.client.generate(**fields, stop=["A"])
    assert (answer.token_ids, answer.text, answer.reason) == ([65], "", "stop")
    assert answer.choices[0].matched_stop == "A"


def test_st_01_ignore_eos_goes_on(rig: Rig) -> None:
    fields: dict[str, Any] = {"token_ids": PROMPT, "max_tokens": 6, "temperature": 0, "logit_bias": {END: 100.0}}
    answer = rig.client.generate(**fields, ignore_eos=True)
    assert (answer.token_ids, answer.reason) == ([END] * 6, "length")


def test_st_01_min_tokens_holds_the_end_back(rig: Rig) -> None:
    fields: dict[str, Any] = {"token_ids": PROMPT, "max_tokens": 9, "temperature": 0, "logit_bias": {END: 100.0}}
    answer = rig.client.generate(**fields, min_tokens=4)
    assert len(answer.token_ids) == 5
    assert END not in answer.token_ids[:4]
    assert (answer.token_ids[4], answer.reason) == (END, "stop")


# ---- choices and logprobs ------------------------------------------------------------------------------------


def test_st_07_three_choices_are_three_seeded_runs(rig: Rig) -> None:
    fields: dict[str, Any] = {"token_ids": ids(30), "max_tokens": 12, "temperature": 1.0, "seed": 9, "ignore_eos": True}
    answer = rig.client.generate(**fields, n=3)
    assert [len(choice.token_ids) for choice in answer.choices] == [12, 12, 12]
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    assert answer.choices[0].token_ids == rig.client.generate(**fields).token_ids
    assert [c.token_ids for c in rig.client.generate(**fields, n=3).choices] == [c.token_ids for c in answer.choices]
    assert answer.usage.completion_tokens == 36


def test_st_07_greedy_choices_are_alike(rig: Rig, reference: Reference) -> None:
    answer = rig.client.generate(token_ids=ids(30), max_tokens=12, temperature=0, n=3)
    for choice in answer.choices:
        reference.check(ids(30), choice.token_ids, 12)


def test_st_07_two_prompts_of_three_choices_over_http(rig: Rig) -> None:
    body = {"model": "tiny-llama", "prompt": [ids(9), ids(10)], "n": 3, "max_tokens": 4, "seed": 1, "ignore_eos": True}
    found = complete(rig, **body).raise_for_status().json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3, 4, 5]
    assert found["usage"]["completion_tokens"] == 24


def test_st_07_one_choice_may_end_before_the_others(rig: Rig) -> None:
    """Sampled choices with an end of sequence made likely: they end at different lengths, each once."""
    fields: dict[str, Any] = {"token_ids": ids(11), "max_tokens": 30, "temperature": 1.5, "logit_bias": {END: 4.0}}
    answer = rig.client.generate(**fields, n=6, seed=2)
    lengths = {len(choice.token_ids) for choice in answer.choices}
    assert len(lengths) > 1
    for choice in answer.choices:
        assert (choice.reason == "stop") == (choice.token_ids[-1] == END)


@pytest.mark.parametrize("logprobs", [0, 1, 5, 20])
def test_st_05_logprobs_of_every_token(rig: Rig, reference: Reference, monolithic: Monolithic, logprobs: int) -> None:
    prompt = ids(21, start=logprobs)
    fields: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "n": 2, "logprobs": logprobs}
    answer = rig.client.generate(token_ids=prompt, ignore_eos=True, **fields)
    for choice, local in zip(answer.choices, monolithic.run(prompt, **fields), strict=True):
        assert len(choice.logprobs) == len(choice.token_ids) == 6
        assert choice.token_ids == local.token_ids
        assert [e.logprob for e in choice.logprobs] == pytest.approx([t.logprob for t in local.tokens], abs=1e-5)
        expected = reference.logprobs([*prompt, *choice.token_ids])[len(prompt) - 1 :]
        for i, (token_id, entry) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
            assert entry.logprob == pytest.approx(float(expected[i, token_id]), abs=2e-4)
            best = expected[i].topk(logprobs)
            assert [t.logprob for t in entry.top] == pytest.approx(best.values.tolist(), abs=2e-4)


# ---- cancellation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_client_that_leaves_is_cancelled(rig: Rig, gates: Gates, tokens: int) -> None:
    """Held before token `tokens + 1`: however late the client leaves, the answer has not ended."""
    before = total(rig.metrics(), "baton_requests_cancelled_total")
    point = "decode.step" if tokens else "prefill.chunk"
    gates.close(point)
    stream = rig.client.stream(token_ids=ids(40), max_tokens=200, temperature=0, ignore_eos=True)
    for _ in range(tokens - 1):
        gates.wait_reached(point)
        gates.let_one(point)
    gates.wait_reached(point)
    answer = stream.until_tokens(tokens)
    assert len(answer.token_ids) == tokens
    leave(rig, stream)
    gates.release(point)
    rig.quiesce()
    assert total(rig.metrics(), "baton_requests_cancelled_total") == before + 1
