"""What workers say of themselves and the router goes by: which prefixes they hold, and how long their steps take."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from baton.proto import baton_pb2 as api
from baton.proto import worker_pb2 as pb
from baton.proto.block_digests import block_digests, short_digest
from baton.tests.harness.router_rig import FakeWorker, RouterRig, router_rig, until

WORKERS = ("prefill-0", "prefill-1", "decode-0")
PROMPT = list(range(1, 18))
BLOCKS = [short_digest(digest) for digest in block_digests(PROMPT, "", 4)]


def says(worker: FakeWorker, sequence: int, *added: int, snapshot: bool = False) -> None:
    worker.emit(prefixes=pb.PrefixChanges(sequence=sequence, snapshot=snapshot, added=added))


async def has_law(rig: RouterRig, name: str, law: pb.StepTime) -> None:
    """The worker reports the law, and the router knows: what else its load holds is seen in the metrics."""
    worker = rig.cluster.workers[name]
    worker.step_time, worker.used_blocks = law, 1
    await rig.counts("baton_kv_used_blocks", 1, worker=name)


async def prefilled(rig: RouterRig, worker: FakeWorker, tokens: list[int], salt: str = "") -> bool:
    """Whether that worker gets the prompt, three times in a row."""
    before = len(worker.commands)
    for _ in range(3):
        await rig.generate(token_ids=api.TokenIds(ids=tokens), max_tokens=2, cache_salt=salt)
    return [kind for kind, _ in worker.commands[before:]].count("prefill") == 3


async def test_a_prompt_goes_where_a_worker_says_that_its_prefix_is(tmp_path: Path) -> None:
    async with router_rig(tmp_path, *WORKERS, prefill_placement="prefix_aware") as rig:
        holder = rig.cluster.workers["prefill-1"]
        await until(lambda: holder.watched == 1)
        assert rig.cluster.workers["decode-0"].watched == 0  # its pool's policy does not ask
        says(holder, 0, *BLOCKS, snapshot=True)
        await rig.counts("baton_prefix_known_blocks", 4, worker="prefill-1")
        assert await prefilled(rig, holder, PROMPT)
        assert not await prefilled(rig, rig.cluster.workers["prefill-0"], PROMPT)
        assert await prefilled(rig, holder, [*PROMPT[:4], 99, 98, 97, 96])  # the first block is the same


async def test_after_a_gap_the_router_asks_anew_and_once(tmp_path: Path) -> None:
    async with router_rig(tmp_path, *WORKERS, prefill_placement="prefix_aware") as rig:
        first, second = rig.cluster.workers["prefill-0"], rig.cluster.workers["prefill-1"]
        await until(lambda: first.watched == second.watched == 1)
        says(first, 4, snapshot=True)
        says(first, 5, *BLOCKS[:1])
        says(first, 7, 12345)
        says(first, 8, 12346)
        await until(lambda: first.watched == 2)
        says(first, 8, snapshot=True)
        says(first, 9, *BLOCKS)
        await rig.counts("baton_prefix_known_blocks", 4, worker="prefill-0")
        assert first.watched == 2
        assert await prefilled(rig, first, PROMPT)


async def test_without_events_the_router_goes_by_what_it_sent(tmp_path: Path) -> None:
    async with router_rig(tmp_path, *WORKERS, prefill_placement="prefix_aware", prefix_events=False) as rig:
        workers = [rig.cluster.workers[name] for name in WORKERS[:2]]
        await rig.generate(token_ids=api.TokenIds(ids=PROMPT), max_tokens=2)
        (holder,) = [worker for worker in workers if worker.commands]
        assert await prefilled(rig, holder, PROMPT)
        assert [worker.watched for worker in workers] == [0, 0]


async def test_what_no_worker_can_do_in_time_is_refused_with_the_time_it_would_be_late(tmp_path: Path) -> None:
    objective = {"ttft_objective_s": 1.0, "prefill_placement": "latency_aware"}
    async with router_rig(tmp_path, *WORKERS, **objective) as rig:
        for name in WORKERS[:2]:
            await has_law(rig, name, pb.StepTime(a=0.0, b=0.25, c=0.0))
        answer = await rig.generate(token_ids=api.TokenIds(ids=PROMPT[:4]), max_tokens=2)
        assert answer.prompt_tokens == 4
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.generate(token_ids=api.TokenIds(ids=PROMPT[:14]), max_tokens=2)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(caught.value.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "2500"
        assert await rig.metric("baton_requests_failed_total", code="exhausted") == 1


async def test_a_decode_worker_that_would_be_too_slow_takes_no_new_request(tmp_path: Path) -> None:
    objective = {"tpot_objective_s": 0.01, "decode_placement": "latency_aware"}
    async with router_rig(tmp_path, *WORKERS, **objective) as rig:
        await has_law(rig, "decode-0", pb.StepTime(a=0.02, b=0.0, c=0.0))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.generate(token_ids=api.TokenIds(ids=PROMPT), max_tokens=100)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(caught.value.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1000"


async def test_a_session_keeps_its_worker_whichever_door_it_comes_by(tmp_path: Path) -> None:
    async with router_rig(tmp_path, *WORKERS, prefill_placement="session_affinity") as rig:
        workers = [rig.cluster.workers[name] for name in WORKERS[:2]]

        def served() -> list[int]:
            return [[kind for kind, _ in worker.commands].count("prefill") for worker in workers]

        homes = set[int]()
        for number in range(8):
            before = served()
            name = f"session {number}"
            await rig.generate(token_ids=api.TokenIds(ids=PROMPT), max_tokens=2, session_id=name)
            for body in ({"session_id": name}, {"user": name}, {"user": "another", "session_id": name}):
                answer = await rig.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, **body})
                assert answer.status_code == 200
            gained = [now - was for now, was in zip(served(), before, strict=True)]
            assert sorted(gained) == [0, 4]
            homes.add(gained.index(4))
        assert homes == {0, 1}


async def test_an_urgent_request_waits_for_less(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        worker, release = rig.cluster.workers["prefill-0"], asyncio.Event()
        compute, lengths = worker.on_prefill, list[int]()

        async def held(leg: pb.Leg, ticket: bytes) -> None:
            lengths.append(len(leg.prompt_token_ids))
            await release.wait()
            await compute(leg, ticket)

        worker.on_prefill = held
        prompt = api.TokenIds(ids=[7] * 100)  # two of them are more than the lookahead of 128
        calls = [asyncio.create_task(rig.generate(token_ids=prompt, max_tokens=2)) for _ in range(2)]
        await until(lambda: len(lengths) == 2)
        for priority, tokens in ((5, 101), (0, 102), (-5, 103)):
            ids = api.TokenIds(ids=[7] * tokens)
            calls.append(asyncio.create_task(rig.generate(token_ids=ids, max_tokens=2, priority=priority)))
            await rig.counts("baton_router_inflight_requests", len(calls))
        release.set()
        await asyncio.gather(*calls)
        assert lengths == [100, 100, 103, 102, 101]
