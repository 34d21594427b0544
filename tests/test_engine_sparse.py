"""2:4 sparse checkpoints, written here in each form: the same answers as the dense weights with the zeros in them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from baton.engine import sparse24
from baton.engine.checkpoint_format import checkpoint_format, declares_sparsity
from baton.engine.model_config import load_config
from baton.engine.sparse24 import SparseLinears, is_sparse
from baton.engine.weights import Weights
from baton.kernels.linear import Linear
from baton.proto.errors import ConfigError
from baton.tests.harness.model_rig import Rig, random_tokens, silent
from baton.tests.harness.tiny_model import VOCAB, write_tiny_model
from baton.tests.test_engine_runner import build
from baton.text.source import resolve
from safetensors.torch import load_file, save_file
from torch import Tensor

TOKENS = random_tokens(30, VOCAB)
CPU = torch.device("cpu")


def pruned(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight with the two smaller of every four inputs set to zero, and which were kept."""
    fours = weight.view(-1, 4)
    kept = torch.zeros_like(fours, dtype=torch.bool)
    kept.scatter_(1, fours.abs().topk(2, dim=1).indices, True)
    return (fours * kept).view(weight.shape), kept.view(weight.shape)


def bitmask(weight: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """The parts of a weight as compressed-tensors stores them; the first of eight inputs is the lowest bit."""
    powers = 2 ** torch.arange(8)
    mask = (kept.view(weight.shape[0], -1, 8) * powers).sum(-1).to(torch.uint8)
    values = weight[kept].view(weight.shape[0], -1)
    return {"compressed": values, "bitmask": mask, "shape": torch.tensor(weight.shape)[:, None]}


def sparsity(form: str) -> dict[str, Any]:
    """What config.json says."""
    config = {"format": form, "sparsity_structure": "2:4", "targets": ["Linear"], "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "sparsity_config": config}


def write(folder: Path, form: str) -> Path:
    """A checkpoint of pruned weights: "sparse-24-bitmask", "dense", or "plain", which does not say what it is."""
    model = write_tiny_model(folder / form, hidden=64, heads=4, kv_heads=2, intermediate_size=96)
    stored: dict[str, Tensor] = {}
    for key, tensor in load_file(model / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            stored[key] = tensor
            continue
        weight, kept = pruned(tensor)
        parts = bitmask(weight, kept) if form == "sparse-24-bitmask" else {"weight": weight}
        stored |= {key.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
    save_file(stored, model / "model.safetensors")
    if form != "plain":
        settings = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**settings, "quantization_config": sparsity(form)}))
    return model


@pytest.mark.parametrize("form", ["sparse-24-bitmask", "dense"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sparse_checkpoint_answers_as_its_dense_weights(tmp_path: Path, form: str, dtype: str) -> None:
    ours, plain = write(tmp_path, form), write(tmp_path, "plain")
    assert torch.equal(Rig(ours, dtype=dtype).sequence(TOKENS), Rig(plain, dtype=dtype).sequence(TOKENS))
    assert (declares_sparsity(ours), declares_sparsity(plain)) == (True, False)


def test_every_rank_reads_its_part(tmp_path: Path) -> None:
    ours, plain = (resolve(str(write(tmp_path, form))) for form in ("sparse-24-bitmask", "plain"))
    for rank in range(2):
        one, other = (
            Weights.open(source, load_config(source), torch.float32, "none", rank, 2, silent).layer(1)
            for source in (ours, plain)
        )
        for part in ("qkv", "output", "gate_up", "down"):
            assert torch.equal(getattr(one, part), getattr(other, part))
            assert is_sparse(getattr(one, part))


def test_sparse_weights_may_be_quantised_like_any_others(tmp_path: Path) -> None:
    ours, plain = write(tmp_path, "sparse-24-bitmask"), write(tmp_path, "plain")
    one, other = (Rig(path, dtype="bfloat16", quantization="w8a8").sequence(TOKENS) for path in (ours, plain))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("setting", "form", "said"),
    [("auto", "dense", 8), ("auto", "plain", 0), ("2:4", "plain", 8), ("none", "dense", 0)],
)
def test_a_cpu_says_once_that_it_runs_them_dense(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: str, form: str, said: int
) -> None:
    with caplog.at_level(logging.INFO, "baton.engine.sparse24"):
        build(write(tmp_path, form), sparsity=setting)
    notes = [record.getMessage() for record in caplog.records if record.name == "baton.engine.sparse24"]
    assert len(notes) == (1 if said else 0)
    assert all(
        f"in {said} linear layers run dense" in note and "a CPU has no sparse products" in note for note in notes
    )


def test_sparse_products_are_asked_for_in_vain(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.sparsity: 2:4, but no linear layer .*; use none"):
        build(tiny_dir, sparsity="2:4")


def test_on_a_gpu_only_weights_that_are_sparse_go_the_sparse_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products themselves need CUDA; which weights get there does not."""
    asked: list[Tensor] = []

    def made(weight: Tensor, bias: Tensor | None) -> Linear:
        asked.append(weight)
        return lambda rows: rows @ weight.T

    monkeypatch.setattr(sparse24, "semi_structured", made)
    sparse, dense = pruned(torch.randn(8, 16))[0], torch.randn(8, 16)
    linears = SparseLinears("auto", declared=True, device=torch.device("cuda"))
    assert linears.linear(sparse, None) is not None
    assert linears.linear(dense, None) is None
    assert [weight is sparse for weight in asked] == [True]
    linears.report()
    assert SparseLinears("none", declared=True, device=torch.device("cuda")).linear(sparse, None) is None
    assert SparseLinears("auto", declared=False, device=torch.device("cuda")).linear(sparse, None) is None


def test_what_counts_as_sparse() -> None:
    assert is_sparse(torch.tensor([[0.0, 1, 0, 2, 3, 0, 0, 0]]))
    assert not is_sparse(torch.tensor([[0.0, 1, 5, 2, 3, 0, 0, 0]]))
    assert not is_sparse(torch.zeros(2, 6))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("bitmask", None, r"up_proj\.bitmask U8 \[96, 8\] beside it; found none"),
        ("bitmask", torch.zeros(96, 4, dtype=torch.uint8), r"found U8 \[96, 4\]"),
        ("bitmask", torch.full((96, 8), 7, dtype=torch.uint8), "not two of every four inputs are kept"),
    ],
)
def test_damaged_parts_are_named(tmp_path: Path, part: str, value: Tensor | None, message: str) -> None:
    model = write(tmp_path, "sparse-24-bitmask")
    tensors = load_file(model / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{part}"
    del tensors[name]
    save_file(tensors if value is None else {**tensors, name: value}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        Rig(model)


def test_other_sparse_formats_are_refused_by_name() -> None:
    config = sparsity("sparse-bitmask")
    with pytest.raises(ConfigError, match="sparsity_config with format 'sparse-bitmask'"):
        checkpoint_format({"quantization_config": config})
    config = sparsity("sparse-24-bitmask")
    config["sparsity_config"]["sparsity_structure"] = "unstructured"
    with pytest.raises(ConfigError, match="sparsity_structure 'unstructured'"):
        checkpoint_format({"quantization_config": config})
