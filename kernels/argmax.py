"""The greatest number of a row; on a CPU by C (c/argmax.c), which reads each row once and copies none."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .native import BEST, COMPUTED, DTYPES, function

_BLOCK = 256  # torch's own search of a long row for a place is slower than one for its value


def argmax(numbers: Tensor, rows: Sequence[int], level: int = BEST) -> list[int]:
    """For each of `rows` the first column of its greatest number in `numbers` [.., n], float32 or bfloat16.

    -1 for a row with a NaN in it, and for one without anything above minus infinity. Raises IndexError for a row that
    is not there.
    """
    if rows and not 0 <= min(rows) <= max(rows) < numbers.shape[0]:
        raise IndexError(f"rows {min(rows)}..{max(rows)} of {numbers.shape[0]}")
    run = function("baton_argmax", "pppnnnii")
    if run is None or numbers.device.type != "cpu" or numbers.dtype not in COMPUTED or not numbers.is_contiguous():
        return _by_torch(numbers, rows) if rows else []
    wanted, places = array("q", rows), array("q", bytes(8 * len(rows)))
    where = (numbers.data_ptr(), wanted.buffer_info()[0], places.buffer_info()[0])
    run(*where, len(rows), numbers.shape[1], DTYPES[numbers.dtype], torch.get_num_threads(), level)
    return places.tolist()


def _by_torch(numbers: Tensor, rows: Sequence[int]) -> list[int]:
    picked = numbers[torch.tensor(rows, dtype=torch.int64, device=numbers.device)]
    blocked = F.pad(picked, (0, -picked.shape[1] % _BLOCK), value=-math.inf).view(len(rows), -1, _BLOCK)
    maxima = blocked.amax(dim=2)
    block = maxima.argmax(dim=1)
    inner = blocked[torch.arange(len(rows), device=block.device), block].argmax(dim=1)
    found = maxima.amax(dim=1) > -math.inf  # false for NaN, too
    places: list[int] = torch.where(found, block * _BLOCK + inner, -1).tolist()
    return places
