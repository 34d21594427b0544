"""A whole cluster that speculates: the same answers, streams and counts as without, also when streams move; metrics."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from baton.tests.harness.gates import Gates
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.oracles import total
from baton.tests.harness.rig import Rig, merged, running, tiny_config

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Gates]]:
    """Prompt lookup: a tiny random model's greedy answers run into loops, so some proposals stand and some do not."""
    folder = tmp_path_factory.mktemp("speculation")
    changes = {
        "pools.decode.replicas": 2,
        "pools.decode.memory": 192 * 2048,  # blocks x bytes: all streams on one worker
        "router.placement": {"decode": "round_robin"},
        "engine.speculation": {"method": "prompt_lookup", "max_tokens": 4},
    }
    gates = Gates(folder / "gates", {"decode.step": "sleep(0.3)?"})  # a drain overtakes streams
    with running(folder, merged(tiny_config(tiny_dir), changes), gates) as started:
        yield started, gates


@pytest.fixture(scope="module")
def rig(cluster: tuple[Rig, Gates]) -> Rig:
    return cluster[0]


@pytest.fixture(scope="module")
def alone(tiny_dir: Path) -> Monolithic:
    """The oracle, which does not speculate."""
    return Monolithic(tiny_dir)


def ids(length: int, start: int = 0) -> list[int]:
    """A prompt of byte tokens that differs with `start`."""
    return [(start * 31 + i * i * 7 + i) % 256 for i in range(length)]


def test_answers_are_those_without_speculation(rig: Rig, alone: Monolithic) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5, "n": 2},
        {"temperature": 0.0, "frequency_penalty": 0.4, "logprobs": 2},
    ]
    asked = [(ids(9 + number, number), kinds[number % 3] | {"max_tokens": 20 + number}) for number in range(9)]
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda a: rig.client.generate(token_ids=a[0], ignore_eos=True, **a[1]), asked))
    for (prompt, fields), answer in zip(asked, answers, strict=True):
        expected = alone.run(prompt, **fields)
        assert [choice.token_ids for choice in answer.choices] == [choice.token_ids for choice in expected]
        assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in expected)


def test_a_stop_string_cuts_within_a_step(rig: Rig, alone: Monolithic) -> None:
    """Tokens that a step said behind the stop string are neither given out nor counted."""
    prompt = ids(20, 4)
    whole = rig.client.generate(token_ids=prompt, max_tokens=100, **GREEDY)
    text = whole.text
    for at in range(6, len(text) - 8, 17):
        stop = text[at : at + 3]
        answer = rig.client.generate(token_ids=prompt, max_tokens=100, stop=[stop], **GREEDY)
        assert answer.text == text[: text.index(stop)]
        assert answer.reason == "stop"
        assert answer.usage.completion_tokens == len(answer.token_ids) < 100
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]


def test_metrics_say_how_much_was_accepted(rig: Rig) -> None:
    for _ in range(2):  # one on each
        rig.client.generate(token_ids=ids(20, 4), max_tokens=150, **GREEDY)
    rig.quiesce()
    metrics = rig.metrics()
    drafts, proposed, accepted = (
        total(metrics, f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts <= proposed
    assert 0 < accepted < proposed
    assert total(metrics, "baton_spec_decode_draft_tokens_total") == proposed
    for worker in ("decode-0", "decode-1"):
        own = [total(metrics, f"baton_spec_decode_{name}_total", worker=worker) for name in ("drafts", "draft_tokens")]
        taken = total(metrics, "baton_spec_decode_accepted_tokens_total", worker=worker)
        assert total(metrics, "baton_spec_decode_acceptance_rate", worker=worker) == taken / own[1]
        assert total(metrics, "baton_spec_decode_mean_accepted_length", worker=worker) == 1 + taken / own[0] > 1


def test_streams_that_move_take_only_accepted_tokens_along(
    cluster: tuple[Rig, Gates], rig: Rig, alone: Monolithic
) -> None:
    prompts = [ids(20, start) for start in range(4)]
    cluster[1].close("decode.step")
    streams = [rig.client.stream(token_ids=prompt, max_tokens=150, **GREEDY) for prompt in prompts]
    for stream in streams:
        stream.until_tokens(3)
    rig.drain("decode-1")
    cluster[1].release("decode.step")
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.rest().token_ids == alone.run(prompt, max_tokens=150)[0].token_ids
    assert total(rig.metrics(), "baton_legs_handed_over_total", cause="moved") > 0
    rig.wait_all_ready()
