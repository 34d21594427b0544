"""Checkpoints that are quantised already, written here in each format: read as what their codes stand for, kept in
their bits, and refused by name where they are of another kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from baton.engine.checkpoint_format import checkpoint_format
from baton.engine.model_config import load_config
from baton.engine.quantized import Int4Weight, Int8Weight
from baton.engine.weights import Weights
from baton.proto.errors import ConfigError
from baton.tests.harness.model_rig import Rig, random_tokens, silent
from baton.tests.harness.tiny_model import VOCAB, write_tiny_model
from baton.text.source import resolve
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 64
TOKENS = random_tokens(40, VOCAB)
Parts = dict[str, Tensor]
Written = tuple[Parts, Tensor]  # the tensors of a layer, and the weight that they stand for

INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True
            },
        }
    },
}  # fmt: skip
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
            "input_activations": None,
        }
    },
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def _pack(codes: Tensor, order: list[int]) -> Tensor:
    """Eight codes of a row to an int32: code order[i] in bits 4 i to 4 i + 3."""
    eights = codes.long().view(codes.shape[0], -1, 8)
    total = sum(eights[:, :, place] << (4 * i) for i, place in enumerate(order))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def _int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [outputs, inputs], scales and zero points [outputs, groups], and what they stand for."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    exact = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.view(weight.shape), scales, zeros, exact.view(weight.shape)


def _write_int8(weight: Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def _write_packed(weight: Tensor) -> Written:
    groups = weight.view(weight.shape[0], -1, GROUP)
    scales = (groups.abs().amax(-1) / 7).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    parts = {
        "weight_packed": _pack((codes + 8).view(weight.shape), list(range(8))),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, (codes * scales.float()[..., None]).view(weight.shape)


def _write_packed_with_zeros(weight: Tensor) -> Written:
    codes, scales, zeros, exact = _int4(weight)
    parts = {
        "weight_packed": _pack(codes, list(range(8))),
        "weight_scale": scales,
        "weight_zero_point": _pack(zeros.t().contiguous(), list(range(8))).t().contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, exact


def _write_gptq(weight: Tensor) -> Written:
    codes, scales, zeros, exact = _int4(weight)
    parts = {
        "qweight": _pack(codes, list(range(8))).t().contiguous(),
        "qzeros": _pack(zeros.t().contiguous() - 1, list(range(8))),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return parts, exact


def _write_awq(weight: Tensor) -> Written:
    codes, scales, zeros, exact = _int4(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {
        "qweight": _pack(codes.t().contiguous(), order),
        "qzeros": _pack(zeros.t().contiguous(), order),
        "scales": scales.t().contiguous(),
    }
    return parts, exact


ASYMMETRIC = json.loads(json.dumps(PACKED).replace('"symmetric": true', '"symmetric": false'))
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "compressed-tensors int8": (INT8, _write_int8),
    "compressed-tensors 4 bits": (PACKED, _write_packed),
    "compressed-tensors 4 bits, zero points": (ASYMMETRIC, _write_packed_with_zeros),
    "gptq": (GPTQ, _write_gptq),
    "awq": (AWQ, _write_awq),
}


def _write(folder: Path, name: str) -> tuple[Path, Path]:
    """A quantised checkpoint, and one of the plain weights that it stands for."""
    config, write = FORMATS[name]
    plain = write_tiny_model(folder / "plain", hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate_size=128)
    quantised = folder / "quantised"
    quantised.mkdir()
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for key, tensor in tensors.items():
        if not key.endswith("_proj.weight"):
            stored[key] = tensor
            continue
        parts, exact = write(tensor.float())
        stored |= {key.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
        tensors[key] = exact.contiguous()
    save_file(stored, quantised / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    settings = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    return quantised, plain


@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_are_those_of_the_codes(tmp_path: Path, name: str) -> None:
    quantised, plain = _write(tmp_path, name)
    torch.testing.assert_close(Rig(quantised).sequence(TOKENS), Rig(plain).sequence(TOKENS), atol=0.02, rtol=0.02)
    for rank, ranks in ((0, 1), (1, 2)):
        kept, exact = (
            Weights.open(resolve(str(path)), load_config(resolve(str(path))), dtype, "none", rank, ranks, silent).layer(
                1
            )
            for path, dtype in ((quantised, torch.bfloat16), (plain, torch.float32))
        )
        for part in ("qkv", "output", "gate_up", "down"):
            ours = getattr(kept, part)
            assert isinstance(ours, Int8Weight if "int8" in name else Int4Weight)
            torch.testing.assert_close(ours.dequantize(), getattr(exact, part), atol=1e-3, rtol=2e-3)


def test_it_runs_on_its_codes(tmp_path: Path) -> None:
    quantised, plain = _write(tmp_path, "gptq")
    ours, expected = Rig(quantised, dtype="bfloat16").sequence(TOKENS), Rig(plain, dtype="bfloat16").sequence(TOKENS)
    assert torch.nn.functional.cosine_similarity(ours.flatten(), expected.flatten(), dim=0) > 0.98
    with pytest.raises(ConfigError, match=r"model\.quantization: w8a8, but .* is quantised as int4 already"):
        Rig(quantised, dtype="bfloat16", quantization="w8a8")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({**GPTQ, "bits": 8}, "gptq with bits 8"),
        ({**GPTQ, "desc_act": True}, "gptq with desc_act True"),
        ({**GPTQ, "group_size": 48}, "gptq with group_size 48"),
        ({**AWQ, "version": "gemv"}, "awq with version 'gemv'"),
        (json.loads(json.dumps(INT8).replace('"dynamic": true', '"dynamic": false')), "dynamic False"),
        (json.loads(json.dumps(PACKED).replace('"num_bits": 4', '"num_bits": 8')), "8-bit weights without"),
        (json.loads(json.dumps(PACKED).replace('"int"', '"float"')), "type 'float'"),
        ({**PACKED, "config_groups": {}}, "0 config_groups"),
    ],
)
def test_other_formats_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checkpoint_format({"quantization_config": config})


def test_a_layer_without_its_scales_is_named(tmp_path: Path) -> None:
    quantised, _ = _write(tmp_path, "awq")
    tensors = load_file(quantised / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.up_proj\.qweight has no scales beside it"):
        Rig(quantised)
