"""Cores that computing threads and everybody else have to share."""

from __future__ import annotations

import os

from .native import function

_EVERY_NS = 250_000


def give_way(threads: int) -> None:
    """Where `threads` computing threads leave no core free of those that this process may use, C code offers its core now
    and then: event loops, routers and clients that wake meanwhile are not kept waiting for the scheduler's next tick.

    Elsewhere it keeps the core, as it would lose its share to programs that never give way.
    """
    every = function("baton_give_way_every", "n")
    if every is not None:
        every(_EVERY_NS if len(os.sched_getaffinity(0)) <= threads else 0)
