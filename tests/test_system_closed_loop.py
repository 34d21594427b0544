"""`baton bench --compare` on a live cluster: laws measured, requests recorded, simulated beside measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from baton.tests.harness.rig import merged, tiny_config


@pytest.mark.slow
def test_a_live_cluster_is_measured_loaded_and_simulated(tiny_dir: Path, tmp_path: Path) -> None:
    changes = {
        "pools.prefill.memory": 512 * 2048,
        "pools.decode.memory": 512 * 2048,
        "slo": {"ttft": {"p99": "5s"}, "tpot": {"p99": "1s"}},
        "workload": {"rate": "10/s", "prompt_tokens": {"mean": 30}, "output_tokens": {"mean": 12}},
        "hardware": "cpu",
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(merged(tiny_config(tiny_dir), changes)))
    html, record = tmp_path / "report.html", tmp_path / "record.jsonl"
    command = [sys.executable, "-m", "baton.cluster.main", "bench", "--config", str(config), "--requests", "12"]
    options = ["--compare", "--json", "--html", str(html), "--record", str(record)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["measured"]["requests"]["completed"] == 12
    assert result["simulated"]["requests"]["completed"] == 12
    assert result["profile"]["prefill_blocks"] == result["profile"]["decode_blocks"] == 512
    assert result["timeline"]["measured"]["at"]
    assert "simulated error" in html.read_text()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(lines) == 16
    assert {line["output_tokens"] for line in lines} == {12}
    profile = tmp_path / "profile.yaml"
    profile.write_text(yaml.safe_dump(result["profile"]))
    again = [sys.executable, "-m", "baton.cluster.main", "simulate", str(config), "--trace", str(record), "--json"]
    replayed = subprocess.run(
        [*again, "--profile", str(profile)], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(replayed.stdout)["simulated"]["requests"]["completed"] == 16
