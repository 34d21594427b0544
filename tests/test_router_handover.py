"""What the router does with KV that exists, on scripted workers: sent again, moved off a draining worker, given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from baton.proto import worker_pb2 as pb
from baton.router import lives
from baton.router.life_messages import LegKey
from baton.router.moves import AT_ONCE, Stream, due
from baton.router.outstanding import Room
from baton.tests.harness.router_rig import Collected, FakeWorker, RouterRig, key_of, ref_of, router_rig, say, until

LONG = "abcdefghijklmnopqrstuvwxyz" * 3


@pytest_asyncio.fixture
async def wide(tmp_path: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(tmp_path, "prefill-0", "decode-0", "decode-1") as rig:
        yield rig


def kinds(worker: FakeWorker) -> list[str]:
    """The commands that it got."""
    return [kind for kind, _ in worker.commands]


async def streaming(rig: RouterRig, tokens: int, **fields: Any) -> tuple[asyncio.Task[Collected], FakeWorker]:
    """A call that has decoded `tokens` tokens, and the worker that decodes it."""
    rig.cluster.script = say(LONG)
    call = await rig.streaming(tokens, **fields)
    return call, rig.serving("decode")


def unsent(worker: FakeWorker, rig: RouterRig, times: int) -> None:
    """The worker's first transfers break after the first token; the KV is kept."""
    left = [times]

    async def prefill(leg: pb.Leg, ticket: bytes) -> None:
        if not left[0]:
            await worker.prefill(leg, ticket)
            return
        left[0] -= 1
        rig.cluster.tickets.pop(ticket)
        tokens = [worker.token(leg, choice, 0) for choice in leg.choices]
        worker.emit(first=pb.FirstTokens(leg=ref_of(leg), tokens=tokens))
        worker.emit(unsent=pb.Unsent(leg=ref_of(leg), code="transfer_failed", message="link lost"))

    worker.on_prefill = prefill


async def test_what_is_computed_is_sent_again_to_the_other_decode_worker(wide: RouterRig) -> None:
    prefill = wide.cluster["prefill-0"]
    unsent(prefill, wide, times=1)
    answer = await wide.generate(prompt="x", n=2)
    assert answer.texts == {0: "hello", 1: "hello"}
    assert kinds(prefill) == ["prefill", "handover", "release"]
    assert [kinds(wide.cluster[f"decode-{n}"]).count("reserve") for n in range(2)] == [1, 1]
    assert answer.finished[-1].timing.attempts == 2
    assert await wide.metric("baton_legs_handed_over_total", cause="retry") == 1
    assert await wide.metric("baton_recomputed_tokens_total") == 0


