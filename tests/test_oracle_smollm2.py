"""The oracle on real weights: SmolLM2-135M through router, prefill, transfer and decode says what Transformers says
(float32), and bit for bit what one local run says (bfloat16)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from baton.tests.harness.hf_reference import Greedy, difference, greedy, load_reference
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.prompts import twenty_prompts
from baton.tests.harness.rig import merged, running
from baton.text.source import resolve
from baton.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m-instruct"
PROMPTS = twenty_prompts()

# Each topology with both carriers and both chunks; chunk with carrier; the unequal block sizes both ways.
FLOAT32_ROWS: dict[str, dict[str, Any]] = {
    "1p1d-block16-chunk512-inline": {"kv.transport": "inline"},
    "2p2d-block8to32-chunk64-gloo": {
        "pools.prefill.replicas": 2,
        "pools.decode.replicas": 2,
        "pools.prefill.block_size": 8,
        "pools.decode.block_size": 32,
        "pools.prefill.max_batch_tokens": 64,
        "kv.transport": "gloo",
    },
    "1p1d-block32to8-chunk64-gloo": {
        "pools.prefill.block_size": 32,
        "pools.decode.block_size": 8,
        "pools.prefill.max_batch_tokens": 64,
        "kv.transport": "gloo",
    },
    "2p2d-block16to32-chunk512-inline": {
        "pools.prefill.replicas": 2,
        "pools.decode.replicas": 2,
        "pools.decode.block_size": 32,
        "kv.transport": "inline",
    },
    "tp1to2-block16to8-chunk512-gloo": {
        "pools.decode.tensor_parallel": 2,
        "pools.decode.block_size": 8,
        "kv.transport": "gloo",
    },
    "tp1to2-block32to16-chunk64-inline": {
        "pools.decode.tensor_parallel": 2,
        "pools.prefill.block_size": 32,
        "pools.prefill.max_batch_tokens": 64,
        "kv.transport": "inline",
    },
    "tp2to1-block8to16-chunk64-inline": {
        "pools.prefill.tensor_parallel": 2,
        "pools.prefill.block_size": 8,
        "pools.prefill.max_batch_tokens": 64,
        "kv.transport": "inline",
    },
    "tp2to1-block32to8-chunk512-gloo": {
        "pools.prefill.tensor_parallel": 2,
        "pools.prefill.block_size": 32,
        "pools.decode.block_size": 8,
        "kv.transport": "gloo",
    },
    "tp1to3-block8to32-chunk512-inline": {
        "pools.decode.tensor_parallel": 3,
        "pools.prefill.block_size": 8,
        "pools.decode.block_size": 32,
        "kv.transport": "inline",
    },
    "tp1to3-block32to16-chunk64-gloo": {
        "pools.decode.tensor_parallel": 3,
        "pools.prefill.block_size": 32,
        "pools.prefill.max_batch_tokens": 64,
        "kv.transport": "gloo",
    },
}
BFLOAT16_ROWS: dict[str, dict[str, Any]] = {
    "1p1d-block16-chunk512-inline": {"kv.transport": "inline"},
    "1p1d-block8to32-chunk64-gloo": {
        "pools.prefill.block_size": 8,
        "pools.decode.block_size": 32,
        "pools.prefill.max_batch_tokens": 64,
        "kv.transport": "gloo",
    },
    "2p2d-block32to8-chunk512-gloo": {
        "pools.prefill.replicas": 2,
        "pools.decode.replicas": 2,
        "pools.prefill.block_size": 32,
        "pools.decode.block_size": 8,
        "kv.transport": "gloo",
    },
    "1p1d-preemption-chunk64-inline": {
        "pools.decode.memory": "48MiB",  # about 2,100 tokens for 20 requests of 2,800 tokens
        "pools.prefill.max_batch_tokens": 64,
        "kv.transport": "inline",
    },
}


def _config(dtype: str, changes: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"path": MODEL, "dtype": dtype},
        "cluster": {"launcher": "process", "stop_grace": "3s"},
        "pools": {"prefill": {"threads": 1}, "decode": {"threads": 1}},
        "router": {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
    }
    return merged(base, changes)


def _prompt_ids(tokenizer: Tokenizer) -> list[list[int]]:
    return [
        line.get("prompt_token_ids") or tokenizer.encode(line["prompt"], special=True, bos=None) for line in PROMPTS
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve(MODEL))


@pytest.fixture(scope="module")
def reference(tokenizer: Tokenizer) -> list[Greedy]:
    model = load_reference(resolve(MODEL).path)
    return [greedy(model, ids, 64, tokenizer.eos_token_ids) for ids in _prompt_ids(tokenizer)]


@pytest.fixture(scope="module")
def local_bfloat16(tokenizer: Tokenizer) -> list[list[int]]:
    engine = Monolithic(MODEL, dtype="bfloat16")
    stops = {"max_tokens": 64, "stop_token_ids": tokenizer.eos_token_ids}
    return [engine.run(ids, **stops)[0].token_ids for ids in _prompt_ids(tokenizer)]


def _differences(answers: Sequence[Sequence[int]], reference: Sequence[Greedy]) -> dict[str, str]:
    found = {
        line["id"]: difference(answer, expected)
        for line, answer, expected in zip(PROMPTS, answers, reference, strict=True)
    }
    return {name: text for name, text in found.items() if text}


def _answers(folder: Path, config: dict[str, Any], prompts: list[list[int]]) -> list[list[int]]:
    with running(folder, config) as rig, ThreadPoolExecutor(len(prompts)) as threads:
        return list(
            threads.map(
                lambda ids: rig.client.generate(600, token_ids=ids, max_tokens=64, temperature=0).token_ids, prompts
            )
        )


def test_generate_over_local_yaml_equals_transformers(tmp_path: Path, reference: list[Greedy]) -> None:
    """The command a user would type, on Ray."""
    questions = tmp_path / "prompts.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    command = [sys.executable, "-m", "baton.cluster.cli", "generate", "--config", "configs/local.yaml", "--json"]
    ports = [f"--set=router.{name}=127.0.0.1:0" for name in ("grpc", "http", "admin")]
    done = subprocess.run(
        [*command, "--set=model.dtype=float32", *ports, "--input", str(questions)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["id"] for answer in answers] == [line["id"] for line in PROMPTS]
    assert _differences([answer["token_ids"] for answer in answers], reference) == {}


@pytest.mark.parametrize("row", FLOAT32_ROWS)
def test_float32_row_equals_transformers(
    row: str, tmp_path: Path, tokenizer: Tokenizer, reference: list[Greedy]
) -> None:
    answers = _answers(tmp_path, _config("float32", FLOAT32_ROWS[row]), _prompt_ids(tokenizer))
    assert _differences(answers, reference) == {}


@pytest.mark.parametrize("row", BFLOAT16_ROWS)
def test_bfloat16_row_is_bit_equal_to_one_local_run(
    row: str, tmp_path: Path, tokenizer: Tokenizer, local_bfloat16: list[list[int]]
) -> None:
    answers = _answers(tmp_path, _config("bfloat16", BFLOAT16_ROWS[row]), _prompt_ids(tokenizer))
    assert answers == local_bfloat16
