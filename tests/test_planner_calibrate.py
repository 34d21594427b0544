"""Calibration of a live engine, a plan on what it measured, and a cluster that serves that plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from baton.cluster import config_load
from baton.cluster.planner import measuring, setup
from baton.cluster.planner.calibrate import check, fitted
from baton.cluster.planner.measuring import Timed
from baton.proto.errors import ConfigError
from baton.proto.step_time import decode_features
from baton.tests.harness.rig import running, tiny_config
from baton.tests.harness.tied import tied
from baton.tests.harness.tiny_model import write_tiny_model


def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = tied([sys.executable, "-m", "baton.cluster.main", *arguments])
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_law_is_found_again_with_its_range() -> None:
    rng = np.random.default_rng(5)
    cells = []
    for count in (1, 2, 4, 8, 16):
        for context in (32, 256, 1024):
            seconds = 2e-3 + 1e-4 * count + 1e-7 * count * context
            noisy = seconds * rng.uniform(0.98, 1.02)
            cells.append(Timed(decode_features([context] * count), count, count * context, noisy))
    law = fitted(cells)
    assert (law.a, law.b, law.c) == pytest.approx((2e-3, 1e-4, 1e-7), rel=0.1)
    assert law.tokens == [1, 16]
    assert law.context == [32, 16 * 1024]
    assert 0 < law.mean_error < 0.03
    with pytest.raises(ConfigError, match=r"kv\.memory: leaves room for 3 steps"):
        fitted(cells[:3])


def test_the_grid_keeps_to_the_limits_of_the_engine() -> None:
    grid = measuring.grid(64, 16, 256, 640, 4)
    assert max(stop - start for start, stop in grid.chunks) == 64
    assert max(stop for _, stop in grid.chunks) < 256
    assert max(count for count, _ in grid.batches) == 16
    assert all(count * context < 640 for count, context in grid.batches)


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "c.yaml"
    place.write_text(yaml.safe_dump(tiny_config(tmp_path)))
    with pytest.raises(ConfigError, match=r"pools\.decode\.tensor_parallel"):
        check(config_load.load(str(place), ["pools.decode.tensor_parallel=2"]), tmp_path / "hw.yaml")
    with pytest.raises(ConfigError, match=r"must end in \.yaml"):
        check(config_load.load(str(place), []), tmp_path / "hw")


def test_an_engine_is_measured_and_plans_rest_on_it(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    settings = tiny_config(tmp_path / "model")
    settings["pools"]["prefill"]["memory"] = settings["pools"]["decode"]["memory"] = "4MiB"
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    done = baton("calibrate", str(tmp_path / "c.yaml"), "--output", str(tmp_path / "hw.yaml"), "--repeats", "2")
    assert done.returncode == 0, done.stderr
    assert "prefill:" in done.stdout
    config = config_load.load(str(tmp_path / "c.yaml"), [f"hardware={tmp_path / 'hw.yaml'}"])
    cost = setup.site(config).cost("decode")
    assert cost.measured is not None
    assert cost.decode_law.seconds((1, 1, 10)) > 0
    assert cost.decode_law == tuple(getattr(cost.measured.decode, name) for name in "abc")
    other = config_load.load(str(tmp_path / "c.yaml"), [f"hardware={tmp_path / 'hw.yaml'}", "pools.decode.threads=2"])
    assert setup.site(other).cost("decode").measured is None


@pytest.mark.slow
def test_a_written_plan_is_served(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    settings = tiny_config(tmp_path / "model")
    lengths = {"rate": "20/s", "prompt_tokens": {"mean": 20}, "output_tokens": {"mean": 10}}
    settings |= {"hardware": "cpu-2core", "workload": lengths, "slo": {"ttft": {"p99": "1s"}, "tpot": {"p99": "200ms"}}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    done = baton("plan", str(tmp_path / "c.yaml"), "--write", str(tmp_path / "plan.yaml"))
    assert done.returncode == 0, done.stderr
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    with running(tmp_path, written) as rig:
        answer = rig.client.generate(token_ids=[5, 6, 7], max_tokens=4, temperature=0, ignore_eos=True)
    assert len(answer.token_ids) == 4
