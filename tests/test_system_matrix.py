"""O-eq over named rows that cover tensor parallelism, block sizes, chunks, carriers and dtypes pairwise (KV-01).

float32: the tokens are those of Transformers. bfloat16 at equal TP: the tokens and logprobs are those of one local run,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.oracles import Reference
from baton.tests.harness.rig import Rig, merged, running, tiny_config
from baton.tests.harness.tiny_model import write_tiny_model


class Row(NamedTuple):
    """One cluster."""

    name: str
    tp: tuple[int, int]
    blocks: tuple[int, int]  # tokens
    chunk: int
    transport: str
    dtype: str


FLOAT32 = [
    Row("tp1-tp1-inline", (1, 1), (16, 16), 512, "inline", "float32"),
    Row("tp1-tp2-gloo", (1, 2), (8, 32), 64, "gloo", "float32"),
    Row("tp2-tp1-shm", (2, 1), (32, 8), 64, "shm", "float32"),
    Row("tp1-tp3-gloo", (1, 3), (16, 8), 512, "gloo", "float32"),
    Row("tp2-tp2-gloo", (2, 2), (4, 16), 24, "gloo", "float32"),
]
BFLOAT16 = [
    Row("bf16-tp1-gloo", (1, 1), (8, 32), 64, "gloo", "bfloat16"),
    Row("bf16-tp1-inline", (1, 1), (16, 4), 24, "inline", "bfloat16"),
]
LENGTHS = (1, 7, 8, 9, 31, 32, 33, 64, 65, 150)


def rows(of: list[Row], slow: tuple[int, ...]) -> list[Any]:
    """The rows as parameters; those at the indices `slow` are for the slow suite."""
    return [pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (at in slow)) for at, row in enumerate(of)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 query and 3 KV heads, as SmolLM2 has: TP 2 splits 2 + 1, TP 3 evenly."""
    place = tmp_path_factory.mktemp("matrix") / "tiny-9-3"
    return write_tiny_model(place, hidden=144, heads=9, kv_heads=3, head_dim=16, seed=4)


def ids(length: int) -> list[int]:
    """A prompt of byte tokens."""
    return [(length * 31 + i * i * 7 + i) % 256 for i in range(length)]


@pytest.fixture
def rig(row: Row, model: Path, tmp_path: Path) -> Iterator[Rig]:
    changes: dict[str, Any] = {"model.dtype": row.dtype, "kv.transport": row.transport}
    for pool, tp, block in zip(("prefill", "decode"), row.tp, row.blocks, strict=True):
        changes |= {
            f"pools.{pool}.tensor_parallel": tp,
            f"pools.{pool}.block_size": block,
            f"pools.{pool}.memory": "8MiB",
        }
    changes["pools.prefill.max_batch_tokens"] = row.chunk
    with running(tmp_path / "rig", merged(tiny_config(model), changes)) as started:
        yield started


@pytest.mark.parametrize("row", rows(FLOAT32, slow=(1, 4)))
def test_kv_01_float32_equals_transformers(rig: Rig, row: Row, model: Path) -> None:
    reference = Reference(model, frozenset())
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: rig.client.generate(token_ids=ids(n), **fields), LENGTHS))
    for length, answer in zip(LENGTHS, answers, strict=True):
        reference.check(ids(length), answer.token_ids, 24, stops=False)
        assert answer.timing.kv_bytes == length * 2 * 2 * 3 * 16 * 4  # layers x (k, v) x heads x head_dim x float32
    again = rig.client.generate(token_ids=ids(150), **fields)  # a prefix hit on both sides
    assert again.token_ids == answers[-1].token_ids
    assert again.timing.prefill_cached_tokens > 0


@pytest.mark.parametrize("row", rows(BFLOAT16, slow=(1,)))
def test_st_10_bfloat16_is_bit_equal_to_one_local_run(rig: Rig, row: Row, model: Path) -> None:
    local = Monolithic(model, dtype="bfloat16")
    greedy: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "logprobs": 3}
    sampled = greedy | {"temperature": 1.0, "seed": 11, "n": 3}
    for length in LENGTHS:
        for fields in (greedy, sampled):
            answer = rig.client.generate(token_ids=ids(length), ignore_eos=True, **fields)
            for choice, expected in zip(answer.choices, local.run(ids(length), **fields), strict=True):
                assert choice.token_ids == expected.token_ids
                scores = [pytest.approx(token.logprob, rel=1e-6) for token in expected.tokens]  # float32 on the wire
                assert [entry.logprob for entry in choice.logprobs] == scores
