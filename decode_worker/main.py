"""The mains of a decode worker's ranks: the leader serves routers and drives the others."""

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
from ..engine.speculation_start import start_speculation
from ..engine.step import unpack_plan
from ..kv_transfer.ends import Ends, News, message_of
from ..proto import worker_pb2 as pb
from ..proto.clock import clock_name
from ..proto.session_server import SessionParams
from ..proto.worker_serve import Beside, Stop, serve_worker
from .effects import Send
from .intake import Intake
from .legs import DecodeLegs
from .params import DecodeParams
from .prompts import Prompts
from .scheduler import DecodeScheduler
from .worker import DecodeEngine, send_all

_POLL_S = 0.2

Report = Callable[[str, dict[str, Any]], None]


def run_leader(params: DecodeParams, report: Report, stop: Stop, beside: Beside | None = None) -> None:
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
            issue = ends.issuer(addresses, params.commit_timeout_s)
            runner.warm_up()
            speculator = start_speculation(params.speculation, params.engine, runner)
            legs = _book(params, runner)
            engine = DecodeEngine(runner, ends.sender, ends.receiver, channel, issue, legs, inbox, speculator)
            _serve(params, runner, engine, channel, inbox, report, stop, beside)
        finally:
            ends.close()
    except RankLost:
        if not stop.is_set():  # at the end the ranks leave in any order
            raise
    finally:
        if channel is not None:
            channel.close()


def _book(params: DecodeParams, runner: Runner) -> DecodeLegs:
    pool = BlockPool(runner.blocks, params.engine.block_size, params.engine.prefix_cache)
    ranks, seats = params.engine.tensor_parallel, params.max_sequences
    intake = Intake(pool, ranks, seats, params.reserve_wait_s, params.commit_timeout_s)
    prompts = Prompts(pool, PrefillScheduler(params.max_batch_tokens))
    scheduler = DecodeScheduler(params.engine.block_size)
    return DecodeLegs(pool, intake, scheduler, prompts, seats, runner.max_model_len)


def _serve(
    params: DecodeParams,
    runner: Runner,
    engine: DecodeEngine,
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


def _welcome(params: DecodeParams, runner: Runner) -> pb.Welcome:
    return pb.Welcome(
        worker_id=params.worker_id,
        incarnation=params.incarnation,
        role="decode",
        model_fingerprint=runner.layout.fingerprint,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        block_size=params.engine.block_size,
        total_blocks=runner.blocks,
        clock=clock_name(),
        max_sequences=params.max_sequences,
        max_batch_tokens=params.max_batch_tokens,
    )


def run_follower(params: DecodeParams, rank: int, leader_address: str, stop: Stop) -> None:
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
            runner.follow(kind, steps, _ignore_layers)
        case {"kind": "expect", "leg": leg, "nonce": nonce, "blocks": blocks, "cached": cached, "tokens": tokens}:
            receiver.expect(tuple(leg), nonce, blocks, (cached, tokens))
        case {"kind": "forget", "leg": leg}:
            receiver.forget(tuple(leg))
        case {"kind": "copy", "pairs": pairs}:
            runner.kv.copy_blocks(pairs)
        case {"kind": "send", "leg": leg, "ticket": ticket, "blocks": blocks, "tokens": tokens}:
            send_all(sender, runner.layout.layers, Send(tuple(leg), ticket, tuple(blocks), tokens, b""))
        case {"kind": "cancel_send", "leg": leg}:
            sender.cancel(tuple(leg))
        case {"kind": "shutdown"}:
            return False
        case _:
            raise RankLost(f"the leader said {message.get('kind')!r}, which this rank does not know")
    return True


def _tell_leader(channel: FollowerChannel, news: News) -> None:
    """From a transfer's thread; a leader that is gone is noticed by the main thread."""
    with suppress(RankLost):
        channel.send(message_of(news))


def _ends(params: DecodeParams, runner: Runner, rank: int, on_news: Callable[[News], None]) -> Ends:
    identity = (params.worker_id, params.incarnation, params.secret)
    return Ends(params.transfer, runner.kv, runner.layout, rank, *identity, on_news)


def _ignore_layers(low: int, high: int) -> None:
    """What a decode worker sends on, it sends as a whole."""


def _close_on_stop(channel: FollowerChannel, stop: Stop, ended: threading.Event) -> None:
    """The main thread waits in `receive`; closing the line wakes it."""
    while not ended.wait(_POLL_S):
        if stop.is_set():
            channel.close()
            return


def _ranks(params: DecodeParams) -> RankParams:
    return RankParams(params.host, params.secret, params.start_timeout_s, params.rank_timeout_s)
