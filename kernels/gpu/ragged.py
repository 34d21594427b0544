"""Rows in groups of different lengths, in tiles that do not cross from one group to the next."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_group(offsets, groups, tile, ROWS: tl.constexpr):
    """The group of a tile: the last whose first tile, offsets[i] // ROWS + i, is at most `tile`.

    offsets int32 [groups + 1] from 0 on. There are at most offsets[groups] // ROWS + groups tiles, a number that the
    host knows without the offsets; a tile whose first row is not in its group has nothing to do.
    """
    low, high = 0, groups - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(offsets + middle) // ROWS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low
