"""What this process holds. A test subtracts what was there before it: earlier tests of the same process may still be
letting go of theirs, so a count says nothing."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_OPEN = Path("/proc/self/fd")


def threads(prefix: str = "") -> set[threading.Thread]:
    """Living threads whose names begin so."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(prefix)}


def descriptors(within: str = "") -> set[tuple[int, str, int]]:
    """Open descriptors whose targets hold `within`: number, target, inode."""
    found = set()
    for name in os.listdir(_OPEN):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, or closed meanwhile
            found.add((int(name), os.readlink(_OPEN / name), (_OPEN / name).stat().st_ino))
    return {one for one in found if within in one[1]}


def mappings(within: str) -> set[tuple[str, str, str]]:
    """Mapped files whose names hold `within`: address, access, inode."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if within in line)
    return {(line[0], line[1], line[4]) for line in lines}
