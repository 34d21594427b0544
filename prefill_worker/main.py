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
from ..engine.prefill_scheduler import PrefillScheduler
from ..engine.rank_start import RankParams, await_followers, start_follower, start_leader
from ..engine.runner import Runner
from ..engine.step import unpack_plan
from ..kv_transfer.ends import Ends, News, message_of
from ..proto import worker_pb2 as pb
from ..proto.clock import clock_name
from ..proto.session_server import SessionParams
from ..proto.worker_serve import Beside, Stop, serve_worker
from .effects import ExpectPrefix, OpenTransfer
from .legs import PrefillLegs, Rules
from .params import PrefillParams
from .worker import PrefillEngine, expect_prefix, open_transfer, push_layers

_POLL_S = 0.2

Report = Callable[[str, dict[str, Any]], None]


def run_leader(params: PrefillParams, report: Report, stop: Stop, beside: Beside | None = None) -> None:
    """Rank 0, until `stop`. Reports "channel" (several ranks only), "loading" and "ready". beside: see serve_worker.

    Raises ConfigError for what cannot run, RankLost when a follower is gone, and whatever broke the engine.
    """
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    runner, channel = start_leader(params.engine, _ranks(params), inbox.put, inbox.put, report)
    try:
        ends = _ends(params, runner, 0, inbox.put)
        try:
            ready = await_followers(inbox, params.engine.tensor_parallel, params.start_timeout_s)
            addresses = (ends.receiver.address, *(ready[rank]["address"] for rank in sorted(ready)))
            issue = ends.issuer(addresses, params.fetch_timeout_s)
            runner.warm_up()
            engine = PrefillEngine(runner, ends.sender, ends.receiver, channel, issue, _book(params, runner), inbox)
            _serve(params, runner, engine, channel, inbox, report, stop, beside)
        finally:
            ends.close()
    except RankLost:
        if not stop.is_set():  # at the end the ranks leave in any order
            raise
    finally:
        if channel is not None:
            channel.close()


def _book(params: PrefillParams, runner: Runner) -> PrefillLegs:
    pool = BlockPool(runner.blocks, params.engine.block_size, params.engine.prefix_cache)
    rules = Rules(params.commit_timeout_s, params.fetch_min_tokens, params.fetch_timeout_s)
    return PrefillLegs(pool, PrefillScheduler(params.max_batch_tokens), params.engine.tensor_parallel, rules)


def _serve(
    params: PrefillParams,
    runner: Runner,
    engine: PrefillEngine,
    channel: LeaderChannel | None,
    inbox: queue.SimpleQueue[object],
    report: Report,
    stop: Stop,
    beside: Beside | None,
) -> None:
    clocks = SessionParams(params.heartbeat_s, params.dead_after_s, params.peer_tls)
    welcome = _welcome(params, runner)
    asyncio.run(serve_worker(engine, inbox, clocks, welcome, params.host, params.port, report, stop, beside))
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
        clock=clock_name(),
        max_batch_tokens=params.max_batch_tokens,
        lookahead=params.lookahead,
    )


def run_follower(params: PrefillParams, rank: int, leader_address: str, stop: Stop) -> None:
    """Rank `rank` > 0, until the leader says so, or `stop`. Raises RankLost when the leader is gone, ConfigError."""
    runner, channel = start_follower(params.engine, _ranks(params), rank, leader_address)
    ends = _ends(params, runner, rank, lambda news: _tell_leader(channel, news))
    ended = threading.Event()
    watcher = threading.Thread(target=_close_on_stop, args=(channel, stop, ended), name="stop-watcher", daemon=True)
    watcher.start()
    try:
        channel.send({"kind": "ready", "address": ends.receiver.address})
        while _obey(channel.receive(), runner, ends):
            pass
    except RankLost:
        if not stop.is_set():
            raise
    finally:
        ended.set()
        watcher.join()
        ends.close()
        channel.close()


def _obey(message: Message, runner: Runner, ends: Ends) -> bool:
    """Do what the leader says, in its order; False: that was all."""
    sender, receiver = ends.sender, ends.receiver
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
        case {"kind": "expect", "leg": leg, "nonce": nonce, "blocks": blocks, "start": start, "stop": stop}:
            expect_prefix(receiver, nonce, ExpectPrefix(0, tuple(leg), tuple(blocks), start, stop))
        case {"kind": "forget", "leg": leg}:
            receiver.forget(tuple(leg))
        case {"kind": "shutdown"}:
            return False
        case _:
            raise RankLost(f"the leader said {message.get('kind')!r}, which this rank does not know")
    return True


def _tell_leader(channel: FollowerChannel, news: News) -> None:
    """From a transfer's thread; a leader that is gone is noticed by the main thread."""
    with suppress(RankLost):
        channel.send(message_of(news))


def _ends(params: PrefillParams, runner: Runner, rank: int, on_news: Callable[[News], None]) -> Ends:
    identity = (params.worker_id, params.incarnation, params.secret)
    return Ends(params.transfer, runner.kv, runner.layout, rank, *identity, on_news)


def _close_on_stop(channel: FollowerChannel, stop: Stop, ended: threading.Event) -> None:
    """The main thread waits in `receive`; closing the line wakes it."""
    while not ended.wait(_POLL_S):
        if stop.is_set():
            channel.close()
            return


def _ranks(params: PrefillParams) -> RankParams:
    return RankParams(params.host, params.secret, params.start_timeout_s, params.rank_timeout_s)
