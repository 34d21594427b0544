"""The greatest number of a row: the first of equals, by C at each level and by torch."""

from __future__ import annotations

import math

import pytest
import torch
from baton.kernels import argmax as module
from baton.kernels import native
from baton.kernels.argmax import argmax
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["torch", "scalar", "avx2"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Torch's way, and each level of C."""
    if request.param == "torch":
        monkeypatch.setattr(module, "function", lambda name, arguments: None)
        return 0
    if native.library() is None:
        pytest.skip("no C kernels here")
    return native.LEVELS[request.param]


def _first(row: Tensor) -> int:
    """By the definition, one after the other."""
    values = row.float().tolist()
    best = -1
    for place, value in enumerate(values):
        if math.isnan(value):
            return -1
        if value > (values[best] if best >= 0 else -math.inf):
            best = place
    return best


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 256, 1000, 1024, 1025, 4999])
def test_the_first_of_the_greatest(level: int, dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(20, size, generator=generator).to(dtype)
    numbers[10:] = numbers[10:].mul(2).round()  # many equals
    rows = [0, 19, 3, *range(20)]
    assert argmax(numbers, rows, level) == [_first(numbers[row]) for row in rows]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_special_numbers(level: int, dtype: torch.dtype, threads: int) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 4  # subnormal
    rows = [
        [-0.0, 0.0, -0.0],
        [0.0, -0.0],
        [-tiny, -0.0, 0.0, tiny],
        [-tiny, -1.0],
        [-3.0, -2.0, -2.0],
        [1.0, math.inf, math.inf],
        [-math.inf, torch.finfo(dtype).min, -math.inf],
        [-math.inf, -math.inf],
        [math.nan, 1.0],
        [1.0, math.inf, -math.nan],
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size in (5, 3000):
            numbers = torch.full((len(rows), size), -math.inf, dtype=dtype)
            for place, row in enumerate(rows):
                numbers[place, size - len(row) :] = torch.tensor(row, dtype=dtype)
            found = argmax(numbers, range(len(rows)), level)
            assert found == [_first(row) for row in numbers]
            assert found[7:] == [-1, -1, -1]
    finally:
        torch.set_num_threads(before)


def test_what_is_not_there(level: int) -> None:
    numbers = torch.zeros(2, 7)
    assert argmax(numbers, [], level) == []
    assert argmax(numbers[:0], [], level) == []
    for rows in ([2], [-1]):
        with pytest.raises(IndexError, match="of 2"):
            argmax(numbers, rows, level)
    assert argmax(numbers[:, ::2], [1], level) == [0]  # not contiguous: torch's way
