"""Hardware profiles: found, refused, and the limits that follow from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from baton.cluster import config_load, hardware
from baton.engine.model_config import load_config
from baton.proto.errors import ConfigError
from baton.text.source import resolve


def profile_of(tmp_path: Path, name: str) -> hardware.Hardware | None:
    path = tmp_path / "c.yaml"
    path.write_text(f"model: {{path: smollm2-135m-instruct}}\nhardware: {name}\n")
    return hardware.find(config_load.load(str(path), []))


@pytest.mark.parametrize("path", sorted(hardware.CATALOGUE.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_profile_of_the_catalogue_is_valid(tmp_path: Path, path: Path) -> None:
    found = profile_of(tmp_path, path.stem)
    assert found is not None
    assert found.bandwidth > 1e9
    assert found.flops > found.bandwidth


def test_limits_of_smollm2_on_one_core(tmp_path: Path) -> None:
    found = profile_of(tmp_path, "cpu-2core")
    assert found is not None
    model = load_config(resolve("smollm2-135m-instruct"))
    layers = 30 * (576 * 64 * (9 + 3 + 3 + 9) + 3 * 576 * 1536)
    assert found.best_prefill(model, 1) == pytest.approx(215e9 / (2 * layers))
    assert found.best_decode(model, 1, 2) == pytest.approx(25e9 / (2 * (layers + 576 * 49152)))


def test_of_uneven_ranks_the_fullest_sets_the_limit(tmp_path: Path) -> None:
    found = profile_of(tmp_path, "cpu-2core")
    assert found is not None
    model = load_config(resolve("smollm2-135m-instruct"))
    fullest = 30 * (576 * 64 * (6 + 2 + 2 + 6) + 3 * 576 * 768)  # 2 of 3 KV heads
    assert found.best_prefill(model, 2) == pytest.approx(215e9 / (2 * fullest))
    assert found.best_decode(model, 2, 2) == pytest.approx(25e9 / (2 * (fullest + 576 * 49152 / 2)))


def test_an_unknown_profile_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hardware: is cpu-2cores.*did you mean cpu-2core"):
        profile_of(tmp_path, "cpu-2cores")


def test_a_file_beside_the_configuration_is_read_and_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("memory: 8GiB\nbandwidth: 10GB/s\nflops: 90GFLOP/s\nsource: measured\n")
    found = profile_of(tmp_path, "mine.yaml")
    assert found is not None
    assert found.bandwidth == 10e9
    (tmp_path / "bad.yaml").write_text("memory: 8GiB\nbandwidth: 10\nflops: 90GFLOP/s\nsource: measured\n")
    with pytest.raises(ConfigError, match="25GB/s"):
        profile_of(tmp_path, "bad.yaml")
