"""All layers in one call of C: the bits of the parts one by one, for any weights, batch and number of threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from baton.engine import model
from baton.engine.batch import BatchTensors
from baton.engine.params import Quantization
from baton.kernels import decoder_layer
from baton.kernels.decoder_layer import NativeDecoder
from baton.kernels.linear import best_level
from baton.kernels.native import library
from baton.tests.harness.model_rig import CPU, Rig, assert_same_bits, random_tokens
from baton.tests.harness.tiny_model import VOCAB, write_tiny_model
from torch import Tensor

pytestmark = pytest.mark.skipif(library() is None or best_level("bf16") == 0, reason="no C kernels")

SCHEMES: list[Quantization] = ["none", "w8a8", "int4"]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3"},  # norms of queries and keys
}
TOKENS = random_tokens(700, VOCAB, seed=5)


@pytest.fixture(autouse=True)
def _as_many_threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _rigs(monkeypatch: pytest.MonkeyPatch, path: Path, **settings: Any) -> tuple[Rig, Rig]:
    """The model with all layers in one call, and with one call for each part."""
    together = Rig(path, dtype="bfloat16", blocks=96, **settings)
    assert isinstance(together.models[0]._native, NativeDecoder)
    with monkeypatch.context() as patch:
        patch.setattr(decoder_layer, "runs", lambda layers, norm: False)
        apart = Rig(path, dtype="bfloat16", blocks=96, **settings)
    assert apart.models[0]._native is None
    return together, apart


def _model(folder: Path, **settings: Any) -> Path:
    return write_tiny_model(folder, layers=3, hidden=96, heads=6, head_dim=16, dtype="bfloat16", **settings)


def _mixture(rig: Rig) -> Tensor:
    """Chunks of several lengths, then decode rows of several contexts beside a later and a first chunk."""
    lengths, blocks = [1, 17, 64, 65, 130], [10, 11, 14, 20, 26]
    first = [rig.sequence(TOKENS[: n + 1], chunk=50, first_block=b) for n, b in zip(lengths, blocks, strict=True)]
    rig.sequence(TOKENS[200:240], first_block=36)
    steps = [rig.step(TOKENS[: n + 1], n, n + 1, b) for n, b in zip(lengths, blocks, strict=True)]
    chunk, other = rig.step(TOKENS[200:270], 40, 70, 36), rig.step(TOKENS[300:345], 0, 45, 42)
    return torch.cat([*first, rig.forward([*steps[:2], chunk, *steps[2:], other])])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_bits_of_the_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: Quantization, kind: str
) -> None:
    together, apart = _rigs(monkeypatch, _model(tmp_path, **KINDS[kind]), quantization=scheme)
    torch.set_num_threads(1)
    expected = _mixture(apart)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert_same_bits(_mixture(together), expected, f"{threads} threads")
    assert_same_bits(together.pools[0].data[:, :, 10:48], apart.pools[0].data[:, :, 10:48], "keys and values")


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8", "fp8"])
def test_pools_of_another_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kv_dtype: str) -> None:
    together, apart = _rigs(monkeypatch, _model(tmp_path), kv_dtype=kv_dtype)
    assert_same_bits(_mixture(together), _mixture(apart), kv_dtype)


def test_more_rows_than_an_mlp_takes_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model, "_SLAB_BYTES", 1)
    together, apart = _rigs(monkeypatch, _model(tmp_path))
    assert_same_bits(together.sequence(TOKENS), apart.sequence(TOKENS, chunk=300), "700 tokens")


@pytest.mark.parametrize(("group", "expected"), [(1, [(0, 1), (1, 2), (2, 3)]), (2, [(0, 2), (2, 3)]), (8, [(0, 3)])])
def test_layers_are_announced_when_their_kv_is_in_the_pool(
    tmp_path: Path, group: int, expected: list[tuple[int, int]]
) -> None:
    rig = Rig(_model(tmp_path), dtype="bfloat16", layer_group=group)
    seen: list[tuple[int, int]] = []

    def note(low: int, high: int) -> None:
        seen.append((low, high))
        written = rig.pools[0].data.abs().sum((1, 3, 4, 5))[:, 0] > 0
        assert written.tolist() == [layer < high for layer in range(3)]

    noted = rig.forward([rig.step(TOKENS[:10], 0, 10)], note)
    assert seen == expected
    assert_same_bits(_forward(rig, TOKENS[:10], range(10), announce=False), noted, "without an interest in the layers")


@pytest.mark.parametrize("announce", [True, False])
def test_only_the_rows_that_are_asked_for(tmp_path: Path, announce: bool) -> None:
    rig = Rig(_model(tmp_path), dtype="bfloat16")
    whole = rig.sequence(TOKENS[:40])
    for rows in ([], [0], [39], [3, 4, 20], range(40)):
        picked = _forward(rig, TOKENS[:40], rows, announce)
        assert picked.shape == (len(rows), VOCAB)
        assert_same_bits(picked, whole[list(rows)], f"rows {rows}")


def test_a_token_that_is_not_in_the_vocabulary_is_refused(tmp_path: Path) -> None:
    rig = Rig(_model(tmp_path), dtype="bfloat16")
    with pytest.raises(IndexError):
        _forward(rig, [VOCAB], [0], announce=False)


def test_several_ranks_and_other_linears_run_part_by_part(tmp_path: Path) -> None:
    path = _model(tmp_path)
    assert all(one._native is None for one in Rig(path, dtype="bfloat16", ranks=2).models)
    assert Rig(path).models[0]._native is None  # float32
    with pytest.raises(ValueError, match="not for the C kernels"):
        NativeDecoder(Rig(path).models[0]._layers, torch.ones(96), (6, 2, 16), 1e-5, 512)


def _forward(rig: Rig, tokens: Sequence[int], rows: Sequence[int], announce: bool) -> Tensor:
    batch = BatchTensors.build([rig.step(tokens, 0, len(tokens))], rig.block_size, CPU)
    batch = dataclasses.replace(batch, logit_rows=torch.tensor(list(rows), dtype=torch.int64))
    on_layers = (lambda low, high: None) if announce else None
    return rig.models[0].forward(batch, rig.pools[0], on_layers).float()
