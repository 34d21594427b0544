"""bfloat16 with batch_invariant: equal bits whatever the chunk, the batch and the block size; no tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from baton.engine import linear, paged_kv
from baton.kernels import cpu_attention, rms_norm, rotary, silu_mul
from baton.tests.harness.model_rig import Rig, assert_same_bits, random_tokens
from baton.tests.harness.tiny_model import VOCAB, write_tiny_model
from torch import Tensor


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that oneDNN blocks by the number of rows."""
    directory = tmp_path_factory.mktemp("bits")
    return write_tiny_model(
        directory, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate_size=1536, dtype="bfloat16"
    )


@pytest.fixture(scope="module")
def rig(path: Path) -> Rig:
    return Rig(path, dtype="bfloat16", blocks=160)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return random_tokens(600, VOCAB, seed=3)


@pytest.fixture(scope="module")
def whole(rig: Rig, tokens: list[int]) -> Tensor:
    return rig.sequence(tokens)


@pytest.mark.parametrize("chunk", [7, 64, 200, 512])
def test_any_chunk(rig: Rig, tokens: list[int], whole: Tensor, chunk: int) -> None:
    assert_same_bits(rig.sequence(tokens, chunk=chunk), whole, f"chunk {chunk}")


@pytest.mark.parametrize("block_size", [4, 8, 12, 32])
def test_any_block_size(path: Path, tokens: list[int], whole: Tensor, block_size: int) -> None:
    rig = Rig(path, dtype="bfloat16", blocks=640 // block_size, block_size=block_size)
    assert_same_bits(rig.sequence(tokens, chunk=100), whole, f"block size {block_size}")


def test_decode_continues_a_prefill(rig: Rig, tokens: list[int], whole: Tensor) -> None:
    rig.forward([rig.step(tokens, 0, 505)])
    decoded = torch.cat([rig.forward([rig.step(tokens, at, at + 1)]) for at in range(505, 525)])
    assert_same_bits(decoded, whole[505:525], "decode")


def test_any_batch(rig: Rig, tokens: list[int], whole: Tensor) -> None:
    """Decode rows of several lengths, a chunk behind a prefix and a first chunk in one step."""
    lengths = [1, 2, 63, 64, 65, 200, 511]
    blocks = [40 + sum(n // 16 + 1 for n in lengths[:i]) for i in range(len(lengths))]
    for length, block in zip(lengths, blocks, strict=True):
        prompt = tokens[: length + 1]
        rig.forward([rig.step(prompt, 0, length, block)])
    rig.forward([rig.step(tokens, 0, 300)])
    other = random_tokens(90, VOCAB, seed=4)
    steps = [rig.step(tokens[: n + 1], n, n + 1, b) for n, b in zip(lengths, blocks, strict=True)]
    mixed = rig.forward([*steps[:3], rig.step(tokens, 300, 433), *steps[3:], rig.step(other, 0, 90, 130)])
    rows = [*lengths[:3], *range(300, 433), *lengths[3:]]
    assert_same_bits(mixed[: len(rows)], whole[rows], "mixed batch")


def test_two_ranks(path: Path, tokens: list[int]) -> None:
    rig = Rig(path, dtype="bfloat16", ranks=2)
    assert_same_bits(rig.sequence(tokens, chunk=64), rig.sequence(tokens), "two ranks")


def test_garbage_behind_a_sequence_does_not_matter(rig: Rig, tokens: list[int], whole: Tensor) -> None:
    for pool in rig.pools:
        pool.data.fill_(float("nan"))
    assert_same_bits(rig.sequence(tokens, chunk=90), whole, "a pool of NaN")
    for pool in rig.pools:
        pool.data.zero_()


def test_without_the_switch_it_is_still_near(path: Path, tokens: list[int], whole: Tensor) -> None:
    loose = Rig(path, dtype="bfloat16", batch_invariant=False).sequence(tokens, chunk=100)
    assert float((loose - whole).abs().mean()) < 0.05


def test_without_the_library(path: Path, tokens: list[int], whole: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's path keeps its bits, too, and is near those of the C kernels."""
    for module in (cpu_attention, linear, paged_kv):
        monkeypatch.setattr(module, "library", lambda: None)
    for operation in (rms_norm, rotary, silu_mul):
        monkeypatch.setattr(operation, "function", lambda name, arguments: None)
    rig = Rig(path, dtype="bfloat16", blocks=40)
    expected = rig.sequence(tokens[:150])
    assert_same_bits(rig.sequence(tokens[:150], chunk=70), expected, "chunk 70")
    decoded = torch.cat([rig.forward([rig.step(tokens[:150], at, at + 1)]) for at in range(140, 150)])
    assert_same_bits(decoded, expected[140:], "decode")
    assert float((expected - whole[:150]).abs().mean()) < 0.1
