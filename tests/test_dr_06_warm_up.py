"""DR-06: nothing is left for the first request to set up: a pair is ready only after a transfer and a decode step."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import psutil
from baton.tests.harness.rig import Rig, merged, running, tiny_config


def _computed_s(rig: Rig) -> float:
    """CPU time of the cluster so far."""
    processes = psutil.Process(rig.process.pid).children(recursive=True)
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def test_dr_06_the_first_request_is_about_as_fast_as_later_ones(tiny_dir: Path, tmp_path: Path) -> None:
    changes = {"pools.decode.tensor_parallel": 2, "pools.decode.memory": "128KiB"}
    with running(tmp_path, merged(tiny_config(tiny_dir), changes)) as rig:
        took = []
        for number in range(12):
            started, used = time.monotonic(), _computed_s(rig)
            rig.client.generate(token_ids=[100 + number] * 9, max_tokens=4, temperature=0, ignore_eos=True)
            took.append(min(time.monotonic() - started, _computed_s(rig) - used))  # what others took does not count
        later = statistics.median(took[2:])
        assert took[0] < 3 * max(took[2:]) + 0.1, f"first {took[0]:.3f} s, later {later:.3f} s: {took}"
