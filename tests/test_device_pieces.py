"""Prompts on a GPU in pieces between attentions: the same as in one go, whatever else the pieces' memory has seen.

The engine for GPUs on CPU tensors, its kernels in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine import device_pieces
from baton.engine.block_pool import BlockPool
from baton.engine.device_edge import HostEdge
from baton.engine.device_pieces import MOST_TOKENS, token_sizes
from baton.engine.device_runner import DeviceRunner
from baton.engine.device_steps import row_sizes
from baton.engine.local import LocalEngine, Request
from baton.engine.ranks import SingleRank
from baton.engine.runner import Runner
from baton.engine.step import DRAWN_BY_LEADER, SequenceStep
from baton.tests.harness import plain_kernels
from baton.tests.harness.monolithic import sampling
from baton.tests.test_engine_runner import build, engine_params
from torch import Tensor


class CapturingEdge(HostEdge):
    """A captured function leaves its result where it left the first one, as a graph does; `made` counts them."""

    captures = True

    def __init__(self) -> None:
        self.made = self.replayed = 0

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See Edge."""
        self.made += 1
        kept: list[Tensor] = []  # what is captured does not run

        def replay() -> Tensor:
            self.replayed += 1
            found = run()
            if not kept:
                kept.append(found)
            return kept[0] if found is kept[0] else kept[0].copy_(found)

        return replay


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_kernels.install(monkeypatch)


def device(model: Path, edge: HostEdge, blocks: int = 96) -> DeviceRunner:
    params = engine_params(model, kv_blocks=blocks)
    return DeviceRunner(params, SingleRank(), lambda done, total: None, None, edge)


def prompts() -> list[Request]:
    return [([(7 * at + 13 * n) % 250 for at in range(n)], sampling(max_tokens=4)) for n in (3, 40, 17, 64, 1, 29)]


def answers(runner: Runner, chunk: int = 40) -> list[list[int]]:
    engine = LocalEngine(runner, BlockPool(runner.blocks, 4, True), runner.kv.copy_blocks)
    return [choices[0].token_ids for choices in engine.generate(prompts(), chunk, 3)]


def test_sizes_go_up_to_what_the_host_launches_in_time() -> None:
    assert token_sizes()[0] == 16
    assert token_sizes()[-1] == MOST_TOKENS
    assert all(one < other <= 2 * one for one, other in zip(token_sizes(), token_sizes()[1:], strict=False))


def test_pieces_say_what_one_engine_on_a_cpu_says(tiny_dir: Path) -> None:
    """Chunks and batches of many sizes, each captured once and replayed."""
    edge = CapturingEdge()
    runner = device(tiny_dir, edge)
    expected = answers(build(tiny_dir, kv_blocks=96))
    assert answers(runner) == answers(runner) == expected
    sizes = len(runner._queue._pieces._sized)
    assert sizes > 1
    assert edge.made == sizes * runner.layout.layers + len(runner._queue.captured)
    assert edge.replayed > edge.made


def test_longer_steps_are_launched(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides of the limit, in one run."""
    monkeypatch.setattr(device_pieces, "MOST_TOKENS", 16)
    runner = device(tiny_dir, HostEdge())
    assert answers(runner) == answers(build(tiny_dir, kv_blocks=96))
    assert list(runner._queue._pieces._sized) == [16]


def test_what_stands_in_rows_of_padding_reaches_nothing(tiny_dir: Path) -> None:
    runner = device(tiny_dir, HostEdge())
    expected = answers(runner)
    pieces = runner._queue._pieces
    assert pieces._buffers is not None
    with torch.inference_mode():
        for memory in (*pieces._buffers, *(sized._attended for sized in pieces._sized.values())):
            memory.fill_(float("nan"))
    assert answers(runner) == expected
    assert not runner.kv.data.isnan().any()


def test_groups_of_layers_are_announced_between_pieces(tiny_dir: Path) -> None:
    """And a chunk that draws nothing ends behind its last keys and values."""
    runner = device(tiny_dir, HostEdge())
    seen: list[tuple[int, int]] = []
    assert (
        runner.prefill([SequenceStep("a", 0, 0, [1, 2, 3], 0, [5], None)], lambda lo, hi: seen.append((lo, hi))) == []
    )
    assert seen == [(0, 1), (1, 2)]
    assert runner.kv.data[:, :, 5, :, :3].any(dim=-1).all()
    assert not runner.kv.data[:, :, :5].any()


def test_everything_is_captured_before_the_first_request(tiny_dir: Path) -> None:
    """Also where the largest steps are larger than the pool."""
    edge = CapturingEdge()
    runner = device(tiny_dir, edge, blocks=20)
    assert runner.warm_up() > 0
    assert edge.made == len(token_sizes()) * runner.layout.layers + len(row_sizes())
    made = edge.made
    runner.decode([SequenceStep("b", 0, 0, [3], 0, [2], DRAWN_BY_LEADER)])
    runner.prefill([SequenceStep("b", 0, 0, [3, 4], 0, [2], DRAWN_BY_LEADER)], None)
    assert edge.made == made
