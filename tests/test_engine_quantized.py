"""Quantised weights: close to what they stand for, kept as they are where the file has them, the same for any batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from baton.engine.model_config import load_config
from baton.engine.params import Quantization
from baton.engine.quantized import Int4Weight, Int8Weight, Weight, full, join, quantize
from baton.engine.ranks import SingleRank
from baton.engine.runner import Runner
from baton.engine.weights import Weights
from baton.engine.weights_gguf import GGUFStore
from baton.kernels.linear import GROUP
from baton.proto.errors import ConfigError
from baton.tests.harness.model_rig import Rig, engine_params, random_tokens, silent
from baton.tests.harness.tiny_gguf import write_gguf
from baton.tests.harness.tiny_model import VOCAB, write_tiny_model
from baton.text.source import resolve

SCHEMES: list[Quantization] = ["w8a8", "int4"]
TOKENS = random_tokens(60, VOCAB)


def _weight(outputs: int = 40, inputs: int = 96) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_codes_are_the_nearest() -> None:
    weight = _weight()
    int8, int4 = quantize(weight, "w8a8"), quantize(weight, "int4")
    assert isinstance(int8, Int8Weight)
    assert isinstance(int4, Int4Weight)
    assert int4.minima is not None
    error = (int8.dequantize() - weight.float()).abs()
    assert (error <= int8.scales.repeat_interleave(64, 1)[:, :96] * 0.5001).all()
    error = (int4.dequantize() - weight.float()).abs().view(40, -1, GROUP)
    assert (error <= int4.scales.float()[..., None] * 0.51 + 1e-3).all()
    assert quantize(weight, "none") is weight


def test_zeros_and_single_values_have_codes() -> None:
    for scheme in SCHEMES:
        assert torch.equal(full(quantize(torch.zeros(3, 64), scheme)), torch.zeros(3, 64))
        torch.testing.assert_close(full(quantize(torch.full((3, 64), 0.5), scheme)), torch.full((3, 64), 0.5))


def test_inputs_that_are_no_whole_groups_become_int8() -> None:
    assert isinstance(quantize(_weight(inputs=40), "int4"), Int8Weight)


def test_parts_are_joined_without_loss() -> None:
    plain, other = quantize(_weight(8), "int4"), quantize(_weight(16) * 2, "int4")
    assert isinstance(other, Int4Weight)
    symmetric = Int4Weight(other.codes, other.scales, None)
    parts: list[Weight] = [plain, symmetric]
    joined = join(parts)
    assert isinstance(joined, Int4Weight)
    assert torch.equal(full(joined), torch.cat([full(plain), full(symmetric)]))
    mixed = join([plain, quantize(_weight(16), "w8a8")])
    assert isinstance(mixed, Int8Weight)
    torch.testing.assert_close(full(mixed)[:8], full(plain), atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_blocks_of_a_gguf_are_used_as_they_are(tmp_path: Path, kind: str) -> None:
    original = write_tiny_model(tmp_path / "a", hidden=64, heads=4, kv_heads=2, head_dim=32, intermediate_size=64)
    write_gguf(original, tmp_path / "model.gguf", kind)
    source = resolve(str(tmp_path / "model.gguf"))
    config = load_config(source)
    store = GGUFStore(source.path, config.head_dim)
    kinds: list[tuple[torch.dtype, Quantization]] = [(torch.float32, "none"), (torch.bfloat16, "int4")]
    for rank, ranks in ((0, 1), (1, 2)):
        plain, kept = (
            Weights.open(source, config, dtype, scheme, rank, ranks, silent).layer(1) for dtype, scheme in kinds
        )
        for name in ("qkv", "output", "gate_up", "down"):
            ours, exact = getattr(kept, name), getattr(plain, name)
            assert isinstance(ours, Int4Weight)
            assert torch.equal(ours.dequantize(), exact), name
    assert store.quantized_group("model.layers.0.mlp.up_proj.weight", "w8a8") == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_model_is_close_and_does_not_depend_on_the_chunks(tmp_path: Path, scheme: Quantization) -> None:
    path = write_tiny_model(tmp_path, hidden=64, heads=4, kv_heads=2, head_dim=32, intermediate_size=128)
    exact = Rig(path).sequence(TOKENS)
    rig = Rig(path, dtype="bfloat16", quantization=scheme)
    whole = rig.sequence(TOKENS)
    assert torch.equal(rig.sequence(TOKENS, chunk=7, first_block=20), whole)
    split = Rig(path, dtype="bfloat16", quantization=scheme, ranks=2).sequence(TOKENS)
    for ours in (whole, split):
        assert torch.nn.functional.cosine_similarity(ours.flatten(), exact.flatten(), dim=0) > 0.9
    assert rig.weights[0].fingerprint != Rig(path, dtype="bfloat16").weights[0].fingerprint


def test_without_the_library_the_weights_are_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path)
    expected = Rig(path, dtype="bfloat16").sequence(TOKENS)
    monkeypatch.setattr("baton.engine.linear.library", lambda: None)
    ours = Rig(path, dtype="bfloat16", quantization="w8a8").sequence(TOKENS)
    assert torch.nn.functional.cosine_similarity(ours.flatten(), expected.flatten(), dim=0) > 0.95


def test_only_bfloat16_is_quantised(tmp_path: Path) -> None:
    params = engine_params(tmp_path, "float32", 16, 1, True, 1, quantization="w8a8")
    with pytest.raises(ConfigError, match=r"model\.quantization: w8a8 needs model\.dtype bfloat16"):
        Runner(params, SingleRank(), silent, None)
