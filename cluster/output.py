"""Standard output is for results only. Libraries print where they like (Ray reports dead workers on stdout), so the
driver keeps the real stdout for itself and sends everything else to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from .failures import OutputFailed

_kept: list[TextIO] = []


def keep_stdout() -> None:
    """From now on only `say` and `results` reach the real stdout."""
    if not _kept:
        sys.stdout.flush()
        _kept.append(os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors))
        os.dup2(2, 1)


def stream() -> TextIO:
    """Where results go."""
    return _kept[0] if _kept else sys.stdout


@contextmanager
def results() -> Iterator[TextIO]:
    """Where results go; they are out when the block ends. Raises OutputFailed when nobody takes them."""
    file = stream()
    try:
        yield file
        file.flush()
    except OSError as error:
        with open(os.devnull, "w") as nowhere:  # what is still buffered must not fail again at the exit
            os.dup2(nowhere.fileno(), file.fileno())
        raise OutputFailed(f"cannot write to standard output: {error.strerror or error}") from None


def say(text: str, end: str = "\n") -> None:
    """One result, at once. Raises OutputFailed."""
    with results() as file:
        print(text, end=end, file=file)