@pytest.mark.parametrize("word", ["late", "never"])
async def test_a_leg_that_decode_has_is_not_sent_again(
    wide: RouterRig, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """The source heard no acknowledgement, and says so before the decode worker's word comes, if that ever does."""
    monkeypatch.setattr(lives, "_ANSWER_S", 0.1)
    prefill = wide.cluster["prefill-0"]

    async def unacknowledged(leg: pb.Leg, ticket: bytes) -> None:
        decode, _ = wide.cluster.tickets.pop(ticket)
        tokens = [prefill.token(leg, choice, 0) for choice in leg.choices]
        prefill.emit(first=pb.FirstTokens(leg=ref_of(leg), tokens=tokens))
        prefill.emit(unsent=pb.Unsent(leg=ref_of(leg), code="transfer_failed", message="link lost"))
        prefill.on_prefill = prefill.prefill

        def asked(order: pb.Withdraw) -> None:
            if word == "late":
                decode.emit(committed=pb.Committed(leg=ref_of(leg)))
                decode._tasks[key_of(leg)] = asyncio.ensure_future(decode.decode(leg))

        decode.on_withdraw = asked

    prefill.on_prefill = unacknowledged
    answer = await wide.generate(prompt="x")
    assert answer.texts == {0: "hello"}
    assert kinds(prefill) == ["prefill", "release"] if word == "late" else ["prefill", "handover", "release"]
    assert answer.finished[-1].timing.attempts == (1 if word == "late" else 2)
    assert await wide.metric("baton_retries_total") == (word == "never")


async def test_kv_that_is_not_there_any_more_is_computed_again_and_counts_no_try(wide: RouterRig) -> None:
    prefill = wide.cluster["prefill-0"]
    unsent(prefill, wide, times=2)
    reaped = prefill._hand_over

    async def forgetful(order: pb.Handover) -> None:
        prefill.held.clear()
        await reaped(order)

    prefill._hand_over = forgetful  # type: ignore[method-assign]
    answer = await wide.generate(prompt="x")
    assert answer.texts == {0: "hello"}
    assert kinds(prefill) == ["prefill", "handover", "prefill", "handover", "prefill", "release"]
    assert answer.finished[-1].timing.attempts == 3


async def test_a_decode_worker_lost_before_the_commit_costs_no_second_prefill(wide: RouterRig) -> None:
    prefill = wide.cluster["prefill-0"]
    lost: list[FakeWorker] = []

    async def hand_over(leg: pb.Leg, ticket: bytes) -> None:
        decode, _ = wide.cluster.tickets[ticket]
        lost.append(decode)
        tokens = [prefill.token(leg, choice, 0) for choice in leg.choices]
        prefill.emit(first=pb.FirstTokens(leg=ref_of(leg), tokens=tokens))
        prefill.on_prefill = prefill.prefill
        asyncio.get_running_loop().create_task(decode.kill())

    prefill.on_prefill = hand_over
    answer = await wide.generate(prompt="x")
    assert answer.texts == {0: "hello"}
    assert kinds(prefill) == ["prefill", "handover", "release"]
    await wide.cluster.set_state(lost[0].worker_id, "")


@pytest.mark.parametrize("committed", [True, False])
async def test_a_prefill_worker_lost_before_the_commit_is_heard_of_costs_nothing_if_decode_has_all(
    wide: RouterRig, committed: bool
) -> None:
    prefill = wide.cluster["prefill-0"]
    asked: list[FakeWorker] = []

    async def hand_over(leg: pb.Leg, ticket: bytes) -> None:
        decode, _ = wide.cluster.tickets.pop(ticket)
        tokens = [prefill.token(leg, choice, 0) for choice in leg.choices]
        prefill.emit(first=pb.FirstTokens(leg=ref_of(leg), tokens=tokens))
        prefill.on_prefill = prefill.prefill

        def answer(order: pb.Withdraw) -> None:
            asked.append(decode)
            if not committed:
                decode.withdraw(order)
                return
            decode.emit(committed=pb.Committed(leg=ref_of(leg)))
            decode._tasks[key_of(leg)] = asyncio.ensure_future(decode.decode(leg))

        decode.on_withdraw = answer
        asyncio.get_running_loop().create_task(prefill.kill())

    prefill.on_prefill = hand_over
    call = asyncio.ensure_future(wide.generate(prompt="x"))
    await until(lambda: asked)
    await wide.cluster.set_state("prefill-0", "")
    if not committed:
        await wide.cluster.add("prefill-1")
    answer = await call
    assert answer.texts == {0: "hello"}
    assert answer.finished[-1].timing.attempts == (1 if committed else 2)
    assert await wide.metric("baton_retries_total") == (not committed)


async def test_streams_move_off_a_draining_worker(wide: RouterRig) -> None:
    call, here = await streaming(wide, 4, prompt="x", max_tokens=60)
    await wide.cluster.set_state(here.worker_id, "draining")
    await until(lambda: not here.held)
    assert not call.done()
    answer = await call
    assert answer.texts[0] == LONG[:60]
    assert kinds(here) == ["reserve", "hold", "handover", "release"]
    assert kinds(wide.cluster["prefill-0"]) == ["prefill", "release"]
    assert answer.finished[-1].timing.attempts == 1
    assert await wide.metric("baton_legs_handed_over_total", cause="moved") == 1
    assert await wide.metric("baton_retries_total") == 0


async def test_streams_stay_where_nobody_else_has_room(wide: RouterRig) -> None:
    call, here = await streaming(wide, 4, prompt="x", max_tokens=60)
    (there,) = [w for w in wide.cluster.workers.values() if w.role == "decode" and w is not here]
    there.used_blocks = 60  # of 64; the stream may need 16
    await wide.counts("baton_kv_used_blocks", 60, worker=there.worker_id)
    await wide.cluster.set_state(here.worker_id, "draining")
    answer = await call
    assert answer.texts[0] == LONG[:60]
    assert kinds(here) == ["reserve"]


@pytest.mark.parametrize("fault", ["target full", "target lost", "source lost", "nothing held"])
async def test_a_move_that_fails_falls_back_and_loses_no_token(wide: RouterRig, fault: str) -> None:
    call, here = await streaming(wide, 4, prompt="x", max_tokens=60)
    (there,) = [w for w in wide.cluster.workers.values() if w.role == "decode" and w is not here]
    reserve = there.reserve

    async def once(leg: pb.Leg) -> None:
        there.on_reserve = reserve
        if fault == "target full":
            there.fail(leg, "exhausted")
        elif fault == "target lost":
            there.fail(leg, "unavailable")
        elif fault == "source lost":
            await here.kill()
            await reserve(leg)
        else:
            here.held.clear()
            await reserve(leg)

    there.on_reserve = once
    await wide.cluster.set_state(here.worker_id, "draining")
    answer = await call
    assert answer.texts[0] == LONG[:60]
    recomputed = fault in ("source lost", "nothing held")
    assert kinds(wide.cluster["prefill-0"]).count("prefill") == 1 + recomputed
    if fault == "source lost":
        await wide.cluster.set_state(here.worker_id, "")


@pytest.mark.parametrize("stage", ["hold", "held", "handed over"])
async def test_a_cancel_frees_both_sides_at_every_stage_of_a_move(wide: RouterRig, stage: str) -> None:
    call, here = await streaming(wide, 4, prompt="x", max_tokens=60)
    (there,) = [w for w in wide.cluster.workers.values() if w.role == "decode" and w is not here]
    reached = asyncio.Event()

    async def stop(*order: Any) -> None:
        reached.set()

    if stage == "hold":
        here.on_hold = lambda key, choice: reached.set()
    elif stage == "held":
        there.on_reserve = stop  # no ticket
    else:
        here.hand_over = stop  # type: ignore[method-assign, assignment]
    await wide.cluster.set_state(here.worker_id, "draining")
    await asyncio.wait_for(reached.wait(), 20)
    call.cancel()
    await wide.cluster.settled()


def test_moves_go_where_there_is_room_and_are_bounded() -> None:
    streams = [Stream(f"r{n}", LegKey(1, 0), 0, 100) for n in range(20)]
    assert due(streams, [], []) == []
    assert len(due(streams, [Room(250, 9), Room(120, 9)], [])) == 3
    assert len(due(streams, [Room(1000, 2)], [])) == 2
    assert len(due(streams, [Room(10_000, 99)], [])) == AT_ONCE
    assert len(due(streams, [Room(10_000, 99)], [100] * (AT_ONCE - 1))) == 1
    assert due(streams, [Room(250, 9)], [100, 100]) == []
    mixed = [Stream("long", LegKey(1, 0), 0, 900), Stream("short", LegKey(1, 0), 0, 50)]
    assert [stream.request_id for stream in due(mixed, [Room(100, 9)], [])] == ["short"]
