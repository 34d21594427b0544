"""Prompts that are computed where they are decoded, on real processes: the same answers, whatever fails meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from baton.tests.harness import oracles
from baton.tests.harness.gates import Gates
from baton.tests.harness.monolithic import Monolithic
from baton.tests.harness.one_pair import counted, leave, until
from baton.tests.harness.reader import Reader, ids
from baton.tests.harness.rig import Rig, merged, running, tiny_config

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def oracle(tiny_dir: Path) -> Monolithic:
    return Monolithic(tiny_dir)


@pytest.fixture(scope="module")
def started(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Gates]]:
    changes = {
        "cluster.restart_delay_max": "100ms",
        "pools.decode.replicas": 2,
        "pools.decode.memory": "1MiB",
        "pools.decode.prompt_chunk": 8,
        "router.placement.disaggregation": "never",
    }
    folder = tmp_path_factory.mktemp("disaggregation")
    gates = Gates(folder / "gates", {"decode.step": "gate"})
    with running(folder, merged(tiny_config(tiny_dir), changes), gates) as rig:
        yield rig, gates


@pytest.fixture
def cluster(started: tuple[Rig, Gates]) -> Iterator[tuple[Rig, Gates]]:
    yield started
    rig, gates = started
    gates.release_all()
    rig.wait_all_ready()
    rig.quiesce()


def test_no_prompt_goes_to_a_prefill_worker(cluster: tuple[Rig, Gates], oracle: Monolithic) -> None:
    rig, _ = cluster
    prompts = [ids(length) for length in (1, 7, 8, 9, 40, 60, 60, 41)]
    time.sleep(1.0)  # heartbeats tell what the self-tests counted
    before = counted(rig, "baton_worker_steps_total", role="prefill")  # the workers were tested when they started

    def ask(prompt: list[int]) -> Any:
        return rig.client.generate(token_ids=prompt, max_tokens=12, **GREEDY)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle.run(prompt, max_tokens=12)[0].token_ids
        assert (answer.timing.prefill_worker, answer.timing.kv_bytes, answer.timing.attempts) == ("", 0, 1)
        assert answer.timing.prefill_s > 0
    assert counted(rig, "baton_prefilled_on_decode_total") >= len(prompts)
    assert counted(rig, "baton_worker_steps_total", role="prefill") == before
    assert counted(rig, "baton_kv_transfers_total") == 0


@pytest.mark.parametrize("chunks", [0, 2])
def test_a_client_that_leaves_frees_the_worker_between_chunks(cluster: tuple[Rig, Gates], chunks: int) -> None:
    rig, gates = cluster
    gates.close("decode.step")
    reader = Reader(rig, ids(60), 20)
    for _ in range(chunks):
        gates.wait_reached("decode.step")
        gates.let_one("decode.step")
    gates.wait_reached("decode.step")
    leave(rig, reader)
    gates.release("decode.step")
    oracles.check_pool(rig.http)
    assert reader.end(40).code is grpc.StatusCode.CANCELLED


def test_a_worker_that_dies_in_the_middle_of_a_prompt_is_replaced(
    cluster: tuple[Rig, Gates], oracle: Monolithic
) -> None:
    rig, gates = cluster
    gates.close("decode.step")
    reader = Reader(rig, ids(50), 15)
    gates.wait_reached("decode.step")
    gates.let_one("decode.step")
    victim = gates.wait_reached("decode.step").process
    rig.kill_worker(victim)
    gates.release("decode.step")
    outcome = reader.end(60)
    assert outcome.answer is not None
    assert outcome.answer.token_ids == oracle.run(reader.prompt, max_tokens=15)[0].token_ids
    assert outcome.answer.timing.attempts == 2
    until(lambda: counted(rig, "baton_kv_total_blocks", role="decode"), "no worker comes back")


def test_conditional_serves_both_ways(tiny_dir: Path, tmp_path: Path, oracle: Monolithic) -> None:
    """What each prompt's way is depends on how fast the machine is; the answers do not."""
    changes = {
        "pools.decode.memory": "1MiB",
        "router.placement.disaggregation": "conditional",
        "kv.fetch_min_tokens": 8,
    }
    with running(tmp_path, merged(tiny_config(tiny_dir), changes)) as rig:
        prompts = [ids(1 + 7 * number % 60) for number in range(40)]

        def ask(number: int) -> Any:
            time.sleep(0.01 * (number % 7))
            return rig.client.generate(token_ids=prompts[number], max_tokens=8, **GREEDY)

        for _ in range(2):
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(ask, range(40)))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.token_ids == oracle.run(prompt, max_tokens=8)[0].token_ids
        away = sum(answer.timing.prefill_worker != "" for answer in answers)
        here = counted(rig, "baton_prefilled_on_decode_total")
        print(f"{away} of 40 prompts of the second round at the prefill worker; {here:g} of 80 at the decode worker")
        rig.quiesce()
