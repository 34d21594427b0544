"""Placement policies in whole runs of the simulator (`benchmarks/placement.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from baton.benchmarks.placement import Row, measure, read
from baton.router.placement.choose import DECODE, PREFILL, Objectives

POOL = 100_000  # tokens of each worker: a quarter of the conversations fit
NONE = Objectives(None, None)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty-one conversations of four turns, one turn of each after the other; a system prompt of 512 tokens."""
    lines = []
    for turn in range(4):
        for talk in range(61):
            blocks = [0, *(1 + talk * 100 + block for block in range(4 + 2 * turn))]
            stamp = 3000 * ((turn * 61 + talk) // 3)
            fields = {"input_length": 512 * len(blocks) - 100, "output_length": 40 + talk, "hash_ids": blocks}
            lines.append(json.dumps({"timestamp": stamp, **fields}))
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def run(trace: Path, policy: str, speed: float = 1.0, objectives: Objectives = NONE) -> Row:
    return measure(policy, POOL, read(trace, speed, None), objectives)


def test_requests_come_in_order_and_as_long_as_they_are(trace: Path) -> None:
    requests = list(read(trace, 2.0, 100))
    assert [request.at for request in requests] == sorted(request.at for request in requests)
    assert {request.prompt % 512 for request in requests} == {412}
    assert max(request.at for request in requests) <= (33 * 3 + 3) / 2


@pytest.mark.parametrize("policy", sorted(set(PREFILL) | {f"least_loaded/{name}" for name in DECODE}))
def test_every_policy_serves_everything(trace: Path, policy: str) -> None:
    row = run(trace, policy)
    assert row.refused == 0
    assert row.goodput > 0
    assert 0 < row.ttft_p50 <= row.ttft_p90 <= row.ttft_p99 < 60


@pytest.mark.parametrize("how", ["", "+guess"])
def test_prefix_aware_keeps_conversations_together_and_the_load_even(trace: Path, how: str) -> None:
    aware, turns = run(trace, "prefix_aware" + how), run(trace, "round_robin")
    assert aware.hit_rate > 1.9 * turns.hit_rate
    assert aware.decode_hit_rate > 1.5 * turns.decode_hit_rate
    assert aware.ttft_p90 < turns.ttft_p90
    assert aware.prefill_imbalance < 1.1


def test_latency_aware_admission_serves_more_within_the_objectives(tmp_path: Path) -> None:
    """Twice the prompts that four workers can compute, for half a minute."""
    lines = []
    for number in range(800):
        blocks = [1000 * number + block for block in range(1 + number * 7 % 16)]
        fields = {"input_length": 512 * len(blocks) - 100, "output_length": 40, "hash_ids": blocks}
        lines.append(json.dumps({"timestamp": 3000 * (number // 40), **fields}))
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    objectives = Objectives(1.0, 0.05)
    aware, loaded = (
        run(tmp_path / "trace.jsonl", policy, 2.0, objectives) for policy in ("latency_aware", "least_loaded")
    )
    assert aware.refused > 0
    assert aware.goodput > 1.2 * loaded.goodput
