"""Workers killed while idle and while serving, clients that leave at every point of a request, storms of both."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from baton.tests.harness.gates import Gates
from baton.tests.harness.oracles import Reference, check_processes, footprint, total
from baton.tests.harness.rig import Rig, merged, running, tiny_config
from baton.tests.harness.tied import tied
from baton.tests.harness.tiny_model import EOS, special_id

END = special_id(EOS)
POINTS = (
    "prefill.chunk",
    "prefill.after_prefill",
    "prefill.first_frame",
    "prefill.frame",
    "prefill.done",
    "decode.admit",
    "decode.step",
    "decode.frame",
)


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Gates:
    return Gates(tmp_path_factory.mktemp("gates"), dict.fromkeys(POINTS, "gate"))


@pytest.fixture(scope="module")
def cluster(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Iterator[Rig]:
    changes = {"pools.prefill.max_batch_tokens": 16}
    with running(tmp_path_factory.mktemp("faults"), merged(tiny_config(tiny_dir), changes), gates) as rig:
        yield rig


@pytest.fixture
def rig(cluster: Rig, gates: Gates) -> Iterator[Rig]:
    yield cluster
    gates.release_all()
    cluster.wait_live()
    cluster.quiesce()


def ids(length: int, start: int = 0) -> list[int]:
    """A prompt of byte tokens that differs with `start`."""
    return [(start * 31 + i * i * 7 + i) % 256 for i in range(length)]


LONG: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}


def test_sp_01_what_never_fits_is_refused_with_the_capacity(rig: Rig) -> None:
    """The decode pool holds 32 x 4 = 128 tokens; the context is 256. Others are served meanwhile."""
    with ThreadPoolExecutor(2) as pool:
        small = pool.submit(rig.client.generate, token_ids=ids(8), **LONG)
        for prompt, max_tokens in ((ids(140), 10), (ids(40), 120)):
            status, message = rig.client.refused(token_ids=prompt, max_tokens=max_tokens, ignore_eos=True)
            assert status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert "128" in message or "32" in message
        assert len(small.result().token_ids) == 60


def test_sp_02_joint_growth_beyond_the_pool_is_preempted_not_stuck(rig: Rig, tiny_dir: Path) -> None:
    """Eight requests of 98 tokens in a pool of 128: each fits alone, two of them do not. All finish, all right."""
    before = total(rig.metrics(), "baton_preemptions_total")
    prompts = [ids(8, start=50 + i) for i in range(8)]
    fields = LONG | {"max_tokens": 90}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: rig.client.generate(token_ids=prompt, **fields), prompts))
    reference = Reference(tiny_dir, frozenset({END}))
    for prompt, answer in zip(prompts, answers, strict=True):
        reference.check(prompt, answer.token_ids, 90, stops=False)
    assert total(rig.metrics(), "baton_preemptions_total") > before
    assert sum(answer.timing.preemptions for answer in answers) > 0


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_kill_of_an_idle_worker(rig: Rig, worker: str, tiny_dir: Path) -> None:
    """It comes back as another incarnation, and a prompt seen before is then a prefix hit on the other side only."""
    prompt = ids(30)
    first = rig.client.generate(token_ids=prompt, max_tokens=10, temperature=0)
    Reference(tiny_dir, frozenset({END})).check(prompt, first.token_ids, 10)
    before = rig.workers()[worker]
    rig.kill_worker(worker)
    rig.wait_live()
    after = rig.workers()[worker]
    assert after["incarnation"] != before["incarnation"]
    assert after["restarts"] == before["restarts"] + 1
    again = rig.client.generate(token_ids=prompt, max_tokens=10, temperature=0)
    assert again.token_ids == first.token_ids
    hits = (again.timing.prefill_cached_tokens, again.timing.decode_cached_tokens)
    assert hits == ((0, 28) if worker == "prefill-0" else (28, 0))


def test_api_05_a_stream_that_breaks_does_not_look_finished(rig: Rig, gates: Gates) -> None:
    """Over HTTP, after the 200: whole, or an error event; never a made-up end."""
    body = {"model": "tiny-llama", "prompt": "The river", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    lines: list[str] = []

    def read() -> None:
        with httpx.stream("POST", f"{rig.http}/v1/completions", json=body | {"stream": True}, timeout=60) as response:
            assert response.status_code == 200
            lines.extend(line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))

    gates.close("decode.step")
    reader = threading.Thread(target=read)
    reader.start()
    gates.wait_reached("decode.step")
    rig.kill_worker("decode-0")
    gates.release("decode.step")
    reader.join(60)
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    reasons = [choice["finish_reason"] for event in events for choice in event.get("choices", [])]
    errors = [event for event in events if "error" in event]
    assert ("length" in reasons) != bool(errors)
    assert "stop" not in reasons


@pytest.mark.parametrize(
    ("worker", "point"),
    [
        ("prefill-0", "prefill.first_frame"),
        ("decode-0", "decode.step"),
        *(
            pytest.param(worker, point, marks=pytest.mark.slow)
            for worker, point in (
                ("prefill-0", "prefill.chunk"),
                ("prefill-0", "prefill.done"),
                ("decode-0", "decode.admit"),
            )
        ),
    ],
)
def test_kill_of_a_serving_worker_ends_the_request_soon(rig: Rig, gates: Gates, worker: str, point: str) -> None:
    """An error or a whole answer within seconds, never a hang."""
    gates.close(point)
    stream = rig.client.stream(timeout_s=30, token_ids=ids(40, start=7 + POINTS.index(point)), **LONG)
    outcome: list[grpc.StatusCode | None] = []

    def read() -> None:
        try:
            stream.rest()
            outcome.append(None)
        except grpc.RpcError as error:
            outcome.append(error.code())

    reader = threading.Thread(target=read)
    reader.start()
    gates.wait_reached(point)
    rig.kill_worker(worker)
    gates.release(point)
    start = time.monotonic()
    reader.join(25)
    assert outcome, "the request hangs"
    assert time.monotonic() - start < 20
    assert outcome[0] in (None, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_lc_12_cancel_storm(rig: Rig) -> None:
    """Waves of clients that leave at random moments; each stream ends exactly once and nothing is left behind."""
    rng = random.Random(7)
    before = total(rig.metrics(), "baton_requests_failed_total")

    def one(i: int) -> str:
        fields = LONG | {"max_tokens": rng.randint(1, 40)}
        stream = rig.client.stream(timeout_s=60, token_ids=ids(rng.randint(1, 80), start=i), **fields)
        timer = threading.Timer(rng.random() * 0.6, stream.cancel) if i % 3 == 0 else None
        if timer:
            timer.start()
        try:
            stream.rest()
        except grpc.RpcError as error:
            return str(error.code().name)
        finally:
            if timer:
                timer.cancel()
        return "OK"

    with ThreadPoolExecutor(32) as pool:
        outcomes = list(pool.map(one, range(96)))
    assert set(outcomes) <= {"OK", "CANCELLED"}
    assert outcomes.count("OK") >= 64
    assert total(rig.metrics(), "baton_requests_failed_total") == before


@pytest.mark.parametrize("victim", ["warden", "driver"])
def test_kill_of_serve_leaves_nothing(tiny_dir: Path, tmp_path: Path, victim: str) -> None:
    """`kill -9` of what the user started, or of the driver below it, in mid-stream."""
    with pytest.raises(_Done), running(tmp_path, tiny_config(tiny_dir)) as rig:  # noqa: PT012 (the block ends it)
        rig.client.stream(token_ids=ids(20), **LONG).until_tokens(1)
        before = footprint(rig.process.pid)
        (driver,) = psutil.Process(rig.process.pid).children()
        (driver if victim == "driver" else rig.process).kill()
        check_processes(before)
        raise _Done


@pytest.mark.slow
def test_kill_of_a_test_leaves_nothing(tiny_dir: Path, tmp_path: Path) -> None:
    """`kill -9` of the process that uses the rig, while a worker is frozen."""
    code = (
        "import sys, time; from pathlib import Path; from baton.tests.harness.rig import running, tiny_config\n"
        "with running(Path(sys.argv[1]), tiny_config(Path(sys.argv[2]))) as rig:\n"
        "    print(rig.process.pid, rig.pid('decode-0'), flush=True); time.sleep(100)"
    )
    command = tied([sys.executable, "-c", code, str(tmp_path), str(tiny_dir)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        serve, worker = map(int, test.stdout.readline().split())
        before = footprint(serve)
        os.kill(worker, signal.SIGSTOP)
        test.kill()
        check_processes(before)


class _Done(Exception):
    """The test has ended its cluster itself."""
