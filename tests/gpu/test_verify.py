"""Proposals against draws, in every combination."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from baton.kernels.gpu.verify import verify


@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_combination(width: int, device: torch.device) -> None:
    """Right and wrong proposals, in any number."""
    cases = [(right, n) for right in product((True, False), repeat=width - 1) for n in range(width)]
    drawn = torch.arange(len(cases) * width).view(-1, width)
    proposed = torch.tensor([right for right, _ in cases], dtype=torch.bool).view(len(cases), width - 1)
    proposals = torch.where(proposed, drawn[:, :-1], 10_000)
    lengths = torch.tensor([n for _, n in cases], dtype=torch.int32)
    tokens, counts = verify(drawn.to(device), proposals.to(device), lengths.to(device))
    for row, (right, n) in enumerate(cases):
        accepted = next((i for i in range(n) if not right[i]), n)
        expected = [*drawn[row, : accepted + 1].tolist(), *[-1] * (width - accepted - 1)]
        assert tokens[row].tolist() == expected
        assert int(counts[row]) == accepted + 1


def test_wrong_arguments_are_named(device: torch.device) -> None:
    drawn = torch.zeros(2, 3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="proposed"):
        verify(drawn, drawn, torch.zeros(2, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="lengths"):
        verify(drawn, drawn[:, :2], torch.zeros(2, dtype=torch.int64, device=device))
