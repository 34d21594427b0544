"""The monolithic engine against Hugging Face Transformers, token for token in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from baton.engine.block_pool import BlockPool
from baton.engine.local import LocalEngine
from baton.tests.harness.hf_reference import Greedy, difference, greedy, load_reference
from baton.tests.harness.prompts import TEXTS, long_text
from baton.tests.harness.ranks import leader
from baton.tests.harness.tiny_model import write_tiny_model
from baton.tests.test_engine_local import ids, mixed, run, sampling
from baton.tests.test_engine_runner import build, engine_params
from baton.text.source import ModelSource
from baton.text.tokenizer import Tokenizer

MAX_TOKENS = 20


def edges(block_size: int) -> list[int]:
    """Prompt lengths around the edges of the first blocks."""
    return sorted({1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size + 1})


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(i * i * 31 + 17 * i + 101 * seed + length) % 300 for i in range(length)]


@pytest.fixture(scope="module")
def references(tiny_dir: Path) -> dict[int, Greedy]:
    """What Transformers says to every prompt length used here."""
    model = load_reference(tiny_dir)
    lengths = {length for block_size in (4, 8, 16, 32) for length in edges(block_size) if length}
    return {length: greedy(model, prompt_of(length), MAX_TOKENS, frozenset()) for length in sorted(lengths)}


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
def test_kv_05_lengths_around_block_edges(
    tiny_dir: Path, references: dict[int, Greedy], block_size: int, chunk: int
) -> None:
    runner = build(tiny_dir, block_size=block_size, kv_blocks=1024 // block_size)
    lengths = [length for length in edges(block_size) if length]
    for max_tokens in (1, 2, MAX_TOKENS):
        requests = [(prompt_of(n), sampling(temperature=0.0, max_tokens=max_tokens)) for n in lengths]
        results, _, _ = run(runner, requests, chunk=chunk)
        for length, (choice,) in zip(lengths, results, strict=True):
            reference = references[length]
            short = Greedy(reference.token_ids[:max_tokens], reference.margins[:max_tokens])
            assert difference(choice.token_ids, short) == "", f"prompt of {length}"


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("llama", {"heads": 9, "kv_heads": 3, "hidden": 72, "head_dim": 8}),
        ("llama", {"attention_bias": True, "tie": False, "head_dim": 32}),
        ("mistral", {"kv_heads": 1}),
        ("qwen2", {"tie": False}),
        ("qwen3", {"head_dim": 32}),
        (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
    ],
)
def test_every_architecture_through_the_whole_loop(tmp_path: Path, arch: str, overrides: dict[str, Any]) -> None:
    path = write_tiny_model(tmp_path / "model", arch=arch, seed=3, **overrides)
    reference = load_reference(path)
    lengths = [2, 17, 40, 100]
    requests = [(prompt_of(n, 1), sampling(temperature=0.0, max_tokens=MAX_TOKENS)) for n in lengths]
    results, _, _ = run(build(path, kv_blocks=128), requests, chunk=24)
    for (prompt, _), (choice,) in zip(requests, results, strict=True):
        assert difference(choice.token_ids, greedy(reference, prompt, MAX_TOKENS, frozenset())) == ""


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"),
    [(2, 4, 2), (2, 9, 3), (3, 9, 3), (2, 4, 1)],
    ids=["even", "uneven", "three", "replicated"],
)
def test_tensor_parallel_equals_one_rank(tmp_path: Path, ranks: int, heads: int, kv_heads: int) -> None:
    """In float32, with real gloo processes; sampled and greedy, several choices, preemption."""
    path = write_tiny_model(tmp_path / "model", heads=heads, kv_heads=kv_heads, hidden=72)
    expected, _, _ = run(build(path), mixed())
    with leader(engine_params(path, tensor_parallel=ranks)) as group:
        pool = BlockPool(12, 4, True)
        engine = LocalEngine(group.runner, pool, group.copy_blocks)
        assert ids(engine.generate(mixed(), 16, 8)) == ids(expected)
        assert engine.preemptions > 0
        assert pool.used == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_weights_equal_transformers(smol_source: ModelSource, smol_tokenizer: Tokenizer) -> None:
    """SmolLM2-135M in float32, all prompts in one batch."""
    texts = [*(TEXTS[name] for name in ("one-token", "question", "german", "chinese", "python")), long_text(30)]
    prompts = [smol_tokenizer.encode(text, special=True, bos=None) for text in texts]
    requests = [(prompt, sampling(temperature=0.0, max_tokens=MAX_TOKENS)) for prompt in prompts]
    runner = build(Path("smollm2-135m-instruct"), block_size=16, kv_blocks=64, layer_group=6)
    results, _, _ = run(runner, requests, chunk=100)
    reference = load_reference(smol_source.path)
    for prompt, (choice,) in zip(prompts, results, strict=True):
        assert difference(choice.token_ids, greedy(reference, prompt, MAX_TOKENS, frozenset())) == ""
