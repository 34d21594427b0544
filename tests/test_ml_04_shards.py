"""ML-04: a missing, cut or contradictory shard is refused, with the names of the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.proto.errors import ConfigError
from baton.tests.harness.model_rig import Rig, random_tokens
from baton.tests.harness.tiny_model import VOCAB, write_tiny_model
from safetensors.torch import load_file, save_file

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
TOKENS = random_tokens(30, VOCAB)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """T0 in two shards with an index."""
    path = write_tiny_model(tmp_path)
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    placed = {name: SECOND if "layers.1" in name else FIRST for name in weights}
    for file in (FIRST, SECOND):
        save_file({name: weights[name] for name in weights if placed[name] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return path


def _edit_index(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def test_ml_04_shards_equal_one_file(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = write_tiny_model(tmp_path_factory.mktemp("whole"))
    assert torch.equal(Rig(sharded).sequence(TOKENS), Rig(whole).sequence(TOKENS))
    assert Rig(sharded).weights[0].fingerprint == Rig(whole).weights[0].fingerprint


def test_ml_04_missing_shard(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(ConfigError, match=f"missing shards {SECOND}"):
        Rig(sharded)


@pytest.mark.parametrize("cut", [1, 1024])
def test_ml_04_cut_shard(sharded: Path, cut: int) -> None:
    data = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(data[:-cut])
    with pytest.raises(ConfigError, match=f"{SECOND}: the header describes {len(data)} bytes, the file has"):
        Rig(sharded)


@pytest.mark.parametrize("size", [0, 5, 100])
def test_ml_04_hardly_anything_left(sharded: Path, size: int) -> None:
    (sharded / SECOND).write_bytes((sharded / SECOND).read_bytes()[:size])
    with pytest.raises(ConfigError, match=f"{SECOND}: a header of .* does not fit"):
        Rig(sharded)


def test_ml_04_trailing_bytes(sharded: Path) -> None:
    with (sharded / FIRST).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigError, match=f"{FIRST}: the header describes"):
        Rig(sharded)


def test_ml_04_damaged_header(sharded: Path) -> None:
    data = bytearray((sharded / FIRST).read_bytes())
    data[8] = ord("?")
    (sharded / FIRST).write_bytes(data)
    with pytest.raises(ConfigError, match=f"{FIRST}: damaged header"):
        Rig(sharded)


def test_ml_04_index_names_a_tensor_that_no_file_has(sharded: Path) -> None:
    _edit_index(sharded, lambda placed: placed.update({"model.layers.2.extra": FIRST}))
    with pytest.raises(ConfigError, match=rf"places model\.layers\.2\.extra in {FIRST}, which does not hold it"):
        Rig(sharded)


def test_ml_04_stale_index(sharded: Path) -> None:
    _edit_index(sharded, lambda placed: placed.pop("model.norm.weight"))
    with pytest.raises(ConfigError, match=rf"{FIRST} holds model\.norm\.weight, which .* does not name"):
        Rig(sharded)


def test_ml_04_one_tensor_in_two_shards(sharded: Path) -> None:
    second = load_file(sharded / SECOND)
    save_file({**second, "model.norm.weight": torch.ones(64)}, sharded / SECOND)
    with pytest.raises(ConfigError, match=rf"tensor model\.norm\.weight is in both {FIRST} and {SECOND}"):
        Rig(sharded)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../model.safetensors"}}'])
def test_ml_04_damaged_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=INDEX):
        Rig(sharded)


def test_ml_04_no_weights_at_all(sharded: Path) -> None:
    for file in (FIRST, SECOND, INDEX):
        (sharded / file).unlink()
    (sharded / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor .*; found pytorch_model\.bin"):
        Rig(sharded)


def test_ml_04_unsupported_number_format(sharded: Path) -> None:
    weights = load_file(sharded / SECOND)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].to(torch.float8_e4m3fn)}, sharded / SECOND)
    with pytest.raises(ConfigError, match=rf"{SECOND}: tensor .*up_proj\.weight has unsupported dtype F8_E4M3"):
        Rig(sharded)
