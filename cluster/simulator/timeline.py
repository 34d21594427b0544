"""Queues and batches over time: a row every so many seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """Sums over the workers of a pool. Seconds; blocks as a share of all of the pool's."""

    at: float
    gates: int  # requests held back at the router
    prefill_waiting: int
    prefill_running: int
    decode_waiting: int
    decode_running: int
    prefill_blocks: float
    decode_blocks: float
    prefill_workers: int  # that take requests
    decode_workers: int


def columns(rows: Sequence[Row]) -> dict[str, list[float]]:
    """By name, for JSON and plots."""
    return {name: [getattr(row, name) for row in rows] for name in Row.__slots__}
