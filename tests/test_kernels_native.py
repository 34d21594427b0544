"""The C library: built once for its sources, absent without harm."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest
from baton.kernels import native


@pytest.fixture(autouse=True)
def _fresh() -> None:
    native.library.cache_clear()


def test_without_a_library_one_warning_and_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_path", lambda: tmp_path / "none.so")
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
        assert native.library() is None
    assert len(caplog.records) == 1
    assert "make install" in caplog.text
    native.library.cache_clear()


def test_a_changed_source_has_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "one.c"
    monkeypatch.setattr(native, "_SOURCES", [source])
    source.write_text("int one(void) { return 1; }\n")
    first = native._path()
    source.write_text("int one(void) { return 2; }\n")
    assert native._path() != first


def test_no_compiler_and_a_compiler_that_fails_are_errors_of_the_build_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "_HERE", tmp_path)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no C compiler"):
        native.build()
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(subprocess.CalledProcessError):
        native.build()
    assert not list(tmp_path.iterdir())
