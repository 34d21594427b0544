"""KV that goes on elsewhere, on live workers: sent again from the prefill worker's blocks, moved from one decode worker
to another, and given back to the prefill worker. O-eq against the monolithic run, O-pool after each test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from baton.proto import failpoints
from baton.proto import worker_pb2 as pb
from baton.proto.leg import key_of, ref_of
from baton.tests.harness.monolithic import Monolithic, sampling
from baton.tests.harness.worker_crew import Crew, crew, moved, next_leg
from baton.tests.harness.worker_rig import decode_params, engine_params, prefill_params
from baton.tests.harness.worker_router import Answer, leg_message


def prompt_of(length: int, start: int = 7) -> list[int]:
    return [(start * (length + 1) + 13 * index) % 250 for index in range(length)]


@pytest.fixture(scope="module")
def alone(tiny_dir: Path) -> Monolithic:
    """The oracle."""
    return Monolithic(tiny_dir)


def check(alone: Monolithic, prompt: Sequence[int], answer: Answer, **changes: Any) -> None:
    """The answer is that of the monolithic run."""
    expected = alone.run(prompt, **changes)
    assert [answer.ids(choice) for choice in sorted(answer.tokens)] == [choice.token_ids for choice in expected]
    assert answer.reasons == [choice.finish_reason for choice in expected]


INT8: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_dtype": "int8",
}  # bits hold for any batch
SAMPLED = {"n": 3, "temperature": 1.0, "seed": 11, "repetition_penalty": 1.2, "max_tokens": 10}


# ---- sent again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "first_is_out"), [((1, 1, 1), True), ((2, 1, 2), True), ((1, 1, 2), False)], ids=str)
async def test_a_leg_whose_decode_worker_is_lost_is_sent_again_without_computing(
    tiny_dir: Path, alone: Monolithic, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: Any, first_is_out: bool
) -> None:
    """first_is_out: everything is computed when that happens; otherwise the first of four chunks is under way."""
    prompt = prompt_of(57)
    engines = [engine_params(tiny_dir, tensor_parallel=count) for count in ranks]
    async with crew(prefill_params(engines[0]), *map(decode_params, engines[1:])) as all_:
        one, answer = leg_message(prompt, sampling(**SAMPLED)), Answer()
        if not first_is_out:
            monkeypatch.setattr(failpoints, "_GATES", tmp_path)
            monkeypatch.setattr(failpoints, "_RULES", failpoints.parse("prefill.chunk=gate"))
            (tmp_path / "prefill.chunk").touch()
        ticket = await all_.reserve(one, all_.decodes[0])
        await all_.cancel(all_.decodes[0], key_of(one))  # the reservation is gone: whatever comes is refused
        await all_.prefill.send(pb.RouterCommand(prefill=pb.Prefill(leg=one, ticket=ticket)))
        if first_is_out:
            unsent = await all_.news(all_.prefill, key_of(one), "unsent")
            assert unsent.code == "transfer_failed"
            await all_.news(all_.prefill, key_of(one), "first")
        two = next_leg(one)
        ticket = await all_.reserve(two, all_.decodes[1])
        await all_.hand_over(all_.prefill, two, ticket, key_of(one))
        (tmp_path / "prefill.chunk").unlink(missing_ok=True)
        await all_.finish(two, all_.prefill, all_.decodes[1], answer)
        assert all_.prefill.load.computed_prompt_tokens == 57
        assert len(all_.prefill.of(key_of(two), "first")) == 1
    check(alone, prompt, answer, **SAMPLED)


async def test_what_was_reaped_is_refused_and_computed_by_a_new_leg(tiny_dir: Path, alone: Monolithic) -> None:
    prompt = prompt_of(21)
    prefill = prefill_params(engine_params(tiny_dir), commit_timeout_s=0.2)
    async with crew(prefill, *(decode_params(engine_params(tiny_dir)) for _ in range(2))) as all_:
        one, answer = leg_message(prompt, sampling()), Answer()
        ticket = await all_.reserve(one, all_.decodes[0])
        await all_.cancel(all_.decodes[0], key_of(one))
        await all_.prefill.send(pb.RouterCommand(prefill=pb.Prefill(leg=one, ticket=ticket)))
        await all_.news(all_.prefill, key_of(one), "unsent")
        await all_.prefill.wait_idle()
        two = next_leg(one)
        ticket = await all_.reserve(two, all_.decodes[1])
        await all_.hand_over(all_.prefill, two, ticket, key_of(one))
        failed = await all_.prefill.failed(key_of(two))
        assert failed.code == "unavailable"
        await all_.cancel(all_.decodes[1], key_of(two))
        three = next_leg(two)
        await all_.start(three, all_.decodes[1])
        await all_.finish(three, all_.prefill, all_.decodes[1], answer)
        assert all_.prefill.load.computed_prompt_tokens == 21 + 1  # the prefix cache kept the rest
    check(alone, prompt, answer)


# ---- moved ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice does not come to its end before it is held."""
    monkeypatch.setattr(failpoints, "_RULES", failpoints.parse("decode.step=sleep(0.05)"))


MOVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # engine of the first and of the second decode worker
    "tp-1-to-2": ({}, {"tensor_parallel": 2}),
    "tp-2-to-1-blocks-4-to-8": ({"tensor_parallel": 2}, {"block_size": 8, "kv_blocks": 32}),
    "int8-pools-blocks-4-to-8": (INT8, {"block_size": 8, "kv_blocks": 32, **INT8}),
}


@pytest.mark.parametrize("row", MOVES)
@pytest.mark.usefixtures("slow_steps")
async def test_choices_move_to_another_decode_worker_and_back(
    tiny_dir: Path, alone: Monolithic, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choice 1 of three moves after some tokens, and then moves back; the others stay where they are."""
    changes = SAMPLED | {"max_tokens": 40}
    prompt = prompt_of(21)
    engines = [engine_params(tiny_dir, **engine) for engine in MOVES[row]]
    kinds = INT8 if row.startswith("int8") else {}
    alone = Monolithic(tiny_dir, **kinds) if kinds else alone
    async with crew(prefill_params(engine_params(tiny_dir, **kinds)), *map(decode_params, engines)) as all_:
        one, answer = leg_message(prompt, sampling(**changes)), Answer()
        here, there = all_.decodes
        await all_.start(one, here)
        await all_.news(here, key_of(one), "committed")
        await all_.release(all_.prefill, key_of(one))
        await here.until(lambda: len(here.tokens(key_of(one))) >= 9)
        leg, source, target = one, here, there
        for attempt in (2, 3):
            await all_.hold(source, key_of(leg), 1, answer)
            assert not answer.tokens[1][-1].finish_reason
            following = moved(one, 1, answer, attempt)
            ticket = await all_.reserve(following, target)
            await all_.hand_over(source, following, ticket, key_of(leg))
            await all_.news(target, key_of(following), "committed")
            await all_.release(source, key_of(following))
            leg, source, target = following, target, source
        monkeypatch.setattr(failpoints, "_RULES", {})
        await all_.finish(leg, target, source, answer)
        await here.until(lambda: sum(bool(t.finish_reason) for t in here.tokens(key_of(one))) == 2)
        all_.take(here, key_of(one), answer)
        assert all_.prefill.load.computed_prompt_tokens == 21
        await here.until(lambda: here.of(key_of(leg), "sent") or there.of(key_of(leg), "sent"))
    check(alone, prompt, answer, **changes)


@pytest.mark.usefixtures("slow_steps")
async def test_a_move_whose_target_is_lost_goes_to_another_from_the_same_blocks(
    tiny_dir: Path, alone: Monolithic
) -> None:
    prompt = prompt_of(18)
    decodes = [decode_params(engine_params(tiny_dir)) for _ in range(3)]
    async with crew(prefill_params(engine_params(tiny_dir)), *decodes) as all_:
        one, answer = leg_message(prompt, sampling(max_tokens=30)), Answer()
        first, lost, last = all_.decodes
        await all_.start(one, first)
        await all_.news(first, key_of(one), "committed")
        await all_.release(all_.prefill, key_of(one))
        await all_.hold(first, key_of(one), 0, answer)
        two = moved(one, 0, answer)
        ticket = await all_.reserve(two, lost)
        await all_.cancel(lost, key_of(two))
        await all_.hand_over(first, two, ticket, key_of(one))
        await all_.news(first, key_of(two), "unsent")
        three = moved(one, 0, answer, attempt=3)
        ticket = await all_.reserve(three, last)
        await all_.hand_over(first, three, ticket, key_of(two))
        await all_.finish(three, first, last, answer)
    check(alone, prompt, answer, max_tokens=30)


@pytest.mark.parametrize("when", ["held", "sending"])
@pytest.mark.usefixtures("slow_steps")
async def test_a_cancel_or_a_lost_session_frees_what_is_held(tiny_dir: Path, when: str) -> None:
    async with crew(prefill_params(engine_params(tiny_dir)), *[decode_params(engine_params(tiny_dir))] * 2) as all_:
        here, there = all_.decodes
        one, answer = leg_message(prompt_of(18), sampling(max_tokens=200)), Answer()
        await all_.start(one, here)
        await all_.news(here, key_of(one), "committed")
        await all_.release(all_.prefill, key_of(one))
        await all_.hold(here, key_of(one), 0, answer)
        held = key_of(one)
        if when == "sending":
            two = moved(one, 0, answer)
            ticket = await all_.reserve(two, there)
            await all_.hand_over(here, two, ticket, held)
            held = key_of(two)
            await all_.cancel(there, held)
        await all_.cancel(here, held)
        await asyncio.gather(here.wait_idle(), there.wait_idle())


# ---- given to the prefill worker -----------------------------------------------------------------------------------


async def turn(all_: Crew, leg: pb.Leg, answer: Answer, *, give: bool) -> None:
    """One leg on the first decode worker; the prefill worker's wish for a prefix is passed on, or not."""
    decode = all_.decodes[0]
    await all_.start(leg, decode)

    def stage() -> list[Any]:
        return all_.prefill.of(key_of(leg), "want") or all_.prefill.of(key_of(leg), "first")

    (news,) = await all_.prefill.until(stage)
    if isinstance(news, pb.Want) and give:
        await decode.send(pb.RouterCommand(give=pb.Give(leg=ref_of(key_of(leg)), ticket=news.ticket)))
    await all_.finish(leg, all_.prefill, decode, answer)


FETCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # prefill engine, decode engine
    "tp-1-to-2": ({}, {"tensor_parallel": 2}),
    "tp-2-to-1-blocks-8-to-4": ({"tensor_parallel": 2, "block_size": 8, "kv_blocks": 32}, {}),
    "no-prefix-cache-here": ({"prefix_cache": False}, {}),
    "int8-pools-blocks-8-to-4": ({"block_size": 8, "kv_blocks": 32, **INT8}, INT8),
}


