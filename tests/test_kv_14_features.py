"""KV-14: optional features two by two. Every pair of settings occurs in some row; each row answers random requests as
one local engine does, and leaves its pools empty."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.oracles import Reference
from baton.tests.harness.rig import merged, running, tiny_config
from baton.tests.harness.tiny_model import write_tiny_model

_BLOCK = 2 * 2 * 2 * 4 * 16 * 4  # bytes of a block of T0
SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prefix cache": ({"engine.prefix_cache": True}, {"engine.prefix_cache": False}),
    "chunks": ({"pools.prefill.max_batch_tokens": 512}, {"pools.prefill.max_batch_tokens": 8}),
    "pressure": ({"pools.decode.memory": 256 * _BLOCK}, {"pools.decode.memory": 32 * _BLOCK}),
    "tp prefill": ({"pools.prefill.tensor_parallel": 1}, {"pools.prefill.tensor_parallel": 2}),
    "tp decode": ({"pools.decode.tensor_parallel": 1}, {"pools.decode.tensor_parallel": 2}),
    "checksum": ({"kv.checksum": True}, {"kv.checksum": False}),
    "carrier": ({"kv.transport": "gloo"}, {"kv.transport": "inline"}),
    "blocks": ({"pools.prefill.block_size": 4}, {"pools.prefill.block_size": 16}),
    "group": ({"engine.layer_group": 1}, {"engine.layer_group": 2}),
    "choices": ({}, {"n": 3}),
}


def rows() -> list[tuple[int, ...]]:
    """Settings of all switches, chosen greedily until every pair of values has met; the same list every time."""
    rng = random.Random(14)
    count = len(SWITCHES)
    missing = {(i, a, j, b) for i, j in combinations(range(count), 2) for a in (0, 1) for b in (0, 1)}
    found: list[tuple[int, ...]] = []
    while missing:
        candidates = [tuple(rng.randrange(2) for _ in range(count)) for _ in range(200)]
        best = max(candidates, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        found.append(best)
    return found


def _pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def label(row: tuple[int, ...]) -> str:
    """The switches that are not at their first setting."""
    return "+".join(name for name, value in zip(SWITCHES, row, strict=True) if value).replace(" ", "-") or "none"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("features") / "tiny-llama")


def test_every_pair_of_settings_occurs() -> None:
    met = set().union(*(_pairs(row) for row in rows()))
    assert len(met) == 4 * len(list(combinations(SWITCHES, 2)))
    assert len(rows()) <= 12


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(), ids=label)
def test_kv_14_pairs_of_features(model: Path, tmp_path: Path, row: tuple[int, ...]) -> None:
    settings = [pair[value] for pair, value in zip(SWITCHES.values(), row, strict=True)]
    changes = {key: value for setting in settings for key, value in setting.items()}
    choices = changes.pop("n", 1)
    rng, reference, oracle = random.Random(7), Reference(model, frozenset()), Monolithic(model)
    shared = [rng.randrange(256) for _ in range(40)]
    prompts = [shared[: rng.randrange(41)] + [rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(20)]
    counts = [rng.randint(1, 16) for _ in prompts]
    with running(tmp_path / "rig", merged(tiny_config(model), changes)) as rig:

        def one(number: int) -> list[list[int]]:
            fields: dict[str, Any] = {"max_tokens": counts[number], "ignore_eos": True, "n": choices, "seed": number}
            fields["temperature"] = 0.0 if choices == 1 else 1.0
            answer = rig.client.generate(token_ids=prompts[number], **fields)
            return [choice.token_ids for choice in answer.choices]

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(one, range(len(prompts))))
    for number, (prompt, count, said) in enumerate(zip(prompts, counts, answers, strict=True)):
        if choices == 1:
            reference.check(prompt, said[0], count, stops=False)
        else:
            expected = oracle.run(prompt, max_tokens=count, n=choices, temperature=1.0, seed=number)
            assert said == [choice.token_ids for choice in expected]
