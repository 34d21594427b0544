"""Bringing the ranks of one worker together: channel, process group, model; and what followers say when they are up."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .channel import FollowerChannel, LeaderChannel, Message, RankLost
from .make_runner import make_runner
from .params import EngineParams
from .ranks import RankGroup, SingleRank, TorchGroup
from .runner import Runner

Report = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class RankParams:
    """How the ranks of a worker find each other."""

    host: str
    secret: bytes
    start_timeout_s: float  # for all of them to come
    collective_timeout_s: float


@dataclass(frozen=True, slots=True)
class RankMessage:
    """Queue item: what a follower reported."""

    rank: int
    message: Message


def start_leader(
    engine: EngineParams,
    ranks: RankParams,
    on_message: Callable[[RankMessage], None],
    on_lost: Callable[[RankLost], None],
    report: Report,
) -> tuple[Runner, LeaderChannel | None]:
    """Rank 0's model, and its line to the followers (None for a single rank).

    Reports "channel" with the address that followers connect to, and "loading" with bytes done and in total. Raises
    RankLost when a follower does not come, ConfigError for what cannot run.
    """

    def progress(done: int, total: int) -> None:
        report("loading", {"done": done, "total": total})

    if engine.tensor_parallel == 1:
        return make_runner(engine, SingleRank(), progress, None), None
    channel = LeaderChannel.bind(
        ranks.host,
        ranks.secret,
        ranks.collective_timeout_s,
        lambda rank, message: on_message(RankMessage(rank, message)),
        on_lost,
    )
    try:
        report("channel", {"address": channel.address})
        channel.accept(engine.tensor_parallel, ranks.start_timeout_s)
        channel.broadcast({"kind": "join"})
        group = _join(channel, engine, ranks, 0)
        runner = make_runner(engine, group, progress, lambda plan: channel.broadcast({"kind": "step", "plan": plan}))
    except BaseException:
        channel.close()
        raise
    return runner, channel


def start_follower(
    engine: EngineParams, ranks: RankParams, rank: int, leader_address: str
) -> tuple[Runner, FollowerChannel]:
    """Rank `rank`'s model, and its line to the leader. Raises RankLost, ConfigError."""
    channel = FollowerChannel.connect(leader_address, rank, ranks.secret, ranks.collective_timeout_s)
    try:
        channel.receive()  # "join": all ranks are here, so that nobody waits in the group for one that still starts
        group = _join(channel, engine, ranks, rank)
        runner = make_runner(engine, group, _no_progress, None)
    except BaseException:
        channel.close()
        raise
    return runner, channel


def await_followers(inbox: queue.SimpleQueue[object], size: int, timeout_s: float) -> dict[int, Message]:
    """What followers said with "ready", by rank; other items stay in the inbox. Raises RankLost naming the silent."""
    ready: dict[int, Message] = {}
    others: list[object] = []
    deadline = time.monotonic() + timeout_s
    while missing := set(range(1, size)) - ready.keys():
        try:
            item = inbox.get(timeout=max(0.001, deadline - time.monotonic()))
        except queue.Empty:
            raise RankLost(f"rank(s) {sorted(missing)} did not load within {timeout_s:g} s") from None
        if isinstance(item, RankLost):
            raise item
        if isinstance(item, RankMessage) and item.message["kind"] == "ready":
            ready[item.rank] = item.message
        else:
            others.append(item)
    for item in others:
        inbox.put(item)
    return ready


def _no_progress(done: int, total: int) -> None:
    """The leader's progress stands for all: the ranks load at the same time."""


def _join(channel: LeaderChannel | FollowerChannel, engine: EngineParams, ranks: RankParams, rank: int) -> RankGroup:
    backend = "nccl" if engine.device == "cuda" else "gloo"
    size = engine.tensor_parallel
    return TorchGroup.join(channel, backend, rank, size, ranks.collective_timeout_s, ranks.host, engine.batch_invariant)
