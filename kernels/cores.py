"""Cores that computing threads and everybody else have to share."""

from __future__ import annotations

import os

from .native import function

_EVERY_NS = 250_000


def give_way(threads: int) -> None:
    """C code of a process with `threads` computing threads offers its core to others, as `interval` says."""
    every = function("baton_give_way_every", "n")
    if every is not None:
        every(interval(threads, len(os.sched_getaffinity(0))))


def interval(threads: int, cores: int) -> int:
    """Nanoseconds from one offer to the next, 0: never.

    Where the threads leave none of the process's cores free, event loops, routers and clients that wake would else wait
    for the scheduler's next tick. Elsewhere a thread keeps its core: it would lose its share to programs that never
    offer theirs.
    """
    return _EVERY_NS if cores <= threads else 0
