"""The runner of a GPU without one: its whole forward pass on CPU tensors, kernels in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.engine import device_pieces
from baton.engine.block_pool import BlockPool
from baton.engine.channel import RankLost
from baton.engine.device_edge import CudaEdge, Edge, HostEdge
from baton.engine.device_runner import DeviceRunner
from baton.engine.local import LocalEngine, Request
from baton.engine.params import EngineParams
from baton.engine.ranks import SingleRank
from baton.engine.runner import Runner
from baton.engine.speculation import Speculator
from baton.engine.step import unpack_plan
from baton.tests.gpu.conftest import INTERPRETED
from baton.tests.harness.ranks import join
from baton.tests.test_engine_runner import engine_params

if INTERPRETED:
    device_pieces._LEAST_TOKENS = 4  # rows of padding cost the interpreter as much as others


def edge() -> Edge:
    """Of this machine."""
    return HostEdge() if INTERPRETED else CudaEdge()


def build_device(model: Path, **changes: Any) -> DeviceRunner:
    """See `build` of test_engine_runner."""
    return DeviceRunner(engine_params(model, **changes), SingleRank(), lambda done, total: None, None, edge())


def answers(
    runner: Runner, requests: list[Request], chunk: int, sequences: int = 3, speculator: Speculator | None = None
) -> list[list[list[int]]]:
    """The tokens of every choice."""
    pool = BlockPool(runner.blocks, runner.layout.block_size, True)
    engine = LocalEngine(runner, pool, runner.kv.copy_blocks, speculator)
    results = engine.generate(requests, chunk, sequences)
    return [[choice.token_ids for choice in choices] for choices in results]


def follow(rank: str, size: str, address: str, params: str) -> None:
    """A further rank's main: obeys until the leader closes the channel."""
    channel, group = join(rank, size, address)
    runner = DeviceRunner(EngineParams(**json.loads(params)), group, lambda done, total: None, None, edge())
    try:
        while True:
            kind, steps = unpack_plan(channel.receive()["plan"])
            runner.follow(kind, steps, lambda low, high: None)
    except RankLost:
        channel.close()
