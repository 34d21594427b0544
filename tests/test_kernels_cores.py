"""Computing threads offer their core where they have all of them, and compute the same."""

from __future__ import annotations

import pytest
import torch
from baton.kernels.cores import give_way, interval
from baton.kernels.linear import bf16_linear
from baton.kernels.native import library


def test_a_core_is_offered_only_where_no_other_is_free() -> None:
    assert interval(threads=1, cores=1) == interval(threads=4, cores=2) > 0
    assert interval(threads=1, cores=2) == 0


@pytest.mark.skipif(library() is None, reason="no C kernels")
def test_offering_a_core_changes_no_result() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 256, generator=generator, dtype=torch.bfloat16)
    rows = torch.randn(200, 256, generator=generator, dtype=torch.bfloat16)
    layer = bf16_linear(weight, None)
    results = []
    try:
        for threads in (0, 1 << 20):  # never, and always
            give_way(threads)
            results.append(layer(rows))
    finally:
        give_way(0)
    assert torch.equal(*results)
