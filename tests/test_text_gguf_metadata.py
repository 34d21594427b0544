"""The GGUF head: equal to the library's reader, and every damaged file a clear error."""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from baton.proto.errors import ConfigError
from baton.text import gguf_metadata
from baton.text.source import ModelSource
from hypothesis import given, settings
from hypothesis import strategies as st


def _write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("small.count", 7)
    writer.add_float64("some.real", 0.25)
    writer.add_bool("some.flag", False)
    writer.add_array("some.names", ["é", "", "日本"])
    writer.add_array("some.numbers", [1, -2, 3])
    writer.add_array("some.reals", [0.5, 1.5])
    writer.add_tensor("a.weight", np.ones((3, 4), dtype=np.float32))
    writer.add_tensor("b.weight", np.zeros((5,), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _write(tmp_path_factory.mktemp("gguf") / "small.gguf").read_bytes()


def test_values_and_tensors_equal_the_library_s(tmp_path: Path) -> None:
    path = _write(tmp_path / "small.gguf")
    reader = gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    header = gguf_metadata.read_header(path)
    assert header.metadata == theirs
    assert [(t.name, t.shape, t.kind, t.offset) for t in header.tensors] == [
        (t.name, tuple(t.shape.tolist()), int(t.tensor_type), t.data_offset) for t in reader.tensors
    ]


def test_a_real_vocabulary_is_read_in_well_under_a_second(smol_source: ModelSource) -> None:
    start = time.thread_time()
    metadata = gguf_metadata.read(smol_source.path)
    assert time.thread_time() - start < 1
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert metadata["llama.attention.head_count"] == 9


def test_every_truncation_is_refused(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    head = len(small) - 96  # the tensors' data follows
    for size in range(1, head, 7):
        path.write_bytes(small[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf is no readable GGUF file"):
            gguf_metadata.read_header(path)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (4, struct.pack("<I", 1), "version 1 is not supported"),
        (4, struct.pack(">I", 3), "version 50331648 is not supported"),
        (8, struct.pack("<Q", 2**60), "tensors at byte"),
        (16, struct.pack("<Q", 2**60), "key/value pairs at byte"),
        (24, struct.pack("<Q", 2**63), "pass the end"),
    ],
)
def test_counts_and_lengths_are_checked(small: bytes, tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(small[:offset] + value + small[offset + len(value) :])
    with pytest.raises(ConfigError, match=message):
        gguf_metadata.read(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ConfigError, match="no readable GGUF file"):
        gguf_metadata.read(tmp_path / "empty.gguf")


@settings(max_examples=200)
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_any_flipped_byte_reads_or_is_refused(
    small: bytes, tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    damaged = bytearray(small)
    damaged[place % len(small)] = byte
    path.write_bytes(damaged)
    with contextlib.suppress(ConfigError):  # any other exception fails the test
        gguf_metadata.read_header(path)
