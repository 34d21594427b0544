"""Prompts that a decode worker computes itself: beside its batch, in bounded chunks, and freed like everything else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from baton.engine.step import SampledToken, TokenScore
from baton.proto import failpoints
from baton.proto import worker_pb2 as pb
from baton.proto.errors import InternalError, InvalidRequest
from baton.proto.leg import key_of, ref_of
from baton.tests.harness.legs_rig import BLOCK, DecodeBook, drawn, leg
from baton.tests.harness.monolithic import Monolithic, sampling
from baton.tests.harness.worker_rig import WorkerProcess, decode_params, engine_params, session
from baton.tests.harness.worker_router import Answer, leg_message


def prompt_of(length: int, start: int = 7) -> list[int]:
    return [(start * (length + 1) + 13 * index) % 250 for index in range(length)]


# ---- the book ------------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_and_its_choices_join_the_batch() -> None:
    book = DecodeBook(blocks=20, budget=4)
    one = book.submit(leg(10, 4, choices=(0, 1)), compute=True)
    chunks = [[(step.start, step.end) for step in book.step()] for _ in range(3)]
    assert chunks == [[(0, 4)], [(4, 8)], [(8, 10)]]
    assert book.expected == {}  # nobody sends anything
    (first,) = book.of("first")
    assert [(token.choice, token.index) for token in first.tokens] == [(0, 0), (1, 0)]
    assert (first.chunks, first.cached_tokens) == (3, 0)
    assert [event.WhichOneof("event") for event in book.told] == ["first", "committed", "tokens"]
    for _ in range(4):
        book.step()
    assert book.finished() == {(one.key[0], 0): 1, (one.key[0], 1): 1}
    assert book.pool.used == 0
    assert book.legs.load().computed_prompt_tokens == 10


def test_a_long_prompt_takes_no_step_from_running_streams_and_no_more_than_its_budget_of_each() -> None:
    book = DecodeBook(blocks=40, budget=4)
    streams = [book.submit(leg(5, 30, first=100 * number)) for number in range(3)]
    book.step()
    for stream in streams:
        book.arrive(stream)
    book.submit(leg(40, 2, first=900), compute=True)
    for _ in range(10):
        steps = book.step()
        alone = [step for step in steps if len(step.tokens) == 1]
        assert {step.request_id for step in alone} == {stream.key[0] for stream in streams}
        assert sum(len(step.tokens) for step in steps) - len(alone) == 4
    assert len(book.of("first")) == 1


def test_what_is_cached_is_not_computed() -> None:
    book = DecodeBook(blocks=20, budget=64)
    book.submit(leg(9, 2), compute=True)
    book.step()
    book.step()
    again = book.submit(leg(12, 2), compute=True)
    (step,) = book.step()
    assert (step.request_id, step.start, step.end) == (again.key[0], 2 * BLOCK, 12)
    assert book.of("first")[1].cached_tokens == 2 * BLOCK


def test_first_tokens_that_end_every_choice_commit_nothing() -> None:
    book = DecodeBook()
    book.submit(leg(5, 1, choices=(0, 1)), compute=True)
    book.step()
    book.step()
    assert [event.WhichOneof("event") for event in book.told] == ["first"]
    assert [token.finish_reason for token in book.of("first")[0].tokens] == ["length", "length"]
    assert (book.pool.used, book.step()) == (0, [])


@pytest.mark.parametrize("end", ["cancel", "session", "failure"])
@pytest.mark.parametrize("steps", range(4))
def test_a_prompt_that_is_given_up_frees_its_blocks_at_once(end: str, steps: int) -> None:
    """In the line, and between any two of its chunks; what was computed can be found again, and nothing else."""
    book = DecodeBook(blocks=12, budget=4)
    one = leg(14, 4)
    book.legs.submit(7, one, 0.0, compute=True)
    for _ in range(steps):
        book.step()
    if end == "cancel":
        book.do(book.legs.cancel(one.key))
    elif end == "session":
        book.do(book.legs.session_ended(7))
    else:
        book.do(book.legs.fail(one.key, InternalError("broken")))
    assert (book.pool.used, book.step()) == (0, [])
    assert len(book.pool.match(one.tokens, "")) == steps
    assert len(book.of("failed")) == (end == "failure")


def test_only_its_deadline_ends_a_prompt_that_waits_for_its_turn() -> None:
    book = DecodeBook(blocks=40, budget=1)
    slow = book.submit(leg(60, 2, deadline=1000.0), compute=True)
    book.step()
    book.now = 900.0  # far beyond the time in which KV of a prefill worker must arrive
    book.step()
    assert book.of("failed") == []
    book.now = 1001.0
    book.step()
    assert [(failed.leg.request_id, failed.code) for failed in book.of("failed")] == [
        (slow.key[0], "deadline_exceeded")
    ]
    assert book.pool.used == 0


def test_what_is_thought_of_a_prompt_is_told_chunk_by_chunk_and_nothing_cached_is_used() -> None:
    book = DecodeBook(blocks=20, budget=6)
    book.submit(leg(9, 2), compute=True)
    for _ in range(3):
        book.step()
    one = leg(9, 3, prompt_logprobs=0)
    book.submit(one, compute=True)
    book.do(book.legs.admit(0.0))
    for due in (6, 2):  # behind the last token of the prompt comes nothing
        (chunk,) = book.legs.plan_prompts()
        assert chunk.scores is not None
        assert len(chunk.scores.targets) == due
        chunk.scores.found += [TokenScore(-float(token), ()) for token in chunk.scores.targets]
        book.do(book.legs.prompts_computed([chunk], drawn([chunk]), 0.0))
    said = book.of("prompt_scores")
    assert [body.start for body in said] == [1, 7]
    assert [score.logprob for body in said for score in body.scores] == [-float(token) for token in one.prompt[1:]]
    kinds = [event.WhichOneof("event") for event in book.told]
    assert kinds[-5:] == ["prompt_scores", "prompt_scores", "first", "committed", "tokens"]


def test_a_prompt_from_which_nothing_can_be_drawn_fails_with_the_reason() -> None:
    book = DecodeBook()
    one = book.submit(leg(5, 4), compute=True)
    book.do(book.legs.admit(0.0))
    book.do(book.legs.prompts_computed(book.legs.plan_prompts(), [], 0.0))
    error = InvalidRequest("the grammar allows no token", field="grammar")
    none = [[SampledToken(0, 0, None, (), error)]]
    book.do(book.legs.prompts_computed(book.legs.plan_prompts(), none, 0.0))
    assert [(failed.leg.request_id, failed.code) for failed in book.of("failed")] == [(one.key[0], "invalid_request")]
    assert (book.of("first"), book.pool.used) == ([], 0)


# ---- live workers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tiny_dir: Path) -> Monolithic:
    """The oracle."""
    return Monolithic(tiny_dir)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 12},
    "sampled": {"n": 3, "temperature": 1.0, "seed": 11, "repetition_penalty": 1.2, "max_tokens": 10},
}


@pytest.mark.parametrize("tensor_parallel", [1, 2])
async def test_answers_are_those_of_one_engine(tiny_dir: Path, alone: Monolithic, tensor_parallel: int) -> None:
    """Prompts of one to eight chunks at the same time, some of which begin as another did."""
    asked = [(prompt_of(length), changes) for length in (1, 8, 33, 60, 61) for changes in CASES.values()]
    params = decode_params(engine_params(tiny_dir, tensor_parallel=tensor_parallel, kv_blocks=256), max_sequences=64)
    worker = WorkerProcess(params)
    try:
        await asyncio.to_thread(worker.wait_ready)
        async with session(worker) as side:

            async def served(prompt: list[int], changes: dict[str, Any]) -> Answer:
                message, answer = leg_message(prompt, sampling(**changes)), Answer()
                await side.send(pb.RouterCommand(reserve=pb.Reserve(leg=message, compute=True)))
                key, count = key_of(message), changes.get("n", 1)
                await side.until(lambda: sum(bool(t.finish_reason) for t in side.tokens(key)) == count)
                (first,) = side.of(key, "first")
                for token in (*first.tokens, *side.tokens(key)):
                    answer.add(token)
                return answer

            answers = await asyncio.gather(*(served(*one) for one in asked))
            assert side.load.computed_prompt_tokens <= sum(len(prompt) for prompt, _ in asked)
            await side.wait_idle()
    finally:
        await asyncio.to_thread(worker.stop)
    for (prompt, changes), answer in zip(asked, answers, strict=True):
        expected = alone.run(prompt, **changes)
        assert [answer.ids(choice) for choice in sorted(answer.tokens)] == [choice.token_ids for choice in expected]


async def test_a_cancel_between_chunks_frees_the_worker(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_RULES", failpoints.parse("decode.step=sleep(0.1)"))
    worker = WorkerProcess(decode_params(engine_params(tiny_dir), max_batch_tokens=1))
    try:
        await asyncio.to_thread(worker.wait_ready)
        async with session(worker) as side:
            message = leg_message(prompt_of(60), sampling(max_tokens=4))
            await side.send(pb.RouterCommand(reserve=pb.Reserve(leg=message, compute=True)))
            await side.until(lambda: side.load.computed_prompt_tokens > 2)
            await side.send(pb.RouterCommand(cancel=pb.Cancel(leg=ref_of(key_of(message)))))
            await side.wait_idle()
            assert side.load.computed_prompt_tokens < 60
            assert side.of(key_of(message), "first") == []
    finally:
        await asyncio.to_thread(worker.stop)
