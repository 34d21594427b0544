"""How long an all-reduce inside a node takes, in its two regimes.

Small messages (decode: sequences * hidden * 2 bytes) run a one-shot kernel inside a CUDA graph: latency decides. Large
ones (prefill) run a ring: 2 * (T - 1) / T of the bytes pass each link. Tables: ai-dynamo/aiconfigurator@095f58a5,
custom all-reduce of vLLM on H100 and A100; between their sizes the time is interpolated over the size's logarithm.
"""

from __future__ import annotations

import math

_SIZES = (16e3, 256e3, 1e6, 4e6, 16e6)  # bytes
_US: dict[str, dict[int, tuple[float, ...]]] = {
    "h100": {2: (4.5, 5.2, 8.3, 20, 81), 4: (4.8, 7.2, 12.8, 30, 99), 8: (5.3, 10.8, 15.0, 31, 92)},
    "a100": {2: (5.3, 6.6, 11, 25, 126), 4: (6.0, 9.9, 18, 42, 183), 8: (6.5, 17, 22, 45, 214)},
}
_REACHED = {2: 0.56, 4: 0.63, 8: 0.70}  # of the link's one-way bandwidth at 64 MB (Vidur, mean of A100 and H100)
_LAUNCH_S = 10e-6  # of a collective outside the tables, for each doubling of the ranks


def ring_s(size: float, ranks: int, link: float) -> float:
    """What the bytes alone take: 2 * (T - 1) / T * size / (reached share of the link). `link`: bytes/s, one way."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * size / (link * _REACHED.get(ranks, 0.70))


def all_reduce_s(size: float, ranks: int, link: float, table: str = "none") -> float:
    """One all-reduce of `size` bytes over `ranks`: the table's where it has this size, the ring's beyond.

    `table`: h100, a100, or none for hardware that resembles neither: latency + ring.
    """
    if ranks == 1:
        return 0.0
    ring = ring_s(size, ranks, link)
    row = _US.get(table, {}).get(min((2, 4, 8), key=lambda known: abs(known - ranks)))
    if row is None:
        return _LAUNCH_S * math.log2(ranks) + ring
    if size >= _SIZES[-1]:
        return max(row[-1] * 1e-6, ring)
    at = next((i for i in range(1, len(_SIZES)) if size < _SIZES[i]), 1)
    share = (math.log(max(size, _SIZES[0])) - math.log(_SIZES[at - 1])) / math.log(_SIZES[at] / _SIZES[at - 1])
    return (row[at - 1] + share * (row[at] - row[at - 1])) * 1e-6