@pytest.mark.parametrize("row", FETCHES)
async def test_the_second_turn_computes_only_the_new_message(tiny_dir: Path, alone: Monolithic, row: str) -> None:
    prefill_engine, decode_engine = (engine_params(tiny_dir, **engine) for engine in FETCHES[row])
    alone = Monolithic(tiny_dir, **INT8) if row.startswith("int8") else alone
    prefill = prefill_params(prefill_engine, fetch_min_tokens=4)
    async with crew(prefill, decode_params(decode_engine)) as all_:
        prompt, first, second = prompt_of(21), Answer(), Answer()
        await turn(all_, leg_message(prompt, sampling(max_tokens=24)), first, give=True)
        assert all_.prefill.load.computed_prompt_tokens == 21
        longer = [*prompt, *first.ids(), 5, 6, 7]  # 48 tokens, of which decode holds the KV of 44
        await turn(all_, leg_message(longer, sampling(max_tokens=12)), second, give=True)
        load = all_.prefill.load
        cached = 0 if row == "no-prefix-cache-here" else 21 // prefill_engine.block_size * prefill_engine.block_size
        assert (load.computed_prompt_tokens, load.fetched_prompt_tokens) == (21 + 4, 44 - cached)
    check(alone, prompt, first, max_tokens=24)
    check(alone, longer, second, max_tokens=12)


async def test_a_decode_worker_that_is_lost_while_it_is_asked_is_replaced(tiny_dir: Path, alone: Monolithic) -> None:
    """Its reservation is gone before it gives anything; the prefill worker is told to send to another one."""
    prefill = prefill_params(engine_params(tiny_dir), fetch_min_tokens=4, fetch_timeout_s=60.0)
    async with crew(prefill, *(decode_params(engine_params(tiny_dir)) for _ in range(2))) as all_:
        prompt, first, second = prompt_of(21), Answer(), Answer()
        await turn(all_, leg_message(prompt, sampling(max_tokens=24)), first, give=True)
        longer = [*prompt, *first.ids(), 5, 6, 7]
        one = leg_message(longer, sampling(max_tokens=12))
        await all_.start(one, all_.decodes[0])
        want = await all_.news(all_.prefill, key_of(one), "want")
        assert (want.start, want.stop) == (20, 44)
        await all_.cancel(all_.decodes[0], key_of(one))
        two = next_leg(one)
        ticket = await all_.reserve(two, all_.decodes[1])
        await all_.hand_over(all_.prefill, two, ticket, key_of(one))
        late = pb.Give(leg=ref_of(key_of(one)), ticket=want.ticket)
        await all_.decodes[0].send(pb.RouterCommand(give=late))
        await all_.finish(two, all_.prefill, all_.decodes[1], second)
        assert all_.prefill.load.computed_prompt_tokens == 21 + 28
    check(alone, longer, second, max_tokens=12)


@pytest.mark.parametrize("fault", ["silent", "refused", "off"])
async def test_a_prefix_that_does_not_come_is_computed(
    tiny_dir: Path, alone: Monolithic, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    wish = {"fetch_min_tokens": 0 if fault == "off" else 4, "fetch_timeout_s": 0.3 if fault == "silent" else 20.0}
    async with crew(prefill_params(engine_params(tiny_dir), **wish), decode_params(engine_params(tiny_dir))) as all_:
        prompt, first, second = prompt_of(21), Answer(), Answer()
        await turn(all_, leg_message(prompt, sampling(max_tokens=24)), first, give=True)
        longer = [*prompt, *first.ids(), 5, 6, 7]
        if fault == "refused":
            monkeypatch.setattr(failpoints, "_RULES", failpoints.parse("decode.frame=raise*1"))  # where P places it
        await turn(all_, leg_message(longer, sampling(max_tokens=12)), second, give=fault != "silent")
        assert (all_.prefill.load.computed_prompt_tokens, all_.prefill.load.fetched_prompt_tokens) == (21 + 28, 0)
        wants = [event for event in all_.prefill.events if event.WhichOneof("event") == "want"]
        assert len(wants) == int(fault != "off")
    check(alone, longer, second, max_tokens=12)
