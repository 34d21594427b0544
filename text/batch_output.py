"""The output file of a batch: one run at a time appends to it, whole line by whole line, and a later run goes on."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from ..proto.errors import ConfigError
from .batch_lines import Known, known, succeeded


class BatchOutput:
    """Open it with `open`. `known`: what it held then."""

    def __init__(self, descriptor: int, found: Known) -> None:
        self.known = found
        self._descriptor = descriptor

    @staticmethod
    def open(path: Path, drop_failed: bool) -> BatchOutput:
        """Read and repair the file, or make it: the rest of a line that was cut off goes away.

        drop_failed: take the lines of failed requests out. Raises ConfigError for a file that cannot be written, that
        another run writes, or that is no batch output.
        """
        try:
            descriptor = _locked(path)
            found = _read(path)
            if drop_failed and found.failed:
                _rewrite(path)
                os.close(descriptor)
                descriptor = _locked(path)
                found = _read(path)
            os.ftruncate(descriptor, found.size)
            output = BatchOutput(descriptor, found)
            if found.unended:
                output._write(b"\n")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from None
        return output

    def add(self, line: dict[str, Any]) -> None:
        """Append a line; it outlives this process from then on. Raises OSError."""
        self._write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        """Let another run have it."""
        os.close(self._descriptor)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]


def _locked(path: Path) -> int:
    """Opened for appending. Raises ConfigError when another run has it, OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{path}: another batch is writing it") from None
    return descriptor


def _read(path: Path) -> Known:
    with path.open("rb") as lines:
        return known(lines, str(path))


def _rewrite(path: Path) -> None:
    """The same file without the failed lines; a crash leaves the old one."""
    beside = path.with_name(path.name + ".part")
    with path.open("rb") as old, beside.open("wb") as new:
        for raw in old:
            if raw.endswith(b"\n") and succeeded(json.loads(raw)):
                new.write(raw)
        new.flush()
        os.fsync(new.fileno())
    beside.replace(path)
