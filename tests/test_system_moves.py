"""Two decode workers behind a real router: a drain moves streams with their KV, a decode worker that is lost before it
committed costs no second prefill, and a second turn fetches what only decode holds. O-eq everywhere."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from baton.proto import control_pb2
from baton.proto.control_pb2_grpc import AdminStub
from baton.tests.harness.client import Answer
from baton.tests.harness.gates import Gates
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.oracles import total
from baton.tests.harness.rig import Rig, merged, running, tiny_config

CRAWL = "sleep(0.3)?"  # of a step, so that streams last longer than what is done to them
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def ids(length: int, start: int = 0) -> list[int]:
    """A prompt of byte tokens that differs with `start`."""
    return [(start * 31 + i * i * 7 + i) % 256 for i in range(length)]


@pytest.fixture(scope="module")
def alone(tiny_dir: Path) -> Monolithic:
    """The oracle."""
    return Monolithic(tiny_dir)


@pytest.fixture(scope="module")
def cluster(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Gates]]:
    changes = {
        "pools.decode.replicas": 2,
        "pools.decode.memory": 192 * 2048,  # blocks x bytes: all streams at their longest on one worker
        "pools.prefill.max_batch_tokens": 16,
        "kv.fetch_min_tokens": 8,
        "clocks.fetch": "20s",
        "router.placement": {"decode": "round_robin"},
    }
    folder = tmp_path_factory.mktemp("moves")
    gates = Gates(folder / "gates", {"decode.step": CRAWL, "decode.frame": "gate"})
    with running(folder, merged(tiny_config(tiny_dir), changes), gates) as rig:
        yield rig, gates


@pytest.fixture
def rig(cluster: tuple[Rig, Gates]) -> Iterator[Rig]:
    yield cluster[0]
    cluster[1].release_all()
    cluster[0].wait_all_ready()
    cluster[0].quiesce()


def counted(rig: Rig, name: str, **labels: str) -> float:
    return total(rig.metrics(), name, **labels)


def test_a_second_turn_computes_only_the_new_message(rig: Rig, alone: Monolithic) -> None:
    """The answer of turn 1 is cached on the decode workers alone; both have it, so that either may serve turn 2."""
    prompt = ids(30)
    first, same = (rig.client.generate(token_ids=prompt, max_tokens=20, **GREEDY) for _ in range(2))
    assert {first.timing.decode_worker, same.timing.decode_worker} == {"decode-0", "decode-1"}
    longer = [*prompt, *first.token_ids, 1, 2, 3]  # 53 tokens; decode has the KV of 49 of them, in blocks of 4
    before = counted(rig, "baton_computed_prompt_tokens_total")
    second = rig.client.generate(token_ids=longer, max_tokens=10, **GREEDY)
    assert counted(rig, "baton_computed_prompt_tokens_total") - before == 53 - 48
    assert counted(rig, "baton_fetched_prompt_tokens_total") == 48 - 28
    assert second.token_ids == alone.run(longer, max_tokens=10)[0].token_ids


def test_a_decode_worker_lost_before_the_commit_costs_no_second_prefill(
    cluster: tuple[Rig, Gates], rig: Rig, alone: Monolithic
) -> None:
    """SIGKILL while it is about to place a frame: the prompt's KV is sent again, to the other one."""
    gates, prompt, answers = cluster[1], ids(60, start=3), list[Answer]()
    names = ("baton_computed_prompt_tokens_total", "baton_recomputed_tokens_total", "baton_legs_handed_over_total")
    before = [counted(rig, name) for name in names]
    gates.close("decode.frame")
    stream = rig.client.stream(token_ids=prompt, max_tokens=12, **GREEDY)
    reader = threading.Thread(target=lambda: answers.append(stream.rest()))
    reader.start()
    gates.wait_reached("decode.frame")
    stuck = [name for name, w in rig.workers().items() if w["role"] == "decode" and _held(rig, name)]
    rig.kill_worker(stuck[0], signal.SIGKILL)
    gates.release("decode.frame")
    reader.join(60)
    (answer,) = answers
    assert answer.token_ids == alone.run(prompt, max_tokens=12)[0].token_ids
    after = [counted(rig, name) for name in names]
    rig.wait_all_ready()
    selftest = after[0] - before[0] - 60  # a prompt of five tokens, when the lost one has come back meanwhile
    assert selftest in (0, 5)
    assert (after[1] - before[1], after[2] - before[2]) == (0, 1)


def _held(rig: Rig, worker: str) -> bool:
    return counted(rig, "baton_kv_held_legs", worker=worker) > 0


def test_draining_a_decode_worker_moves_its_streams(cluster: tuple[Rig, Gates], rig: Rig, alone: Monolithic) -> None:
    """Four streams, two of them on each; the drain does not wait for their ends, and no client notices."""
    rig.quiesce()  # and the router knows what the workers have counted
    prompts = [ids(20, start=10 + n) for n in range(4)]
    computed, retries = (counted(rig, name) for name in ("baton_computed_prompt_tokens_total", "baton_retries_total"))
    cluster[1].close("decode.step")
    streams = [rig.client.stream(token_ids=prompt, max_tokens=90, **GREEDY) for prompt in prompts]
    for stream in streams:
        stream.until_tokens(2)
    with ThreadPoolExecutor(4) as pool, grpc.insecure_channel(rig.admin) as channel:
        rest = [pool.submit(stream.rest) for stream in streams]
        drained: Any = AdminStub(channel).Drain(control_pb2.DrainRequest(worker_id="decode-1"), timeout=60)
        assert "decode-1 is drained" in drained.message
        assert not any(one.done() for one in rest)
        cluster[1].release("decode.step")
        answers = [one.result(60) for one in rest]
    assert counted(rig, "baton_legs_handed_over_total", cause="moved") == 2
    selftest = counted(rig, "baton_computed_prompt_tokens_total") - computed - sum(map(len, prompts))
    assert selftest in (0, 5)  # of the worker that comes in its place
    assert counted(rig, "baton_retries_total") == retries
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == alone.run(prompt, max_tokens=90)[0].token_ids
        assert answer.timing.decode_worker == "decode-0"
