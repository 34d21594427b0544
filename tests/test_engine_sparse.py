"""2:4 sparse checkpoints, written here in each form: the same answers as the dense weights with the zeros in them."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from baton.engine import device_model
from baton.engine.block_pool import BlockPool
from baton.engine.checkpoint_format import checkpoint_format, declares_sparsity
from baton.engine.device_edge import HostEdge
from baton.engine.device_runner import DeviceRunner
from baton.engine.local import LocalEngine
from baton.engine.model_config import load_config
from baton.engine.ranks import SingleRank
from baton.engine.sparse24 import Products, SparseLinears, choose, is_sparse
from baton.engine.weights import Weights
from baton.proto.errors import ConfigError
from baton.tests.harness import plain_kernels
from baton.tests.harness.model_rig import Rig, random_tokens, silent
from baton.tests.harness.monolithic import sampling
from baton.tests.harness.tiny_model import VOCAB, write_tiny_model
from baton.tests.test_engine_runner import build, engine_params
from baton.text.source import resolve
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS
from torch.sparse import _semi_structured_conversions as conversions

TOKENS = random_tokens(30, VOCAB)
_packed_of: Any = conversions.sparse_semi_structured_from_dense_cutlass
_dense_of: Any = conversions.sparse_semi_structured_to_dense_cutlass


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


CUTLASS = SparseSemiStructuredTensorCUTLASS


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """torch's own packing, padding and dispatch on CPU tensors; only the product itself is computed from what torch's
    own conversion makes of the packed weight. Returns the shapes of its right-hand sides."""
    asked: list[tuple[int, int]] = []

    def product(packed: Tensor, meta: Tensor, dense: Tensor) -> Tensor:
        assert not dense.shape[1] % 8  # rows of activations, as the kernel wants them
        asked.append((dense.shape[0], dense.shape[1]))
        whole: Tensor = _dense_of(packed, meta)
        return (whole.float() @ dense.float()).to(dense.dtype)

    monkeypatch.setattr(CUTLASS, "_validate_device_dim_dtype_shape", classmethod(lambda cls, weight: None))
    monkeypatch.setattr(torch, "_sparse_semi_structured_mm", product)
    return asked


def of_a_gpu(pack: Any = CUTLASS.from_dense) -> Products:
    found = choose((8, 0), cusparselt=False)
    assert isinstance(found, Products)
    return dataclasses.replace(found, pack=pack)


def test_which_products_a_gpu_has() -> None:
    """cuSPARSELt wherever torch has it; CUTLASS for 8.x alone; the limits are those that torch checks."""
    names = {(c, lt): choose(c, lt) for c in ((8, 0), (8, 9), (9, 0), (10, 0)) for lt in (True, False)}
    for (capability, lt), found in names.items():
        if isinstance(found, str):
            assert (capability[0] > 8, lt) == (True, False)
            assert f"compute capability {capability[0]}.0 needs a torch with cuSPARSELt" in found
            continue
        assert found.name == ("cuSPARSELt" if lt else "CUTLASS")
        kind = SparseSemiStructuredTensorCUSPARSELT if lt else CUTLASS
        for dtype in (torch.bfloat16, torch.float16):
            limits = kind._DTYPE_SHAPE_CONSTRAINTS[dtype]
            assert (found.outputs, found.inputs) == (limits.sparse_min_rows, limits.sparse_min_cols)


@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [
        ((32, 64), torch.bfloat16, True),
        ((96, 192), torch.float16, True),
        ((48, 64), torch.bfloat16, False),
        ((32, 96), torch.bfloat16, False),
        ((32, 64), torch.float32, False),
    ],
)
def test_what_products_do_not_take_runs_dense(shape: tuple[int, int], dtype: torch.dtype, taken: bool) -> None:
    asked: list[Tensor] = []

    def product(weight: Tensor) -> Tensor:
        asked.append(weight)
        return weight

    linears = SparseLinears("auto", True, of_a_gpu(product))
    weight = pruned(torch.randn(shape))[0].to(dtype)
    assert (linears.linear(weight, None) is not None) == taken == bool(asked)
    assert linears.linear(torch.randn(shape, dtype=dtype), None) is None
    for other in (SparseLinears("none", True, of_a_gpu()), SparseLinears("auto", False, of_a_gpu())):
        assert other.linear(weight, None) is None


@pytest.mark.parametrize("rows", [1, 5, 8, 17])
def test_torch_multiplies_with_the_packed_weight(on_a_cpu: list[tuple[int, int]], rows: int) -> None:
    """There and back: the packed weight is the weight; any number of rows is padded, and its result cut again."""
    weight, x = pruned(torch.randn(96, 128))[0].bfloat16(), torch.randn(rows, 128).bfloat16()
    packed, meta = _packed_of(weight)
    assert packed.shape == (96, 64)
    assert torch.equal(_dense_of(packed, meta), weight)
    run = SparseLinears("2:4", False, of_a_gpu()).linear(weight, None)
    assert run is not None
    with torch.inference_mode():
        found = run(x)
    assert found.shape == (rows, 96)
    assert torch.allclose(found.float(), x.float() @ weight.float().t(), atol=0.25, rtol=1e-2)
    assert on_a_cpu == [(128, -(-rows // 8) * 8)]


def test_a_library_that_does_not_know_the_gpu_leaves_them_dense(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(weight: Tensor) -> Tensor:
        raise RuntimeError("architecture mismatch")

    linears = SparseLinears("2:4", False, of_a_gpu(refuse))
    weight = pruned(torch.randn(32, 64))[0].bfloat16()
    with caplog.at_level(logging.INFO, "baton.engine.sparse24"):
        assert linears.linear(weight, None) is None
        assert linears.linear(weight, None) is None
        linears.report()
    assert caplog.text.count("architecture mismatch") == 2
    assert "in 2 linear layers run dense" in caplog.text


def test_the_engine_for_gpus_runs_them_sparse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, on_a_cpu: list[tuple[int, int]]
) -> None:
    """From the checkpoint to the tokens; down_proj has a shape that these products do not take."""
    plain_kernels.install(monkeypatch)
    model, found = write(tmp_path, "sparse-24-bitmask"), []
    for products in ("there are none", of_a_gpu()):
        monkeypatch.setattr(device_model, "sparse_products", lambda device, products=products: products)
        params = engine_params(model, dtype="bfloat16")
        with caplog.at_level(logging.INFO, "baton.engine.sparse24"):
            runner = DeviceRunner(params, SingleRank(), silent, None, HostEdge())
        engine = LocalEngine(runner, BlockPool(32, 4, False), runner.kv.copy_blocks)
        found.append(engine.generate([(TOKENS[:11], sampling(max_tokens=6))], 64, 1)[0][0].token_ids)
    assert found[0] == found[1]
    assert {width % 8 for _, width in on_a_cpu} == {0}
    assert "in 6 linear layers run sparse, by CUTLASS; 0 others" in caplog.text
    assert "in 2 linear layers run dense for their dtypes or shapes" in caplog.text


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
