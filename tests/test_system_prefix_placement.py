"""Two workers of each kind, placed by what their prefix caches hold: a conversation goes on where its KV is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from baton.tests.harness.oracles import total
from baton.tests.harness.rig import Rig, merged, running, tiny_config

ANSWER = 8  # tokens


def ids(length: int, start: int) -> list[int]:
    """A prompt of byte tokens that differs with `start`."""
    return [(start * 31 + i * i * 7 + i) % 256 for i in range(length)]


@pytest.fixture(scope="module", params=[True, False], ids=["told", "guessed"])
def rig(request: pytest.FixtureRequest, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    changes = {
        "pools.prefill.replicas": 2,
        "pools.decode.replicas": 2,
        "pools.decode.memory": 64 * 2048,
        "router.placement": {"prefill": "prefix_aware", "decode": "prefix_aware", "prefix_events": request.param},
    }
    folder = tmp_path_factory.mktemp("prefix-placement")
    with running(folder, merged(tiny_config(tiny_dir), changes)) as running_rig:
        yield running_rig


def _turn(rig: Rig, prompt: list[int]) -> tuple[Any, list[int]]:
    answer = rig.client.generate(token_ids=prompt, max_tokens=ANSWER, temperature=0, ignore_eos=True)
    return answer.timing, prompt + list(answer.token_ids)


def test_a_follow_up_turn_goes_to_the_workers_that_hold_its_prefix(rig: Rig) -> None:
    """Four conversations of three turns each, taking turns: every later turn finds all of the one before, on both."""
    talks = [ids(24, talk) for talk in range(4)]
    places: list[set[tuple[str, str]]] = [set() for _ in talks]
    for turn in range(3):
        for number, talk in enumerate(talks):
            timing, said = _turn(rig, talk)
            places[number].add((timing.prefill_worker, timing.decode_worker))
            if turn:
                known = len(talk) - 4  # the new question
                assert timing.prefill_cached_tokens >= (known - ANSWER) // 4 * 4
                assert timing.decode_cached_tokens >= (known - 1) // 4 * 4
            talks[number] = [*said, *ids(4, 100 * turn + number)]
            time.sleep(0.02)
    assert all(len(place) == 1 for place in places)
    assert {prefill for place in places for prefill, _ in place} <= {"prefill-0", "prefill-1"}


def test_a_worker_that_was_replaced_is_known_anew(rig: Rig) -> None:
    before = total(rig.metrics(), "baton_requests_completed_total")
    _, said = _turn(rig, ids(24, 50))
    for worker in ("prefill-0", "prefill-1"):
        rig.kill_worker(worker)
    rig.wait_all_ready()
    rig.wait_live()
    timing, said = _turn(rig, said)
    again, _ = _turn(rig, said)
    assert again.prefill_worker == timing.prefill_worker
    assert again.prefill_cached_tokens >= 28
    assert total(rig.metrics(), "baton_requests_completed_total") >= before + 3
