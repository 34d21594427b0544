"""The mains of a prefill worker's ranks: the leader serves routers and drives the others."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..engine.block_pool import BlockPool
from ..engine.channel import FollowerChannel, LeaderChannel, Message, RankLost
from ..engine.rank_start import RankParams, await_followers, start_follower, start_leader
from ..engine.runner import Runner
from ..engine.step import unpack_plan
from ..kv_transfer.events import SendEvent, Sent
from ..kv_transfer.sender import Sender
from ..proto import worker_pb2 as pb
from ..proto.session_server import SessionParams
from ..proto.worker_serve import Stop, serve_worker
from .effects import OpenTransfer
from .legs import PrefillLegs
from .params import PrefillParams
from .scheduler import PrefillScheduler
from .worker import PrefillEngine, open_transfer, push_layers

_POLL_S = 0.2

Report = Callable[[str, dict[str, Any]], None]


def run_leader(params: PrefillParams, report: Report, stop: Stop) -> None:
    """Rank 0, until `stop`. Reports "channel" (several ranks only), "loading" and "ready".

    Raises ConfigError for what cannot run, RankLost when a follower is gone, and whatever broke the engine.
    """
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    runner, channel = start_leader(params.engine, _ranks(params), inbox.put, inbox.put, report)
    try:
        sender = Sender(params.transfer, runner.kv, runner.layout, 0, inbox.put)
        try:
            await_followers(inbox, params.engine.tensor_parallel, params.start_timeout_s)
            runner.warm_up()
            _serve(params, runner, sender, channel, inbox, report, stop)
        finally:
            sender.close()
    except RankLost:
        if not stop.is_set():  # at the end the ranks leave in any order
            raise
    finally:
        if channel is not None:
            channel.close()


def _serve(
    params: PrefillParams,
    runner: Runner,
    sender: Sender,
    channel: LeaderChannel | None,
    inbox: queue.SimpleQueue[object],
    report: Report,
    stop: Stop,
) -> None:
    pool = BlockPool(runner.blocks, params.engine.block_size, params.engine.prefix_cache)
    legs = PrefillLegs(pool, PrefillScheduler(params.max_batch_tokens), params.engine.tensor_parallel)
    engine = PrefillEngine(runner, sender, channel, legs, inbox)
    clocks = SessionParams(params.heartbeat_s, params.dead_after_s)
    asyncio.run(serve_worker(engine, inbox, clocks, _welcome(params, runner), params.host, params.port, report, stop))
    if channel is not None:
        channel.broadcast({"kind": "shutdown"})


def _welcome(params: PrefillParams, runner: Runner) -> pb.Welcome:
    return pb.Welcome(
        worker_id=params.worker_id,
        incarnation=params.incarnation,
        role="prefill",
        model_fingerprint=runner.layout.fingerprint,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        block_size=params.engine.block_size,
        total_blocks=runner.blocks,
        max_batch_tokens=params.max_batch_tokens,
        lookahead=params.lookahead,
    )


def run_follower(params: PrefillParams, rank: int, leader_address: str, stop: Stop) -> None:
    """Rank `rank` > 0, until the leader says so, or `stop`. Raises RankLost when the leader is gone, ConfigError."""
    runner, channel = start_follower(params.engine, _ranks(params), rank, leader_address)
    sender = Sender(params.transfer, runner.kv, runner.layout, rank, lambda event: _tell_leader(channel, event))
    ended = threading.Event()
    watcher = threading.Thread(target=_close_on_stop, args=(channel, stop, ended), name="stop-watcher", daemon=True)
    watcher.start()
    try:
        channel.send({"kind": "ready"})
        while _obey(channel.receive(), runner, sender):
            pass
    except RankLost:
        if not stop.is_set():
            raise
    finally:
        ended.set()
        watcher.join()
        sender.close()
        channel.close()


def _obey(message: Message, runner: Runner, sender: Sender) -> bool:
    """Do what the leader says, in its order; False: that was all."""
    match message:
        case {"kind": "step", "plan": plan}:
            kind, steps = unpack_plan(plan)
            runner.follow(kind, steps, lambda low, high: push_layers(sender, steps, low, high))
        case {"kind": "open", "leg": leg, "ticket": ticket, "blocks": blocks, "tokens": tokens, "cached": cached}:
            open_transfer(sender, runner.layout.layers, OpenTransfer(tuple(leg), ticket, blocks, tokens, cached))
        case {"kind": "abandon", "leg": leg}:
            sender.abandon(tuple(leg))
        case {"kind": "cancel", "leg": leg}:
            sender.cancel(tuple(leg))
        case {"kind": "shutdown"}:
            return False
        case _:
            raise RankLost(f"the leader said {message.get('kind')!r}, which this rank does not know")
    return True


def _tell_leader(channel: FollowerChannel, event: SendEvent) -> None:
    """From a transfer's thread; a leader that is gone is noticed by the main thread."""
    with suppress(RankLost):
        if isinstance(event, Sent):
            times = {"started_at": event.started_at, "ended_at": event.ended_at}
            channel.send({"kind": "sent", "leg": event.leg, "bytes": event.bytes, "frames": event.frames, **times})
        else:
            error = event.error
            channel.send({"kind": "send_failed", "leg": event.leg, "code": error.code, "message": error.message})


def _close_on_stop(channel: FollowerChannel, stop: Stop, ended: threading.Event) -> None:
    """The main thread waits in `receive`; closing the line wakes it."""
    while not ended.wait(_POLL_S):
        if stop.is_set():
            channel.close()
            return


def _ranks(params: PrefillParams) -> RankParams:
    return RankParams(params.host, params.secret, params.start_timeout_s, params.rank_timeout_s)
