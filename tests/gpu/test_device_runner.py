"""The engine on a GPU says what the engine on a CPU says, and leaves the same bytes in its pool."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from baton.engine.device_runner import DeviceRunner
from baton.engine.local import Request
from baton.engine.prompt_lookup import PromptLookup
from baton.engine.proposal_length import Costs
from baton.engine.runner import Runner
from baton.engine.speculation import Speculator
from baton.engine.step import DRAWN_BY_LEADER, Draw, PromptScores, SequenceStep
from baton.kernels.kv_rows import convert
from baton.tests.gpu.conftest import INTERPRETED
from baton.tests.gpu.device_rig import answers, build_device, edge
from baton.tests.harness.monolithic import sampling
from baton.tests.harness.ranks import followers
from baton.tests.harness.tiny_model import write_tiny_model
from baton.tests.test_engine_runner import build, engine_params

SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16}
PERIOD = [5, 80, 200, 33]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("device") / "model", seed=2, **SHAPE)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(i * i * 31 + 17 * i + 101 * seed + length) % 300 for i in range(length)]


def requests(count: int = 3, tokens: int = 3) -> list[Request]:
    """Lengths around block edges; the first and the last share a prefix; one is sampled, with two choices."""
    prompts = [prompt_of(9), prompt_of(4, 1), [*prompt_of(9)[:8], 7, 8]]
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_k": 30, "n": 2, "seed": 4}, {"logprobs": 2}]
    return [
        (prompt, sampling(max_tokens=tokens, **setting))
        for prompt, setting in zip(prompts[:count], settings, strict=False)
    ]


@pytest.mark.parametrize(
    ("kv_dtype", "block_size", "chunk"), [("auto", 4, 6), ("float16", 4, 64), ("int8", 8, 6), ("fp8", 4, 64)]
)
def test_the_same_tokens_as_on_a_cpu(model: Path, kv_dtype: str, block_size: int, chunk: int) -> None:
    """Chunks, a batch, a prefix that is found, choices that fork, pools of every kind."""
    changes = {"kv_dtype": kv_dtype, "block_size": block_size, "kv_blocks": 24}
    expected = answers(build(model, **changes), requests(), chunk, 2)
    assert answers(build_device(model, **changes), requests(), chunk, 2) == expected


@pytest.mark.parametrize(("arch", "kv_heads"), [("qwen3", 2), ("qwen2", 1)])
def test_other_architectures(tmp_path: Path, arch: str, kv_heads: int) -> None:
    """Norms of heads, biases."""
    path = write_tiny_model(tmp_path / "model", arch=arch, seed=3, heads=4, kv_heads=kv_heads, head_dim=16)
    expected = answers(build(path), requests(2, 2), 64)
    assert answers(build_device(path), requests(2, 2), 64) == expected


def test_speculation_changes_nothing(model: Path) -> None:
    free = Costs(0.0, 0.0, 0.0)
    wanted = [(PERIOD * 3, sampling(max_tokens=9)), (PERIOD * 2 + [9], sampling(max_tokens=5, temperature=0.7))]
    runner = build_device(model)
    speculator = Speculator(PromptLookup(), free, 3, 4)
    found = answers(runner, wanted, 64, 2, speculator)
    assert found == answers(build(model), wanted, 64, 2)
    assert speculator.draft_tokens > 0


def pools(model: Path, kv_dtype: str) -> tuple[Runner, DeviceRunner]:
    changes = {"kv_dtype": kv_dtype, "kv_blocks": 12}
    return build(model, **changes), build_device(model, **changes)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_kv_moves_between_gpu_and_cpu(model: Path, kv_dtype: str) -> None:
    """A prompt that one of them computed is answered by the other, in both directions."""
    host, device = pools(model, kv_dtype)
    prompt, draw = prompt_of(11), dataclasses.replace(DRAWN_BY_LEADER, choices=(0,))
    first = SequenceStep("a", 0, 0, prompt, 0, [3, 1, 7], draw)
    layers, heads = (0, host.layout.layers), (0, 2)
    tokens = host.prefill([first], None), device.prefill([first], None)
    assert tokens[0] == tokens[1]
    rows = [runner.kv.gather([3, 1, 7], layers, heads, (0, 11)).cpu() for runner in (host, device)]
    assert rows[0].dtype == rows[1].dtype
    values = [convert(part, torch.float32) for part in rows]
    apart = (values[0] - values[1]).abs() / values[0].abs().amax(-1, keepdim=True)
    assert apart.max() < (1e-5 if kv_dtype == "auto" else 0.08)  # values differ in their last bits, so a code may, too
    assert apart.mean() < 1e-3
    device.kv.scatter([5, 2, 8], layers, heads, (0, 11), rows[0])
    host.kv.scatter([5, 2, 8], layers, heads, (0, 11), rows[1])
    drawn = Draw(draw.params, (0,), prompt, [tokens[0][0][0].token_id])
    following = SequenceStep("a", 0, 0, [drawn.generated[0]], 11, [5, 2, 8], drawn)
    assert host.decode([following]) == device.decode([following])


@pytest.mark.parametrize("kv_dtype", ["auto", "float16", "int8", "fp8"])
def test_both_pools_take_and_give_the_same_bytes(model: Path, kv_dtype: str) -> None:
    host, device = (runner.kv for runner in pools(model, kv_dtype))
    shape = (2, 2, 2, 10, host.gather([0], (0, 1), (0, 1), (0, 1)).shape[-1])
    wire = torch.randint(0, 100, (*shape[:-1], shape[-1] * host.dtype.itemsize), dtype=torch.uint8)
    for pool in (host, device):
        pool.scatter([4, 0, 9], (0, 2), (0, 2), (1, 11), wire)
        pool.copy_blocks([(0, 6), (9, 2)])
    for blocks, layers, heads, part in (
        ([4, 0, 9], (0, 2), (0, 2), (1, 11)),
        ([4, 6, 2], (1, 2), (1, 2), (3, 10)),
        ([6], (0, 1), (0, 2), (0, 4)),
    ):
        expected = host.gather(blocks, layers, heads, part)
        found = torch.empty_like(expected.view(-1).view(torch.uint8))
        assert device.gather(blocks, layers, heads, part, found) is found
        assert torch.equal(found, expected.view(-1).view(torch.uint8))


def test_layers_are_announced_when_their_kv_is_there(model: Path) -> None:
    runner, seen = build_device(model, layer_group=1), []

    def on_layers(low: int, high: int) -> None:
        assert runner.kv.data[low:high, :, 3].any(dim=-1).all()
        seen.append((low, high))

    runner.prefill([SequenceStep("a", 0, 0, [1, 2, 3, 4], 0, [3], None)], on_layers)
    assert seen == [(0, 1), (1, 2)]


def test_a_prompt_is_scored(model: Path) -> None:
    found = []
    for runner in (build(model), build_device(model)):
        scores = PromptScores([4, 9, 2], 2)
        runner.prefill([SequenceStep("a", 0, 0, [7, 4, 9, 2], 0, [3], DRAWN_BY_LEADER, scores=scores)], None)
        found.append(scores.found)
    assert [[token for token, _ in one.top] for one in found[0]] == [
        [token for token, _ in one.top] for one in found[1]
    ]
    assert [one.logprob for one in found[0]] == pytest.approx([one.logprob for one in found[1]], abs=1e-4)


def test_warm_up_leaves_an_engine_that_answers_the_same(model: Path) -> None:
    runner = build_device(model)
    assert runner.warm_up() > 0
    assert answers(runner, requests(1, 2), 64) == answers(build(model), requests(1, 2), 64)


def test_a_step_of_the_same_size_is_the_same_graph(model: Path) -> None:
    runner = build_device(model)
    for token, block in ((4, 0), (9, 1)):
        runner.decode([SequenceStep("a", 0, 0, [token], 0, [block], DRAWN_BY_LEADER)])
    assert [(bucket.rows, bucket.longest) for bucket in runner._queue.captured] == [(1, 256)]


@pytest.mark.skipif(not INTERPRETED, reason="the ranks of this test share one device, which NCCL refuses")
def test_tensor_parallel_ranks(model: Path) -> None:
    params = engine_params(model, tensor_parallel=2)
    with followers("baton.tests.gpu.device_rig:follow", 2, json.dumps(dataclasses.asdict(params))) as ranks:
        runner = DeviceRunner(
            params,
            ranks.group,
            lambda done, total: None,
            lambda plan: ranks.channel.broadcast({"kind": "step", "plan": plan}),
            edge(),
        )
        wanted = requests(1, 2)
        assert answers(runner, wanted, 6) == answers(build(model), wanted, 6)
