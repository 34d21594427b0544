"""The runner: refusals before loading, pool sizes, steps on one rank and on several."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from baton.engine.params import EngineParams
from baton.engine.ranks import SingleRank
from baton.engine.runner import Runner
from baton.engine.step import DRAWN_BY_LEADER, Draw, SequenceStep
from baton.proto.errors import ConfigError
from baton.tests.harness.ranks import leader


def engine_params(model: Path, **changes: Any) -> EngineParams:
    params = EngineParams(
        model_path=str(model),
        dtype="float32",
        quantization="none",
        sparsity="auto",
        device="cpu",
        threads=1,
        block_size=4,
        kv_blocks=32,
        kv_bytes=0,
        kv_dtype="auto",
        max_model_len=None,
        batch_invariant=True,
        prefix_cache=True,
        layer_group=1,
        tensor_parallel=1,
    )
    return dataclasses.replace(params, **changes)


def build(model: Path, **changes: Any) -> Runner:
    return Runner(engine_params(model, **changes), SingleRank(), lambda done, total: None, None)


def greedy(prompt: list[int], generated: list[int]) -> Draw:
    return Draw(DRAWN_BY_LEADER.params, (0,), prompt, generated)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float8"}, "model.dtype: 'float8' is not one of float32, bfloat16"),
        ({"kv_dtype": "float8"}, "kv.dtype: 'float8' is not one of auto, float32, bfloat16, float16"),
        ({"threads": 0}, "threads: 0 must be at least 1"),
        ({"block_size": 0}, "block_size: 0"),
        ({"kv_blocks": 0}, "kv_blocks: 0 must be at least 1"),
        ({"kv_blocks": None, "kv_bytes": 100}, "kv.memory: 100 bytes hold no block; one takes 2048"),
        ({"max_model_len": 257}, r"max_model_len: 257 is outside 1\.\.256"),
        ({"max_model_len": 0}, "max_model_len: 0"),
        ({"model_path": "smollm3"}, "model.path"),
    ],
)
def test_what_cannot_run_is_refused(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("baton.engine.runner.Model", _never_loaded)
    with pytest.raises(ConfigError, match=message):
        build(tiny_dir, **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match="cuda is not available here"):
        build(Path("never-read"), device="cuda")


def _never_loaded(*arguments: object) -> None:
    raise AssertionError("the weights were read first")


def test_the_pool_and_the_layout(tiny_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    runner = build(tiny_dir, kv_blocks=None, kv_bytes=2048 * 10 + 1, max_model_len=100)
    assert (runner.blocks, runner.max_model_len, runner.vocab_size) == (10, 100, 320)
    assert runner.kv.data.shape == (2, 2, 10, 2, 4, 16)
    layout = runner.layout
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.block_size) == (2, 2, 16, 4)
    assert (layout.dtype, layout.head_ranges) == ("float32", ((0, 2),))
    assert layout.fingerprint
    assert "1 thread(s)" in caplog.text
    assert "the KV pool holds 40 tokens, less than the context of 100" in caplog.text


def test_progress_reaches_the_end(tiny_dir: Path) -> None:
    seen: list[tuple[int, int]] = []
    Runner(engine_params(tiny_dir), SingleRank(), lambda done, total: seen.append((done, total)), None)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize(("group", "calls"), [(1, [(0, 1), (1, 2)]), (2, [(0, 2)]), (5, [(0, 2)])])
def test_layers_are_announced_in_groups_when_their_kv_is_there(
    tiny_dir: Path, group: int, calls: list[tuple[int, int]]
) -> None:
    runner, seen = build(tiny_dir, layer_group=group), []

    def on_layers(low: int, high: int) -> None:
        assert runner.kv.data[low:high, :, 3].any(dim=-1).all()
        assert not runner.kv.data[high:, :, 3].any()
        seen.append((low, high))

    step = SequenceStep("a", 0, 0, [1, 2, 3, 4], 0, [3], None)
    assert runner.prefill([step], on_layers) == []
    assert seen == calls


def test_steps_with_a_draw_give_tokens_in_order(tiny_dir: Path) -> None:
    """Prefill and decode steps in one batch equal the same steps alone."""
    runner = build(tiny_dir)
    prompts = [[7, 8, 9, 10, 11], [200], [3, 1, 4, 1, 5, 9, 2, 6]]
    tables = [[0, 1], [2], [3, 4, 5]]
    alone = [
        runner.prefill([SequenceStep("a", 0, 0, prompt, 0, table, greedy(prompt, []))], lambda low, high: None)
        for prompt, table in zip(prompts, tables, strict=True)
    ]
    steps = [
        SequenceStep("c", 0, 0, prompts[2][:4], 0, [10], None),
        SequenceStep("b", 0, 0, prompts[1], 0, [11], greedy(prompts[1], [])),
        SequenceStep("a", 0, 0, prompts[0][4:], 4, [0, 1], greedy(prompts[0], [])),
    ]
    assert runner.decode(steps) == [alone[1][0], alone[0][0]]
    last = SequenceStep("c", 0, 0, prompts[2][4:], 4, [10, 12], greedy(prompts[2], []))
    assert runner.decode([last]) == alone[2]


def test_warm_up_runs_on_every_rank(tiny_dir: Path) -> None:
    with leader(engine_params(tiny_dir, tensor_parallel=2)) as ranks:
        assert 0 < ranks.runner.warm_up() < 5
        assert ranks.runner.layout.head_ranges == ((0, 1), (1, 2))
        assert ranks.runner.kv.data.shape[3] == 1
