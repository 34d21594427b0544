"""Standard output is for results only. Libraries print where they like (Ray reports dead workers on stdout), so the
driver keeps the real stdout for itself and sends everything else to stderr."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_kept: list[TextIO] = []


def keep_stdout() -> None:
    """From now on only `say` and `stream` reach the real stdout."""
    if not _kept:
        sys.stdout.flush()
        _kept.append(os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors))
        os.dup2(2, 1)


def stream() -> TextIO:
    """Where results go."""
    return _kept[0] if _kept else sys.stdout


def say(text: str, end: str = "\n") -> None:
    """One result, at once."""
    print(text, end=end, file=stream(), flush=True)
