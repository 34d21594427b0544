"""Tensor parallel ranks in real processes: a leader's runner in the test, followers beside it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from baton.engine.channel import FollowerChannel, LeaderChannel, RankLost
from baton.engine.params import EngineParams
from baton.engine.ranks import SingleRank, TorchGroup
from baton.engine.runner import Runner
from baton.engine.step import unpack_plan
from baton.tests.harness.tied import tied

SECRET = b"only these ranks"
TIMEOUT_S = 60.0
START_S = 90.0  # a process that imports torch, on a busy machine
HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Leader:
    """Rank 0: its runner, and block copies on every rank."""

    runner: Runner
    copy_blocks: Callable[[Sequence[tuple[int, int]]], None]


@dataclasses.dataclass(frozen=True)
class Followers:
    """Rank 0's end of the channel, its group, and the other ranks' processes."""

    channel: LeaderChannel
    group: TorchGroup
    processes: list[subprocess.Popen[bytes]]
    messages: list[tuple[int, dict[str, Any]]]
    lost: list[RankLost]


def start_follower(function: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A process that calls `module:function` of the tests with text arguments."""
    module, name = function.split(":")
    code = f"import sys; from {module} import {name}; {name}(*sys.argv[1:])"
    return subprocess.Popen(tied([sys.executable, "-W", "error::UserWarning", "-c", code, *arguments]))


@contextmanager
def followers(
    function: str, size: int, *arguments: str, ordered: bool = True, limit_s: float = TIMEOUT_S
) -> Iterator[Followers]:
    """size - 1 processes of `function(rank, size, address, *arguments)`, and this one as rank 0.

    `limit_s`: how long rank 0 waits in a collective.
    """
    messages: list[tuple[int, dict[str, Any]]] = []
    lost: list[RankLost] = []
    channel = LeaderChannel.bind(HOST, SECRET, TIMEOUT_S, lambda *item: messages.append(item), lost.append)
    processes = [start_follower(function, str(rank), str(size), channel.address, *arguments) for rank in range(1, size)]
    try:
        channel.accept(size, START_S)
        group = TorchGroup.join(channel, "gloo", 0, size, limit_s, HOST, ordered)
        yield Followers(channel, group, processes, messages, lost)
    finally:
        channel.close()
        for process in processes:
            try:
                process.wait(TIMEOUT_S)
            finally:
                process.kill()
                process.wait()


def join(rank: str, size: str, address: str, ordered: bool = True) -> tuple[FollowerChannel, TorchGroup]:
    """What a follower process begins with."""
    channel = FollowerChannel.connect(address, int(rank), SECRET, TIMEOUT_S)
    return channel, TorchGroup.join(channel, "gloo", int(rank), int(size), TIMEOUT_S, HOST, ordered)


def follow(rank: str, size: str, address: str, params: str) -> None:
    """A follower's main: obeys until the leader closes the channel."""
    channel, group = join(rank, size, address)
    runner = Runner(EngineParams(**json.loads(params)), group, lambda done, total: None, None)
    channel.send({"kind": "ready", "blocks": runner.blocks})
    try:
        while True:
            message = channel.receive()
            if message["kind"] == "copy":
                runner.kv.copy_blocks(message["pairs"])
            else:
                kind, steps = unpack_plan(message["plan"])
                runner.follow(kind, steps, lambda low, high: None)
    except RankLost:
        channel.close()


@contextmanager
def leader(params: EngineParams) -> Iterator[Leader]:
    """A runner with as many ranks as `params` says, all of them real processes."""
    if params.tensor_parallel == 1:
        runner = Runner(params, SingleRank(), lambda done, total: None, None)
        yield Leader(runner, runner.kv.copy_blocks)
        return
    arguments = json.dumps(dataclasses.asdict(params))
    with followers("baton.tests.harness.ranks:follow", params.tensor_parallel, arguments) as ranks:
        channel = ranks.channel
        runner = Runner(
            params,
            ranks.group,
            lambda done, total: None,
            lambda plan: channel.broadcast({"kind": "step", "plan": plan}),
        )

        def copy_blocks(pairs: Sequence[tuple[int, int]]) -> None:
            channel.broadcast({"kind": "copy", "pairs": list(pairs)})
            runner.kv.copy_blocks(pairs)

        yield Leader(runner, copy_blocks)
