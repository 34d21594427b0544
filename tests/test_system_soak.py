"""Two minutes of 64 concurrent streams, a third of them cancelled at random moments: everything ends, nothing leaks."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from baton.tests.harness.oracles import Reference, total
from baton.tests.harness.rig import Rig, merged, running, tiny_config
from baton.tests.harness.tiny_model import EOS, special_id

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STREAMS = 64
SECONDS = 120
BLOCK_BYTES = 2 * 2 * 2 * 4 * 16 * 4  # of T0, see harness/rig.py
LONGEST = 120 + 60  # tokens of one request
NEEDED = STREAMS * (LONGEST // 4 + 1)  # blocks for all streams at their longest


def _one(rig: Rig, rng: random.Random, reference: Reference, lock: threading.Lock) -> str:
    """One stream of random length; how it ended."""
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 120))]
    count = rng.randint(1, 60)
    stream = rig.client.stream(120, token_ids=prompt, max_tokens=count, temperature=0, ignore_eos=True)
    leave_at = rng.randint(0, count) if rng.random() < 1 / 3 else None
    try:
        for answer in stream:
            if leave_at is not None and len(answer.choices[0].token_ids) >= leave_at:
                stream.cancel()
    except grpc.RpcError as error:
        if leave_at is None or error.code() is not grpc.StatusCode.CANCELLED:
            raise
        return "cancelled"
    stream.answer.check_whole()
    with lock:  # one of a few is compared: the reference computes alone
        if rng.random() < 0.02:
            reference.check(prompt, stream.answer.token_ids, count, stops=False)
    return "completed"


def _storm(rig: Rig, reference: Reference, seed: int) -> Counter[str]:
    deadline = time.monotonic() + SECONDS
    lock = threading.Lock()

    def client(number: int) -> list[str]:
        rng = random.Random(seed * 1000 + number)
        ends = []
        while time.monotonic() < deadline:
            ends.append(_one(rig, rng, reference, lock))
        return ends

    with ThreadPoolExecutor(STREAMS) as threads:
        return Counter(end for ends in threads.map(client, range(STREAMS)) for end in ends)


@pytest.fixture(params=["roomy", "a third"])
def rig(request: pytest.FixtureRequest, tiny_dir: Path, tmp_path: Path) -> Iterator[Rig]:
    """Decode blocks for all streams at their longest, or for a third of them."""
    blocks = NEEDED if request.param == "roomy" else NEEDED // 3
    changes: dict[str, Any] = {
        "pools.decode.memory": blocks * BLOCK_BYTES,
        "pools.decode.max_sequences": STREAMS,
        "pools.prefill.memory": 512 * BLOCK_BYTES,
    }
    with running(tmp_path, merged(tiny_config(tiny_dir), changes)) as rig:
        yield rig


def test_64_streams_for_two_minutes(rig: Rig, tiny_dir: Path) -> None:
    ends = _storm(rig, Reference(tiny_dir, frozenset({special_id(EOS)})), seed=7)
    rig.quiesce(10)
    metrics = rig.metrics()
    assert total(metrics, "baton_requests_failed_total") == 0
    assert ends["completed"] > 2 * STREAMS
    assert ends["cancelled"] > STREAMS / 2
    print(f"{dict(ends)}, preemptions {total(metrics, 'vllm:num_preemptions_total'):g}")
